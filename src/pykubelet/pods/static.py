"""Static pods: what a pod gets that comes from a file or a URL instead of an API server.

Nobody gave such a pod an identity, so the agent does: the uid is a hash of where the manifest lies
and what it says (however its keys are ordered), so that a changed manifest is a new pod and an
unchanged one is the same pod after a restart. The name gets the node's name behind it, because the
same manifest may lie on many nodes that share one API server.

The questions that others ask about a pod's origin (`is_static_pod`, ...) are answered here too,
from the annotations that every accepted pod carries.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

import msgspec

from pykubelet.api.pod import Pod, Toleration
from pykubelet.api.pod_status import PodStatus
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.logs import get_logger
from pykubelet.pods.defaults import apply_defaults
from pykubelet.pods.manifests import Contents, read_manifest
from pykubelet.pods.object_manifests import LOCAL_KINDS
from pykubelet.pods.validate import validate_pod

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
