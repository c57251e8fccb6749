"""Node status: computes the desired Node object from `Facts` and the patch against the API server's.

Pure. Fields of the old status that `Facts` does not cover are kept, so that other writers can set them. Host
capacity and device plugin resources are set; extended resources advertised by other writers are kept.
Allocatable is capacity minus reservations and hard eviction thresholds.

A feature is declared in `declaredFeatures` only if this kubelet implements it, even if its gate is enabled,
because other components act on it:

- the scheduler places pods that need a feature only on nodes that declare it (RestartAllContainers rules; a
  user namespace with hostNetwork) and leaves them pending if no node does;
- the API server rejects changes that the pod's node cannot make (in-place resize of pod-level resources or
  of init containers) instead of accepting them without effect;
- the API server passes WebSocket streams through to nodes that declare `ExtendWebSocketsToKubelet` and
  translates them itself for all others: a node that declares it without support breaks `kubectl exec`.

All features that upstream declares are implemented; `tests/cluster/test_golden.py` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.merge_patch import REPLACE, merge_patch
from pykubelet.api.meta import Resources, to_document
from pykubelet.api.names import is_extended_resource
from pykubelet.api.node import (
    ContainerImage,
    DaemonEndpoint,
    Node,
    NodeDaemonEndpoints,
    NodeFeatures,
    NodeRuntimeHandler,
    NodeRuntimeHandlerFeatures,
    NodeStatus,
    NodeSwapStatus,
    NodeSystemInfo,
)
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import allocatable
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.linux.host_info import Machine
from pykubelet.linux.network import IPAddress
from pykubelet.node.addresses import PROVIDED_IP, next_addresses, provided_ip
from pykubelet.node.conditions import NodePressure, Transition, next_conditions
from pykubelet.node.settings import NodeSettings

ZERO = Quantity.from_units(0)


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """Resources of device plugins; `removed` lists resources whose plugin is gone."""

    capacity: Resources = field(default_factory=dict)
    allocatable: Resources = field(default_factory=dict)
    removed: Sequence[str] = ()


def next_resources(
    old_capacity: Resources,
    old_allocatable: Resources,
    machine: Resources,
    devices: DeviceCapacity,
    settings: NodeSettings,
) -> tuple[Resources, Resources]:
    """Return the current capacity and allocatable."""
    capacity = {**old_capacity, **machine, **devices.capacity, **dict.fromkeys(devices.removed, ZERO)}
    remaining = allocatable(capacity, settings.config, ignore_eviction=settings.ignore_eviction)
    retained = {
        name: old
        for name, old in old_allocatable.items()
        if not is_extended_resource(name) or name in capacity
    }
    return capacity, {**retained, **remaining, **devices.allocatable}


def missing_resources(capacity: Resources, *, storage: bool) -> str:
    """Return a message that lists missing mandatory resources; empty if all are present."""
    needed = ["cpu", "memory", "pods", *(["ephemeral-storage"] if storage else [])]
    absent = [name for name in needed if name not in capacity]
    return f"missing node capacity for resources: {', '.join(absent)}" if absent else ""


NAMES_PER_IMAGE = 5
_DECLARED: Mapping[str, Callable[[pb.RuntimeFeatures], bool]] = {
    "ExtendWebSocketsToKubelet": lambda runtime: True,
    "InPlacePodLevelResourcesVerticalScaling": lambda runtime: True,
    "InPlacePodVerticalScalingInitContainers": lambda runtime: True,
    "RestartAllContainersOnContainerExits": lambda runtime: True,
    # The kubelet requests both; whether they can be combined depends on the runtime.
    "UserNamespacesHostNetworkSupport": lambda runtime: runtime.user_namespaces_host_network,
}
"""Implemented features, each with a predicate on the runtime's features."""
_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_SEMANTIC = re.compile(rf"v?(\d+\.\d+\.\d+(?:-{_IDENTIFIERS})?(?:\+{_IDENTIFIERS})?)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)")


def plain_version(text: str) -> str:
    """Return a version that tools can compare: without the suffix of a distribution."""
    text = text.strip()
    found = _SEMANTIC.fullmatch(text) or _NUMBERS.match(text)
    return found[1] if found else text


def image_list(images: Iterable[pb.Image], limit: int) -> list[ContainerImage]:
    """Return the `limit` largest images for the node status, largest first; all if `limit` is negative."""
    # Ties are broken by ID to keep the order stable.
    ordered = sorted(images, key=lambda image: (image.size, image.id), reverse=True)
    return [
        ContainerImage(
            names=[*image.repo_digests, *image.repo_tags][:NAMES_PER_IMAGE] or None, size_bytes=image.size
        )
        for image in (ordered if limit < 0 else ordered[:limit])
    ]


def runtime_handlers(status: pb.StatusResponse | None, gates: FeatureGates) -> list[NodeRuntimeHandler]:
    """Return the runtime handlers and their features, sorted by name."""
    if status is None or not (
        gates.enabled("RecursiveReadOnlyMounts") or gates.enabled("UserNamespacesSupport")
    ):
        return []
    return [
        NodeRuntimeHandler(
            name=handler.name,
            features=NodeRuntimeHandlerFeatures(
                recursive_read_only_mounts=handler.features.recursive_read_only_mounts,
                user_namespaces=handler.features.user_namespaces,
            ),
        )
        for handler in sorted(status.runtime_handlers, key=lambda handler: handler.name)
    ]


def runtime_features(status: pb.StatusResponse | None, gates: FeatureGates) -> NodeFeatures | None:
    """Return the runtime's handler-independent features; None if it does not report them."""
    if status is None or not status.HasField("features") or not gates.enabled("SupplementalGroupsPolicy"):
        return None
    return NodeFeatures(supplemental_groups_policy=status.features.supplemental_groups_policy)


def declared_features(status: pb.StatusResponse | None, gates: FeatureGates) -> list[str]:
    """Return the sorted names of the declared features (`status.declaredFeatures`)."""
    if status is None or not gates.enabled("NodeDeclaredFeatures"):
        return []
    return sorted(
        name for name, supported in _DECLARED.items() if gates.enabled(name) and supported(status.features)
    )


MERGE_KEYS = {"status.conditions": "type", "status.addresses": REPLACE}
"""Merge keys of the node's lists. Addresses share types, so merging them by type would lose some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Inputs of the node status at one point in time; None if unknown: the old value is kept."""

    machine: Machine
    capacity: Resources
    runtime_version: str | None = None
    """`containerd://1.6.20`."""
    runtime_status: pb.StatusResponse | None = None
    images: list[ContainerImage] | None = None
    own_address: IPAddress | None = None
    addresses_valid: bool = True
    """Whether `--node-ip` belongs to this host and an address was found; else the old ones are kept."""
    volumes_in_use: list[str] | None = None
    devices: DeviceCapacity = field(default_factory=DeviceCapacity)
    pressures: NodePressure = field(default_factory=NodePressure)
    problems: Sequence[str] = ()
    warning: str = ""


def next_node(
    old: Node, facts: Facts, settings: NodeSettings, now: datetime
) -> tuple[Node, list[Transition]]:
    """Return the desired node and the changed conditions."""
    status, transitions = next_status(old.status, facts, settings, now)
    meta = old.metadata
    labels = {
        **meta.labels,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": facts.machine.architecture,
    }
    annotations = {name: value for name, value in meta.annotations.items() if name != PROVIDED_IP}
    if provided := provided_ip(settings):
        annotations[PROVIDED_IP] = provided
    meta = msgspec.structs.replace(meta, labels=labels, annotations=annotations)
    return Node(metadata=meta, spec=old.spec, status=status), transitions


def next_status(
    old: NodeStatus, facts: Facts, settings: NodeSettings, now: datetime
) -> tuple[NodeStatus, list[Transition]]:
    """Return the desired status and the changed conditions."""
    capacity, allocatable = next_resources(
        old.capacity, old.allocatable, facts.capacity, facts.devices, settings
    )
    problems = list(facts.problems)
    if missing := missing_resources(capacity, storage=settings.config.local_storage_capacity_isolation):
        problems.append(missing)
    conditions, transitions = next_conditions(
        old.conditions, facts.pressures, problems, now, warning=facts.warning
    )
    gates, runtime = settings.gates, facts.runtime_status
    status = msgspec.structs.replace(
        old,
        capacity=capacity,
        allocatable=allocatable,
        conditions=conditions,
        daemon_endpoints=NodeDaemonEndpoints(kubelet_endpoint=DaemonEndpoint(port=settings.port)),
        node_info=_node_info(old.node_info, facts),
    )
    if facts.addresses_valid:
        status.addresses = next_addresses(old.addresses, settings, facts.own_address)
    if facts.images is not None:
        status.images = facts.images
    if facts.volumes_in_use is not None:
        status.volumes_in_use = facts.volumes_in_use
    if runtime is not None:
        status.runtime_handlers = runtime_handlers(runtime, gates)
        status.features = runtime_features(runtime, gates) or old.features
        status.declared_features = declared_features(runtime, gates)
    return status, transitions


def has_changed(old: Node, new: Node) -> bool:
    """Return whether anything but heartbeat times differs, which must be reported immediately."""
    return (
        old.metadata.labels != new.metadata.labels
        or old.metadata.annotations != new.metadata.annotations
        or _without_heartbeats(old.status) != _without_heartbeats(new.status)
    )


def node_patch(old: Node, new: Node) -> dict[str, Any]:
    """Return the patch of status, labels and annotations from `old` to `new`."""
    return merge_patch(_patch_document(old), _patch_document(new), MERGE_KEYS)


def _node_info(old: NodeSystemInfo, facts: Facts) -> NodeSystemInfo:
    machine = facts.machine
    return NodeSystemInfo(
        machine_id=machine.machine_id,
        system_uuid=machine.system_uuid,
        boot_id=machine.boot_id,
        kernel_version=machine.kernel,
        os_image=machine.os_image,
        container_runtime_version=facts.runtime_version or old.container_runtime_version,
        kubelet_version=KUBERNETES_VERSION,
        operating_system="linux",
        architecture=machine.architecture,
        swap=NodeSwapStatus(capacity=machine.swap_bytes) if machine.swap_bytes else UNSET,
    )


def _without_heartbeats(status: NodeStatus) -> NodeStatus:
    conditions = [
        msgspec.structs.replace(condition, last_heartbeat_time=None)
        for condition in sorted(status.conditions, key=lambda condition: condition.type)
    ]
    return msgspec.structs.replace(status, conditions=conditions)


def _patch_document(node: Node) -> dict[str, Any]:
    meta = {"labels": node.metadata.labels, "annotations": node.metadata.annotations}
    return {"metadata": meta, "status": to_document(node.status)}
