"""Static pods: what a pod gets that comes from a file or a URL instead of an API server.

Nobody gave such a pod an identity, so the agent does: the uid is a hash of where the manifest lies
and what it says (however its keys are ordered), so that a changed manifest is a new pod and an
unchanged one is the same pod after a restart. The name gets the node's name behind it, because the
same manifest may lie on many nodes that share one API server.

The questions that others ask about a pod's origin (`is_static_pod`, ...) are answered here too,
from the annotations that every accepted pod carries.

Handing a manifest to the node: where it goes in the manifests folder, and putting it there whole.

A manifest keeps its file's name, so that its owner finds it again. Writing the same pods and objects anew
is an update; whatever would silently push out or double another is refused. One that holds a secret can
be read by its owner only.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from pykubelet.api.pod import Pod, Toleration
from pykubelet.api.pod_status import PodStatus
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.logs import get_logger
from pykubelet.podconfig.defaults import apply_defaults
from pykubelet.podconfig.local_objects import LOCAL_KINDS, title
from pykubelet.podconfig.manifests import Contents, read_bytes, read_manifest
from pykubelet.podconfig.validate import validate_pod

log = get_logger(__name__)
Source = Literal["file", "http", "api"]
SOURCE_ANNOTATION = "kubernetes.io/config.source"
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
SEEN_ANNOTATION = "kubernetes.io/config.seen"
HASH_ANNOTATION = "kubernetes.io/config.hash"
SYSTEM_CRITICAL_PRIORITY = 2_000_000_000
_SECOND = 1_000_000_000


def static_pods(
    data: bytes,
    *,
    source: Literal["file", "http"],
    origin: str,
    node_name: str,
    now: int,
    served: frozenset[str] = frozenset(),
) -> list[Pod]:
    """Make the pods of a manifest's bytes, and nothing of what lies beside them; see `static_contents`."""
    given = static_contents(
        data, source=source, origin=origin, node_name=node_name, now=now, served=served, objects=False
    )
    if given.unused:
        kinds = sorted(set(given.unused))
        log.info("Skipped objects in a manifest that are not pods", path=origin, kinds=kinds)
    return list(given.pods)


def static_contents(
    data: bytes,
    *,
    source: Literal["file", "http"],
    origin: str,
    node_name: str,
    now: int,
    served: frozenset[str] = frozenset(),
    objects: bool | None = None,
) -> Contents:
    """Make what a manifest's bytes hold: read, completed and checked.

    `origin` is the file's path or the URL, `now` nanoseconds since the epoch, and `served` the
    kinds of API objects that pods may refer to here (`validate_pod` knows them). ConfigMaps and
    Secrets are read where they are served, unless `objects` says otherwise. Raises ConfigError with every
    problem of everything in it: a manifest is taken whole or not at all.
    """
    pods, problems = [], []
    given = read_manifest(data, origin, objects=served >= LOCAL_KINDS if objects is None else objects)
    for written in given.pods:
        if not written.metadata.name:
            problems.append(Problem(origin, "metadata.name: must be set"))
            continue
        pod = complete_static_pod(written, source=source, origin=origin, node_name=node_name, now=now)
        pods.append(pod)
        problems += [
            Problem(origin, f"pod {written.metadata.name!r}: {problem}")
            for problem in validate_pod(pod, served=served)
        ]
    if problems:
        raise ConfigError(problems)
    return replace(given, pods=pods)


def complete_static_pod(
    pod: Pod, *, source: Literal["file", "http"], origin: str, node_name: str, now: int
) -> Pod:
    """Give a manifest's pod its identity, place and defaults; the pod that was passed stays as it is.

    The pod must be as its author wrote it, without defaults: they may differ between versions
    of the agent, and the uid must not.
    """
    uid = pod.uid or _uid(pod, source, origin, node_name)
    pod = copy.deepcopy(pod)
    apply_defaults(pod)
    meta = pod.metadata
    meta.uid = uid
    meta.name = f"{meta.name}-{node_name.lower()}"
    meta.namespace = meta.namespace or "default"
    meta.annotations |= {HASH_ANNOTATION: uid, SOURCE_ANNOTATION: source, SEEN_ANNOTATION: seen_time(now)}
    pod.spec.node_name = node_name
    if source == "file":
        _tolerate_node_problems(pod)
    # Whatever a copied manifest says has become of it was another pod's life.
    pod.status = PodStatus(phase="Pending")
    return pod


def without_duplicates(pods: Iterable[tuple[str, Pod]]) -> tuple[list[Pod], list[Problem]]:
    """Keep the first of pods with one name or one uid; the others, named by their origin, are problems."""
    kept, problems = [], []
    names: dict[str, str] = {}
    uids: dict[str, str] = {}
    for origin, pod in pods:
        if (other := names.get(pod.full_name)) is not None:
            problems.append(
                Problem(origin, f"pod {pod.full_name} is already in {other}: rename one, or remove it")
            )
        elif (other := uids.get(pod.uid)) is not None:
            problems.append(Problem(origin, f"uid {pod.uid} is already in {other}: remove metadata.uid"))
        else:
            kept.append(pod)
            names[pod.full_name] = uids[pod.uid] = origin
    return kept, problems


def source_of(pod: Pod) -> str:
    """Where the pod came from: `file`, `http` or `api`; "" for a pod that no source gave."""
    return pod.metadata.annotations.get(SOURCE_ANNOTATION, "")


def is_static_pod(pod: Pod) -> bool:
    """Whether the pod came from a manifest and not from the API server."""
    return source_of(pod) not in ("", "api")


def is_mirror_pod(pod: Pod) -> bool:
    """Whether the pod is only the picture of a static pod in the API server."""
    return MIRROR_ANNOTATION in pod.metadata.annotations


def is_critical_pod(pod: Pod) -> bool:
    """Whether the node keeps this pod to the last: static pods, their mirrors, and critical priorities."""
    priority = pod.spec.priority
    return (
        is_static_pod(pod)
        or is_mirror_pod(pod)
        or (priority is not None and priority >= SYSTEM_CRITICAL_PRIORITY)
    )


def seen_time(now: int) -> str:
    """Write nanoseconds since the epoch as `kubernetes.io/config.seen` does: local time, nine digits."""
    seconds, nanos = divmod(now, _SECOND)
    text = datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    zone = "Z" if text[19:] == "+00:00" else text[19:]
    return f"{text[:19]}.{nanos:09d}{zone}"


def _uid(pod: Pod, source: str, origin: str, node_name: str) -> str:
    said = _said([source, origin, node_name, pod.metadata, pod.spec])
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _said(value: Any) -> Any:
    """Give what an author wrote, without fields that equal their default.

    So a field that a later version of the agent learns changes the uid of those pods only that use it.
    """
    if isinstance(value, msgspec.Struct):
        return {
            wire: _said(content)
            for name, wire, default in _fields(type(value))
            if (content := getattr(value, name)) != default
        }
    if isinstance(value, dict):
        return {key: _said(item) for key, item in value.items()}
    return [_said(item) for item in value] if isinstance(value, list) else value


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    """Give the names of a struct's fields here and in the API, with their defaults."""
    return [
        (
            field.name,
            field.encode_name,
            field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory(),
        )
        for field in msgspec.structs.fields(kind)
    ]


def _tolerate_node_problems(pod: Pod) -> None:
    """Keep the pod when its node is in trouble: it may be what repairs the node."""
    wanted = Toleration(operator="Exists", effect="NoExecute")

    def same(other: Toleration) -> bool:
        return (other.key, other.operator, other.value, other.effect) == ("", "Exists", "", "NoExecute")

    pod.spec.tolerations = [*(t for t in pod.spec.tolerations if not same(t)), wanted]


Names = frozenset[str]
"""What manifests hold, such as `pod default/web` and `configMap default/page`."""
PUBLIC, PRIVATE = 0o644, 0o600


class ManifestConflict(Exception):
    """The manifest would get in the way of another; the text says of which and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in the manifests folder."""

    target: Path
    remove: tuple[Path, ...] = ()
    """Files whose contents the new one takes over."""


def names_of(written: Contents) -> Names:
    """Give the names of what is in a manifest, as it is written; raises ClashError when two have the same."""
    names = [f"pod {pod.metadata.namespace or 'default'}/{pod.metadata.name}" for pod in written.pods]
    names += [title(found) for found in written.objects]
    for name in names:
        if names.count(name) > 1:
            raise ManifestConflict(f"{name} is in the manifest twice: rename one, or remove it")
    return frozenset(names)


def plan_handover(target: Path, names: Names, present: Mapping[Path, Names | None], *, replace: bool) -> Plan:
    """Decide what to do for a manifest with these names; `present` is the folder, None for bad files.

    Raises ClashError when something else would be lost or doubled, unless `replace` says that it may.
    """
    if target.name.startswith("."):
        raise ManifestConflict(f"{target.name} is a hidden file, which the node ignores: rename it")
    old = present.get(target, frozenset())
    if not replace and (old is None or old - names):
        holds = "something that cannot be read" if old is None else ", ".join(sorted(old - names))
        raise ManifestConflict(
            f"{target} is there already and holds {holds}: "
            "rename your file, or say --replace to put yours in its place"
        )
    doubles = []
    for file, others in sorted(present.items()):
        if file == target or not others or not others & names:
            continue
        same = ", ".join(sorted(others & names))
        if others - names:
            raise ManifestConflict(
                f"{same} is already in {file}, with others: take it out there, or rename yours"
            )
        if not replace:
            raise ManifestConflict(f"{same} is already in {file}: rename yours, or say --replace to move it")
        doubles.append(file)
    return Plan(target, tuple(doubles))


def look_around(folder: Path) -> dict[Path, Names | None]:
    """Read what the manifests folder holds; raises OSError when it cannot be listed."""
    present: dict[Path, Names | None] = {}
    for file in folder.iterdir():
        if file.name.startswith(".") or not file.is_file():
            continue
        try:
            present[file] = names_of(read_manifest(read_bytes(file), str(file)))
        except (ConfigError, ManifestConflict, OSError):
            present[file] = None
    return present


def carry_out(plan: Plan, content: bytes, mode: int = PUBLIC) -> None:
    """Write the manifest and remove what it takes over; raises OSError."""
    write_atomically(plan.target, content, mode)
    for file in plan.remove:
        file.unlink(missing_ok=True)


def mode_for(written: Contents) -> int:
    """Give the permissions of a manifest's file."""
    return PRIVATE if written.has_secret else PUBLIC


def write_atomically(target: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a file so that whoever looks sees the old content or the new, never a part; raises OSError."""
    # The node ignores hidden files, so it does not see this one grow.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def find_mine(pods: Collection[Pod], written: Pod, target: Path) -> Pod | None:
    """Find what the node made of a manifest's pod, in exactly this version: its uid tells."""
    for pod in pods:
        node = pod.spec.node_name
        if pod.metadata.name == f"{written.metadata.name}-{node.lower()}":
            made = complete_static_pod(written, source="file", origin=str(target), node_name=node, now=0)
            if (made.uid, made.metadata.namespace) == (pod.uid, pod.metadata.namespace):
                return pod
    return None
