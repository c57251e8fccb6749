"""Static pods: identity and defaults of pods from manifests, and installation of manifests.

A static pod gets its identity from the kubelet: the UID is a hash of the manifest's origin and contents
(independent of key order), so that a changed manifest is a new pod and an unchanged one is the same pod after
a restart. The node's name is appended to the pod's name, because many nodes of a cluster may have the same
manifest. The origin of a pod (`is_static_pod`, …) is derived from the annotations of every accepted pod.

`plan_installation` and `install_manifest` install a manifest in the manifest directory, atomically and under
its own file name. A manifest with the same pods and objects is an update; a manifest that would silently
replace or duplicate others is rejected. A file with a Secret is readable by its owner only.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
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
from pykubelet.podconfig.stopped import stopped_path
from pykubelet.podconfig.validate import DEFAULT_OPTIONS, PodValidationOptions, validate_pod
from pykubelet.podconfig.wait_for import WAIT_FOR_ANNOTATION, wait_for_problem
from pykubelet.util.files import write_atomically

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
    options: PodValidationOptions = DEFAULT_OPTIONS,
) -> list[Pod]:
    """Return the pods of a manifest, without its other objects; see `static_contents`."""
    manifest = static_contents(
        data,
        source=source,
        origin=origin,
        node_name=node_name,
        now=now,
        served=served,
        options=options,
        objects=False,
    )
    if manifest.unused:
        kinds = sorted(set(manifest.unused))
        log.info("Ignored objects in manifest that are not pods", path=origin, kinds=kinds)
    return list(manifest.pods)


def static_contents(
    data: bytes,
    *,
    source: Literal["file", "http"],
    origin: str,
    node_name: str,
    now: int,
    served: frozenset[str] = frozenset(),
    options: PodValidationOptions = DEFAULT_OPTIONS,
    objects: bool | None = None,
) -> Contents:
    """Decode a manifest, set defaults and validate it.

    `origin` is the path of the file or the URL, `now` Unix time in nanoseconds, and `served` the kinds of API
    objects that pods may refer to here (see `validate_pod`, also on `options`). ConfigMaps and Secrets are
    decoded if `served` is that of a standalone node (`LOCAL_KINDS`), unless `objects` overrides this. Raises
    ConfigError with all problems: a manifest is accepted completely or not at all. The pods of Deployments
    and the like are among the pods.
    """
    pods, problems = [], []
    manifest = read_manifest(data, origin, objects=served == LOCAL_KINDS if objects is None else objects)
    for written in manifest.pods:
        if not written.metadata.name:
            problems.append(Problem(origin, "metadata.name: must be set"))
            continue
        pod = complete_static_pod(written, source=source, origin=origin, node_name=node_name, now=now)
        pods.append(pod)
        problems += [
            Problem(origin, f"pod {written.metadata.name!r}: {problem}")
            for problem in _problems(pod, served, options)
        ]
    for workload in manifest.workloads:
        found = [
            complete_static_pod(written, source=source, origin=origin, node_name=node_name, now=now)
            for written in (*workload.pods, *([workload.sample] if workload.sample is not None else []))
        ]
        # The pods of a workload differ in their names only.
        problems += [
            Problem(origin, f"{workload.title}: {_in_template(problem, workload.template_path)}")
            for pod in found[:1]
            for problem in _problems(pod, served, options)
        ]
        pods += found if workload.sample is None else []
    if problems:
        raise ConfigError(problems)
    return replace(manifest, pods=pods)


def _problems(pod: Pod, served: frozenset[str], options: PodValidationOptions) -> list[Problem]:
    problems = validate_pod(pod, served=served, options=options)
    # With an API server, which serves more kinds, no pod waits for others.
    if served == LOCAL_KINDS and (message := wait_for_problem(pod)):
        problems.append(Problem(f"metadata.annotations[{WAIT_FOR_ANNOTATION}]", message))
    return problems


def _in_template(problem: Problem, template: str) -> Problem:
    """Return the problem of a workload's pod with its path in the workload."""
    if problem.path.startswith(("spec.", "metadata.labels", "metadata.annotations")):
        return Problem(f"{template}.{problem.path}", problem.message)
    return problem


def complete_static_pod(
    pod: Pod, *, source: Literal["file", "http"], origin: str, node_name: str, now: int
) -> Pod:
    """Return a copy of a manifest's pod with identity, node and defaults.

    The pod must be as written, without defaults: they may differ between versions of the kubelet, but the UID
    must not.
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
    # The status of a copied manifest belongs to another pod.
    pod.status = PodStatus(phase="Pending")
    return pod


def without_duplicates(pods: Iterable[tuple[str, Pod]]) -> tuple[list[Pod], list[Problem]]:
    """Return the first pod of each name and UID; the others, identified by their origin, are problems."""
    unique, problems = [], []
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
            unique.append(pod)
            names[pod.full_name] = uids[pod.uid] = origin
    return unique, problems


def source_of(pod: Pod) -> str:
    """Return the source of a pod: `file`, `http` or `api`; "" for a pod without a source."""
    return pod.metadata.annotations.get(SOURCE_ANNOTATION, "")


def is_static_pod(pod: Pod) -> bool:
    """Return whether the pod comes from a manifest and not from the API server."""
    return source_of(pod) not in ("", "api")


def is_mirror_pod(pod: Pod) -> bool:
    """Return whether the pod is the mirror of a static pod in the API server."""
    return MIRROR_ANNOTATION in pod.metadata.annotations


def is_critical_pod(pod: Pod) -> bool:
    """Return whether the pod is critical: static pods, their mirror pods, and critical priorities."""
    priority = pod.spec.priority
    return (
        is_static_pod(pod)
        or is_mirror_pod(pod)
        or (priority is not None and priority >= SYSTEM_CRITICAL_PRIORITY)
    )


def seen_time(now: int) -> str:
    """Format Unix nanoseconds as in `kubernetes.io/config.seen`: local time, nine fractional digits."""
    seconds, nanos = divmod(now, _SECOND)
    text = datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    zone = "Z" if text[19:] == "+00:00" else text[19:]
    return f"{text[:19]}.{nanos:09d}{zone}"


def _uid(pod: Pod, source: str, origin: str, node_name: str) -> str:
    explicit = _explicit_fields([source, origin, node_name, pod.metadata, pod.spec])
    text = json.dumps(explicit, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _explicit_fields(value: Any) -> Any:
    """Return the fields that a manifest sets, without those that equal their default.

    So a field that a later version of the kubelet adds changes only the UIDs of pods that use it.
    """
    if isinstance(value, msgspec.Struct):
        return {
            wire: _explicit_fields(content)
            for name, wire, default in _fields(type(value))
            if (content := getattr(value, name)) != default
        }
    if isinstance(value, dict):
        return {key: _explicit_fields(item) for key, item in value.items()}
    return [_explicit_fields(item) for item in value] if isinstance(value, list) else value


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    """Return attribute name, API name and default of each field of a struct."""
    return [
        (
            field.name,
            field.encode_name,
            field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory(),
        )
        for field in msgspec.structs.fields(kind)
    ]


def _tolerate_node_problems(pod: Pod) -> None:
    """Add the toleration that keeps the pod on a failing node: it may be what repairs the node."""
    toleration = Toleration(operator="Exists", effect="NoExecute")

    def same(other: Toleration) -> bool:
        return (other.key, other.operator, other.value, other.effect) == ("", "Exists", "", "NoExecute")

    pod.spec.tolerations = [*(t for t in pod.spec.tolerations if not same(t)), toleration]


Names = frozenset[str]
"""Descriptions of manifest contents, such as `pod default/web` and `configMap default/page`."""
PUBLIC, PRIVATE = 0o644, 0o600


class ManifestConflict(Exception):
    """The manifest conflicts with another one; the text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class InstallationPlan:
    """Changes to make in the manifest directory."""

    target: Path
    remove: tuple[Path, ...] = ()
    """Files whose contents the new one replaces."""


def names_of(written: Contents) -> Names:
    """Return the names of a manifest's contents. Raises ManifestConflict if a name occurs twice."""
    names = [f"pod {pod.metadata.namespace or 'default'}/{pod.metadata.name}" for pod in written.pods]
    names += [title(found) for found in written.objects]
    names += [workload.title for workload in written.workloads]
    for name in names:
        if names.count(name) > 1:
            raise ManifestConflict(f"{name} is in the manifest twice: rename one, or remove it")
    return frozenset(names)


def plan_installation(
    target: Path, names: Names, present: Mapping[Path, Names | None], *, replace: bool
) -> InstallationPlan:
    """Plan the installation of a manifest; `present` is the directory, with None for unreadable files.

    Raises ManifestConflict if other contents would be lost or duplicated, unless `replace` allows it.
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
    replaced = []
    for file, contents in sorted(present.items()):
        if file == target or not contents or not contents & names:
            continue
        same = ", ".join(sorted(contents & names))
        if contents - names:
            raise ManifestConflict(
                f"{same} is already in {file}, with others: take it out there, or rename yours"
            )
        if not replace:
            raise ManifestConflict(f"{same} is already in {file}: rename yours, or say --replace to move it")
        replaced.append(file)
    return InstallationPlan(target, tuple(replaced))


def read_manifest_dir(directory: Path) -> dict[Path, Names | None]:
    """Read the contents of the manifest directory. Raises OSError if it cannot be listed."""
    present: dict[Path, Names | None] = {}
    for file in directory.iterdir():
        if file.name.startswith(".") or not file.is_file():
            continue
        try:
            present[file] = names_of(read_manifest(read_bytes(file), str(file)))
        except (ConfigError, ManifestConflict, OSError):
            present[file] = None
    return present


def install_manifest(plan: InstallationPlan, content: bytes, mode: int = PUBLIC) -> None:
    """Write the manifest and remove the replaced files, and a stopped version of it. Raises OSError."""
    write_atomically(plan.target, content, mode)
    for file in (*plan.remove, stopped_path(plan.target)):
        file.unlink(missing_ok=True)


def mode_for(written: Contents) -> int:
    """Return the mode of a manifest's file."""
    return PRIVATE if written.has_secret else PUBLIC


def find_running_pod(pods: Collection[Pod], written: Pod, target: Path) -> Pod | None:
    """Return the running pod of exactly this version of a manifest's pod, by its UID."""
    for pod in pods:
        node = pod.spec.node_name
        if pod.metadata.name == f"{written.metadata.name}-{node.lower()}":
            completed = complete_static_pod(written, source="file", origin=str(target), node_name=node, now=0)
            if (completed.uid, completed.metadata.namespace) == (pod.uid, pod.metadata.namespace):
                return pod
    return None
