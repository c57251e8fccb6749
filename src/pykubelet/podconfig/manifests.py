"""Decoding of manifests: YAML or JSON with pods, ConfigMaps and Secrets.

A manifest contains `Pod`s, `PodList`s, or `List`s as printed by `kubectl get -o yaml`, `ConfigMap`s and
`Secret`s (`local_objects.py`), and on a standalone node workloads such as `Deployment` (`workloads/`). All
documents of a file with `---` lines are read (upstream silently reads only the first). Unknown fields are
ignored and `null` means absent, as in the API; a field of the wrong type is rejected with its path. Manifests
are untrusted: this module and the document reader bound size, nesting and aliases.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykubelet.api.core import Secret
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.config.documents import read_text_document, yaml_documents
from pykubelet.config.errors import ConfigError, Problem
from pykubelet.podconfig.local_objects import KINDS, BadObject, LocalObject, read_object
from pykubelet.util.text import quoted

if TYPE_CHECKING:
    from pykubelet.podconfig.workloads.kinds import Workload

MAX_BYTES = 10 * 1024 * 1024
MAX_EXPANDED_PODS = 1000
"""Maximum pods that the workloads of a manifest expand to."""
WORKLOAD_VERSIONS = {
    "Deployment": "apps/v1",
    "DaemonSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
    "PersistentVolumeClaim": "v1",
}
"""Workloads that a standalone node runs, with their apiVersion."""
_LISTS = ("PodList", "List")
_NO_CLUSTER = "a standalone node has no API server: remove it"
_CLUSTER_ONLY = {
    "ReplicaSet": "write a Deployment",
    "ReplicationController": "write a Deployment",
    "Service": "a standalone node has no service network: publish ports with hostPort, and remove it",
    "Ingress": "a standalone node has no ingress: publish ports with hostPort, and remove it",
    "NetworkPolicy": "a standalone node does not filter the traffic of pods: remove it",
    "Namespace": "a namespace needs no definition on a standalone node: remove it",
    "PersistentVolume": "a claim is a directory of the node: remove it, or use a hostPath volume",
    "StorageClass": "a claim is a directory of the node: remove it",
    "HorizontalPodAutoscaler": "a standalone node does not scale: remove it",
    "PodDisruptionBudget": "a standalone node evicts no pods through an API: remove it",
    **dict.fromkeys(
        ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), _NO_CLUSTER
    ),
}
"""Kinds of other manifests that users have, with the remedy."""
_ERROR_WITH_PATH = re.compile(r"(?P<what>.*) - at `(?P<path>.*)`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a manifest."""

    pods: Sequence[Pod] = ()
    objects: Sequence[LocalObject] = ()
    workloads: Sequence[Workload] = ()
    unused: Sequence[str] = ()
    """Kinds of ignored objects, which are not used where the manifest is read."""

    @property
    def written_pods(self) -> list[Pod]:
        """The pods, and those that the workloads expand to; without the pods of Jobs."""
        return [*self.pods, *(pod for workload in self.workloads for pod in workload.pods)]

    @property
    def all_objects(self) -> list[LocalObject]:
        """The objects, and the claims of the workloads."""
        return [*self.objects, *(claim for workload in self.workloads for claim in workload.claims)]

    @property
    def warnings(self) -> list[Problem]:
        """Fields that are ignored, each with the workload."""
        return [
            Problem(warning.path, f"{warning.message} ({workload.title})")
            for workload in self.workloads
            for warning in workload.warnings
        ]

    @property
    def is_empty(self) -> bool:
        """Whether it contains nothing that the node uses."""
        return not self.pods and not self.objects and not self.workloads

    @property
    def has_secret(self) -> bool:
        """Whether the manifest contains a Secret, so that its file must not be world-readable."""
        return "Secret" in self.unused or any(isinstance(found, Secret) for found in self.objects)


def read_manifest(
    data: bytes, where: str, *, objects: bool = True, workloads: bool | None = None
) -> Contents:
    """Decode a manifest, without defaults; `where` (a path, a URL) identifies it in messages.

    Without `objects` ConfigMaps and Secrets are not decoded, only listed as unused. Without `workloads`, by
    default the same, Deployments and the like are rejected, as on a cluster node. Raises ConfigError with one
    line per problem.
    """
    with_workloads = objects if workloads is None else workloads
    pods: list[Pod] = []
    found: list[LocalObject] = []
    expanded: list[Workload] = []
    unused: list[str] = []
    problems: list[Problem] = []
    for path, kind, document in _objects(_documents(data, where), where, workloads=with_workloads):
        try:
            if kind in WORKLOAD_VERSIONS:
                expanded.append(_workload(kind, document))
            elif kind == "Pod":
                pods.append(from_document(Pod, _without_nulls(document)))
            elif objects:
                found.append(read_object(kind, document))
            else:
                unused.append(kind)
        except BadObject as err:
            problems += [Problem(where, f"{_name(kind, document)}{problem}") for problem in err.problems]
        except ValueError as err:
            problems.append(Problem(where, f"{_name(kind, document)}{_with_path(path, str(err))}"))
    if sum(len(workload.pods) for workload in expanded) > MAX_EXPANDED_PODS:
        problems.append(
            Problem(where, f"its workloads have more than {MAX_EXPANDED_PODS} pods: write fewer replicas")
        )
    if problems:
        raise ConfigError(problems)
    return Contents(pods, found, expanded, unused)


def _workload(kind: str, document: Any) -> Workload:
    # Imported here: a node of a cluster has no workloads, and its memory counts.
    from pykubelet.podconfig.workloads.kinds import read_workload

    return read_workload(kind, _without_nulls(document))


def manifest_documents(
    data: bytes, where: str, *, workloads: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and document of each object of a manifest, as written. Raises ConfigError."""
    return [
        (kind, document)
        for _, kind, document in _objects(_documents(data, where), where, workloads=workloads)
    ]


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


def _objects(documents: list[Any], where: str, *, workloads: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield path, kind and document of each object. Raises ConfigError for unsupported kinds."""
    for document in documents:
        kind = _kind(document, where, workloads=workloads)
        if kind not in _LISTS:
            yield "", _usable(kind, where, workloads=workloads), document
            continue
        items = document.get("items")
        if not isinstance(items, list | None):
            raise ConfigError([Problem(where, "items: must be a list of pods")])
        for index, item in enumerate(items or []):
            # kind and apiVersion are optional for the items of a PodList.
            if isinstance(item, dict) and kind == "PodList" and "kind" not in item:
                item = {**item, "kind": "Pod", "apiVersion": "v1"}
            kind_of_item = _usable(_kind(item, where, workloads=workloads), where, workloads=workloads)
            yield f"items[{index}]", kind_of_item, item


def _kind(document: Any, where: str, *, workloads: bool) -> str:
    if not isinstance(document, dict):
        raise ConfigError([Problem(where, "is not a mapping of fields: write lines such as kind: Pod")])
    kind, version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str):
        raise ConfigError([Problem(where, "must say what it is: write apiVersion: v1 and kind: Pod")])
    if workloads and kind in WORKLOAD_VERSIONS:
        expected = WORKLOAD_VERSIONS[kind]
        if version != expected:
            message = f"is a {kind} of {quoted(version)}: write apiVersion: {expected}"
            raise ConfigError([Problem(where, message)])
        return kind
    if workloads and kind in _CLUSTER_ONLY:
        raise ConfigError([Problem(where, f"is a {kind}: {_CLUSTER_ONLY[kind]}")])
    if version != "v1":
        raise ConfigError(
            [Problem(where, f"is a {quoted(kind)} of {quoted(version)}: write a Pod of apiVersion: v1")]
        )
    return kind


def _usable(kind: str, where: str, *, workloads: bool) -> str:
    if workloads and kind in WORKLOAD_VERSIONS:
        return kind
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
