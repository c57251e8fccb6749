"""Manifests: YAML or JSON that people write, as pods.

A manifest holds `Pod`s, `PodList`s, or `List`s as `kubectl get -o yaml` prints them. All documents of
a file with `---` lines count (the reference reads only the first, and says nothing about the
others). Fields that the agent does not know are skipped and `null` means "not written", as in the
API; a field of the wrong type is refused with its path. What arrives here may be hostile: sizes,
nesting and aliases are bounded by this module and by the document reader below it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.text import quoted
from pykubelet.config.documents import read_text_document
from pykubelet.config.documents_yaml import yaml_documents
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.logs import get_logger

log = get_logger(__name__)

MAX_BYTES = 10 * 1024 * 1024

_LISTS = ("PodList", "List")
_NOT_RUN = ("ConfigMap", "Secret")
_PLACED = re.compile(r"(?P<what>.*) - at `(?P<path>.*)`", re.DOTALL)


def read_manifest(data: bytes, where: str) -> list[Pod]:
    """Read the pods of a manifest, as they are written; `where` (a path, a URL) names it in messages.

    Raises ConfigError with one line per problem.
    """
    pods: list[Pod] = []
    problems: list[Problem] = []
    for place, document in _objects(_documents(data, where), where):
        try:
            pods.append(from_document(Pod, _without_nulls(document)))
        except ValueError as err:
            problems.append(Problem(where, _told(place, str(err))))
    if problems:
        raise ConfigError(problems)
    return pods


def read_bytes(path: Path) -> bytes:
    """Read a manifest's file: at most `MAX_BYTES`, and never from a pipe or device that could block.

    Raises ConfigError for a file that can be no manifest, and OSError as reading does.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(MAX_BYTES + 1)
    return bounded(data, str(path))


def bounded(data: bytes, where: str) -> bytes:
    """Give the bytes back unless they are too many to be a manifest; raises ConfigError."""
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


def _objects(documents: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Give each pod's document with its place in the manifest; raises ConfigError for other kinds."""
    for document in documents:
        kind = _kind(document, where)
        if kind == "Pod":
            yield "", document
        elif kind in _LISTS:
            items = document.get("items")
            if not isinstance(items, list | None):
                raise ConfigError([Problem(where, "items: must be a list of pods")])
            for index, item in enumerate(items or []):
                # The items of a PodList need not say again what they are.
                if isinstance(item, dict) and kind == "PodList" and "kind" not in item:
                    item = {**item, "kind": "Pod", "apiVersion": "v1"}
                if (item_kind := _kind(item, where)) == "Pod":
                    yield f"items[{index}]", item
                else:
                    _skip(item_kind, where)
        else:
            _skip(kind, where)


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


def _skip(kind: str, where: str) -> None:
    if kind not in _NOT_RUN:
        raise ConfigError([Problem(where, f"is a {quoted(kind)}: only Pod and PodList can be run")])
    log.info("Skipped an object in a manifest that is not a pod", path=where, kind=kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _told(place: str, reason: str) -> str:
    """Put the path in front of what does not fit: `spec.containers[0].name: expected ...`."""
    if placed := _PLACED.fullmatch(reason):
        reason = placed["what"]
        place = ".".join(filter(None, (place, placed["path"])))
    reason = reason[:1].lower() + reason[1:]
    return f"{place}: {reason}" if place else reason
