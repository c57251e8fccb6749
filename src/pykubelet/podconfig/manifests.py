"""Decoding of manifests: YAML or JSON with pods, ConfigMaps and Secrets.

A manifest contains `Pod`s, `PodList`s, or `List`s as printed by `kubectl get -o yaml`, and `ConfigMap`s and
`Secret`s (`local_objects.py`). All documents of a file with `---` lines are read (upstream silently reads
only the first). Unknown fields are ignored and `null` means absent, as in the API; a field of the wrong type
is rejected with its path. Manifests are untrusted: this module and the document reader bound size, nesting
and aliases.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykubelet.api.core import Secret
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.config.documents import read_text_document, yaml_documents
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.podconfig.local_objects import KINDS, BadObject, LocalObject, read_object
from pykubelet.util.text import quoted

MAX_BYTES = 10 * 1024 * 1024
_LISTS = ("PodList", "List")
_ERROR_WITH_PATH = re.compile(r"(?P<what>.*) - at `(?P<path>.*)`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a manifest."""

    pods: Sequence[Pod] = ()
    objects: Sequence[LocalObject] = ()
    unused: Sequence[str] = ()
    """Kinds of ignored objects, which are not used where the manifest is read."""

    @property
    def has_secret(self) -> bool:
        """Whether the manifest contains a Secret, so that its file must not be world-readable."""
        return "Secret" in self.unused or any(isinstance(found, Secret) for found in self.objects)


def read_manifest(data: bytes, where: str, *, objects: bool = True) -> Contents:
    """Decode a manifest, without defaults; `where` (a path, a URL) identifies it in messages.

    Without `objects` ConfigMaps and Secrets are not decoded, only listed as unused. Raises ConfigError with
    one line per problem.
    """
    pods: list[Pod] = []
    found: list[LocalObject] = []
    unused: list[str] = []
    problems: list[Problem] = []
    for path, kind, document in _objects(_documents(data, where), where):
        try:
            if kind == "Pod":
                pods.append(from_document(Pod, _without_nulls(document)))
            elif objects:
                found.append(read_object(kind, document))
            else:
                unused.append(kind)
        except BadObject as err:
            problems += [Problem(where, f"{_name(kind, document)}{problem}") for problem in err.problems]
        except ValueError as err:
            problems.append(Problem(where, f"{_name(kind, document)}{_with_path(path, str(err))}"))
    if problems:
        raise ConfigError(problems)
    return Contents(pods, found, unused)


def read_bytes(path: Path) -> bytes:
    """Read a manifest file: at most `MAX_BYTES`, and never from a pipe or device that could block.

    Raises ConfigError if the file is too large, and OSError if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(MAX_BYTES + 1)
    return bounded(data, str(path))


def bounded(data: bytes, where: str) -> bytes:
    """Return the bytes unless they are too many for a manifest. Raises ConfigError."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            [Problem(where, f"is larger than {MAX_BYTES // 1024**2} MiB: split it into several")]
        )
    return data


def _documents(data: bytes, where: str) -> list[Any]:
    try:
        text = bounded(data, where).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError([Problem(where, "is not text in UTF-8: write YAML or JSON")]) from None
    if text.lstrip().startswith("{"):
        return [read_text_document(text, where)]
    documents = [document for document in yaml_documents(text, where) if document is not None]
    if not documents:
        raise ConfigError([Problem(where, "is empty: write a Pod into it, or remove it")])
    return documents


def _objects(documents: list[Any], where: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, kind and document of each object. Raises ConfigError for unsupported kinds."""
    for document in documents:
        kind = _kind(document, where)
        if kind not in _LISTS:
            yield "", _usable(kind, where), document
            continue
        items = document.get("items")
        if not isinstance(items, list | None):
            raise ConfigError([Problem(where, "items: must be a list of pods")])
        for index, item in enumerate(items or []):
            # kind and apiVersion are optional for the items of a PodList.
            if isinstance(item, dict) and kind == "PodList" and "kind" not in item:
                item = {**item, "kind": "Pod", "apiVersion": "v1"}
            yield f"items[{index}]", _usable(_kind(item, where), where), item


def _kind(document: Any, where: str) -> str:
    if not isinstance(document, dict):
        raise ConfigError([Problem(where, "is not a mapping of fields: write lines such as kind: Pod")])
    kind, version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str):
        raise ConfigError([Problem(where, "must say what it is: write apiVersion: v1 and kind: Pod")])
    if version != "v1":
        raise ConfigError(
            [Problem(where, f"is a {quoted(kind)} of {quoted(version)}: write a Pod of apiVersion: v1")]
        )
    return kind


def _usable(kind: str, where: str) -> str:
    if kind != "Pod" and kind not in KINDS:
        raise ConfigError([Problem(where, f"is a {quoted(kind)}: only Pod and PodList can be run")])
    return kind


def _name(kind: str, document: Any) -> str:
    """Return the prefix that identifies the object of a problem; for a pod, its path suffices."""
    if kind == "Pod":
        return ""
    meta = document.get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    return f"{kind} {quoted(name)}: " if isinstance(name, str) and name else f"{kind}: "


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _with_path(path: str, reason: str) -> str:
    """Put the field path in front of a message: `spec.containers[0].name: expected ...`."""
    if match := _ERROR_WITH_PATH.fullmatch(reason):
        reason = match["what"]
        path = ".".join(filter(None, (path, match["path"])))
    reason = reason[:1].lower() + reason[1:]
    return f"{path}: {reason}" if path else reason
