"""Manifests of a node as the commands see them: files, running or stopped, with their objects.

Commands change the manifest directory directly, so they also work while the kubelet is stopped; the kubelet
reads the directory within a tenth of a second. `locked` keeps two commands from changing it at the same time.
Everything is read and validated before anything is changed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykubelet.cli.client import NodeError, SelectionError
from pykubelet.cli.node_access import Node
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.manifests import Contents, manifest_documents, read_bytes, read_manifest
from pykubelet.podconfig.static_pods import static_contents
from pykubelet.podconfig.stopped import stopped_manifests
from pykubelet.server.node_info import NodeInfo

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "Pod": ("po", "pods"),
    "Deployment": ("deploy", "deployments"),
    "DaemonSet": ("ds", "daemonsets"),
    "StatefulSet": ("sts", "statefulsets"),
    "Job": ("jobs",),
    "CronJob": ("cj", "cronjobs"),
    "PersistentVolumeClaim": ("pvc", "persistentvolumeclaims"),
    "ConfigMap": ("cm", "configmaps"),
    "Secret": ("secrets",),
}
KINDS = tuple(_ALIASES)
SUFFIXES = (".yaml", ".yml", ".json")
_BY_ALIAS = {alias: kind for kind, aliases in _ALIASES.items() for alias in (kind.lower(), *aliases)}


class ManifestError(Exception):
    """Raised when a manifest cannot be applied, found or changed; the text names cause and remedy."""


@dataclass(frozen=True, slots=True)
class ManifestObject:
    """An object of a manifest."""

    kind: str
    namespace: str
    name: str
    document: Mapping[str, Any]
    """The object as written."""
    pods: tuple[str, ...] = ()
    """Pods that it runs, as `namespace/name` of the manifest; those of Jobs are not known from it."""
    claims: tuple[str, ...] = ()
    """Claims that it defines, as `namespace/name`."""
    used_claims: tuple[str, ...] = ()
    """Claims that its pods use."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace and name."""
        return self.kind, self.namespace, self.name

    @property
    def title(self) -> str:
        """Description for messages: `deployment default/web`."""
        return f"{self.kind[0].lower()}{self.kind[1:]} {self.namespace}/{self.name}"

    @property
    def reference(self) -> str:
        """Argument of commands: `deployment/web`, or `deployment/NAMESPACE/web` outside of `default`."""
        name = self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"
        return f"{self.kind.lower()}/{name}"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of the manifest directory, or one that will be in it."""

    path: Path
    """Path while it is not stopped."""
    content: bytes = b""
    objects: tuple[ManifestObject, ...] = ()
    problems: tuple[Problem, ...] = ()
    stopped_at: Path | None = None
    """Path while it is stopped."""

    @property
    def current(self) -> Path:
        """Path of the file now."""
        return self.stopped_at or self.path

    @property
    def keys(self) -> frozenset[tuple[str, str, str]]:
        """Keys of its objects."""
        return frozenset(found.key for found in self.objects)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a manifest directory. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def served_kinds(info: NodeInfo) -> frozenset[str]:
    """Return the kinds of API objects that manifests of this node may refer to."""
    if info.served is not None:
        return frozenset(info.served)
    return LOCAL_KINDS if info.standalone else frozenset()


def read_content(content: bytes, path: Path, where: str, node: Node) -> tuple[ManifestFile, list[Problem]]:
    """Return a validated manifest that will be at `path`, and its warnings; `where` identifies it.

    Raises ConfigError with all problems, as the kubelet would find them.
    """
    standalone = node.info.standalone
    contents = static_contents(
        content,
        source="file",
        origin=where,
        node_name=node.info.node_name,
        now=time.time_ns(),
        served=served_kinds(node.info),
    )
    if contents.is_empty:
        raise ConfigError([Problem(where, "holds no pod and no other object: write one into it")])
    objects = _objects_of(content, where, standalone=standalone)
    seen: set[tuple[str, str, str]] = set()
    for found in objects:
        if found.key in seen:
            raise ConfigError(
                [Problem(where, f"{found.title} is in the manifest twice: rename one, or remove it")]
            )
        seen.add(found.key)
    return ManifestFile(path, content, objects), contents.warnings


def read_directory(directory: Path, node: Node) -> list[ManifestFile]:
    """Return the manifests of a directory, sorted by name; broken ones have problems. Raises OSError."""
    running = sorted(file for file in directory.iterdir() if not file.name.startswith(".") and file.is_file())
    stopped = stopped_manifests(directory)
    files = [_read_file(file, None, node) for file in running]
    files += [_read_file(path, at, node) for path, at in stopped.items() if path not in running]
    return sorted(files, key=lambda file: file.path)


def _read_file(path: Path, stopped_at: Path | None, node: Node) -> ManifestFile:
    try:
        content = read_bytes(stopped_at or path)
    except ConfigError as err:
        return ManifestFile(path, problems=tuple(err.problems), stopped_at=stopped_at)
    except OSError as err:
        problem = Problem(str(path), f"cannot be read: {err.strerror}")
        return ManifestFile(path, problems=(problem,), stopped_at=stopped_at)
    try:
        objects = _objects_of(content, str(path), standalone=node.info.standalone)
    except ConfigError as err:
        return ManifestFile(path, content, problems=tuple(err.problems), stopped_at=stopped_at)
    return ManifestFile(path, content, objects, stopped_at=stopped_at)


def _objects_of(content: bytes, where: str, *, standalone: bool) -> tuple[ManifestObject, ...]:
    contents = read_manifest(content, where, workloads=standalone)
    expanded = {workload.key: workload for workload in contents.workloads}
    used = _used_claims(contents)
    found = []
    for kind, document in manifest_documents(content, where, workloads=standalone):
        meta = document.get("metadata")
        fields = meta if isinstance(meta, dict) else {}
        namespace, name = fields.get("namespace") or "default", fields.get("name") or ""
        workload = expanded.get((kind, namespace, name))
        pods: tuple[str, ...] = (f"{namespace}/{name}",) if kind == "Pod" else ()
        claims: tuple[str, ...] = ()
        if workload is not None:
            pods = tuple(f"{namespace}/{pod.metadata.name}" for pod in workload.pods)
            claims = tuple(f"{namespace}/{claim.metadata.name}" for claim in workload.claims)
        found.append(
            ManifestObject(
                kind, namespace, name, document, pods, claims, used.get((kind, namespace, name), ())
            )
        )
    return tuple(found)


def _used_claims(contents: Contents) -> dict[tuple[str, str, str], tuple[str, ...]]:
    from pykubelet.objects.references import claim_names

    used: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for pod in contents.pods:
        namespace = pod.metadata.namespace or "default"
        used["Pod", namespace, pod.metadata.name] = tuple(
            f"{namespace}/{name}" for name in sorted(claim_names(pod))
        )
    for workload in contents.workloads:
        pods = [*workload.pods[:1], *([workload.sample] if workload.sample is not None else [])]
        used[workload.key] = tuple(
            f"{workload.namespace}/{name}" for pod in pods for name in sorted(claim_names(pod))
        )
    return used


def parse_kind(text: str) -> str:
    """Return the kind for a name such as `deploy`, `Deployments` or `cm`. Raises SelectionError."""
    kind = _BY_ALIAS.get(text.lower().partition(".")[0])
    if kind is None:
        known = ", ".join(f"{name} ({aliases[0]})" for name, aliases in _ALIASES.items())
        raise SelectionError(f"{text!r} is not a kind of a manifest; there are: {known}")
    return kind


def split_reference(text: str) -> tuple[str | None, str | None, str]:
    """Return kind, namespace and name of `web`, `deploy/web`, `prod/web` or `deploy/prod/web`."""
    parts = text.split("/")
    is_kind = parts[0].lower() in _BY_ALIAS
    is_path = text.endswith(SUFFIXES) or parts[0] in ("", ".", "..")
    if len(parts) == 3 and (is_kind or not is_path):
        return parse_kind(parts[0]), parts[1], parts[2]
    if len(parts) == 2:
        if is_kind:
            return parse_kind(parts[0]), None, parts[1]
        return None, parts[0], parts[1]
    return None, None, text


def find_objects(files: Sequence[ManifestFile], text: str) -> list[tuple[ManifestFile, ManifestObject]]:
    """Return the objects that a reference selects."""
    kind, namespace, name = split_reference(text)
    return [
        (file, found)
        for file in files
        for found in file.objects
        if found.name == name and kind in (None, found.kind) and namespace in (None, found.namespace)
    ]


def find_file(files: Sequence[ManifestFile], text: str, directory: Path) -> ManifestFile:
    """Return the manifest that a file name, a path or the name of an object selects.

    Raises SelectionError with the candidates.
    """
    path = Path(text)
    for file in files:
        if file.path.name == text or (path.is_absolute() and path in (file.path, file.current)):
            return file
    try:
        found = find_objects(files, text)
    except SelectionError as err:
        raise SelectionError(f"{err}; for a manifest, give the name of its file: {path.name}") from None
    paths = list(dict.fromkeys(file.path for file, _ in found))
    if len(paths) > 1:
        lines = [f"  {item.title} in {file.path.name}" for file, item in found]
        raise SelectionError(
            f"{text!r} may be any of these, say which file or KIND/NAME:\n" + "\n".join(lines)
        )
    if found:
        return found[0][0]
    # A file of another directory selects the manifest that was applied from it.
    if path.name != text or path.exists():
        for file in files:
            if file.path.name == path.name:
                return file
    names = ", ".join(file.path.name for file in files[:10]) or "none"
    raise SelectionError(f"there is no manifest and no object {text!r} in {directory}; files: {names}")


def require_root(err: PermissionError) -> NodeError:
    """Return the error of a command that lacks permission."""
    return NodeError(f"only root may change manifests ({err.filename} is not writable): run it with sudo")
