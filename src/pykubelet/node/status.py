"""The node's status: put together from facts, compared with what the API server has, and sent as a patch.

Pure. Fields of the old status that no fact speaks of stay as they are, so that others can write there.

What the node has to give: capacity and allocatable in its status.

Pure. What the machine has and what device plugins offer is set; what somebody else advertised by
hand stays. All that is reserved or kept free is then taken off.

What the node has and can do beside running pods: its images, its runtime's handlers, its features.

A feature is declared only when this agent really has it, whatever its gate says, because others act on it:

- the scheduler sends pods that need a feature only to nodes that declare it (a rule that restarts all
  containers; a user namespace on the node's network), and leaves them pending where there is none;
- the API server refuses changes that a pod's node cannot make (resizing a whole pod, or its init
  containers, in place) instead of taking them for nothing to happen;
- the API server hands WebSocket streams on as they are to nodes that translate them, and translates
  them itself for all others: a node that declares that and cannot do it breaks `kubectl exec`.

`NOT_BUILT` are the ones that the reference declares by default and this agent does not have: whoever builds
one moves its name to `_DECLARED`, and `tests/cluster/test_golden.py` compares the rest with the reference.
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

NOTHING = Quantity.of(0)


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """What device plugins offer; resources whose plugin went away are `removed`."""

    capacity: Resources = field(default_factory=dict)
    allocatable: Resources = field(default_factory=dict)
    removed: Sequence[str] = ()


def next_amounts(
    old_capacity: Resources,
    old_allocatable: Resources,
    machine: Resources,
    devices: DeviceCapacity,
    settings: NodeSettings,
) -> tuple[Resources, Resources]:
    """Give capacity and allocatable as they are now."""
    capacity = {**old_capacity, **machine, **devices.capacity, **dict.fromkeys(devices.removed, NOTHING)}
    left = allocatable(capacity, settings.config, ignore_eviction=settings.ignore_eviction)
    kept = {
        name: old
        for name, old in old_allocatable.items()
        if not is_extended_resource(name) or name in capacity
    }
    return capacity, {**kept, **left, **devices.allocatable}


def missing_amounts(capacity: Resources, *, storage: bool) -> str:
    """Say which resources that every node has are missing; empty when none is."""
    needed = ["cpu", "memory", "pods", *(["ephemeral-storage"] if storage else [])]
    absent = [name for name in needed if name not in capacity]
    return f"missing node capacity for resources: {', '.join(absent)}" if absent else ""


NAMES_PER_IMAGE = 5
NOT_BUILT = frozenset({"ExtendWebSocketsToKubelet"})
_DECLARED: Mapping[str, Callable[[pb.RuntimeFeatures], bool]] = {
    "InPlacePodLevelResourcesVerticalScaling": lambda runtime: True,
    "InPlacePodVerticalScalingInitContainers": lambda runtime: True,
    "RestartAllContainersOnContainerExits": lambda runtime: True,
    # The agent asks for both; whether they go together is the runtime's matter.
    "UserNamespacesHostNetworkSupport": lambda runtime: runtime.user_namespaces_host_network,
}
"""What this agent has, each with what it needs of the runtime."""
_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_SEMANTIC = re.compile(rf"v?(\d+\.\d+\.\d+(?:-{_IDENTIFIERS})?(?:\+{_IDENTIFIERS})?)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)")


def plain_version(text: str) -> str:
    """Give a version as the cluster's tools can compare it: without what a distribution appended."""
    text = text.strip()
    found = _SEMANTIC.fullmatch(text) or _NUMBERS.match(text)
    return found[1] if found else text


def image_list(images: Iterable[pb.Image], most: int) -> list[ContainerImage]:
    """List images for the node's status, the largest first; `most` below zero: all of them."""
    # By id where the sizes are equal, so that the list does not change without a reason.
    ordered = sorted(images, key=lambda image: (image.size, image.id), reverse=True)
    return [
        ContainerImage(
            names=[*image.repo_digests, *image.repo_tags][:NAMES_PER_IMAGE] or None, size_bytes=image.size
        )
        for image in (ordered if most < 0 else ordered[:most])
    ]


def runtime_handlers(status: pb.StatusResponse | None, gates: FeatureGates) -> list[NodeRuntimeHandler]:
    """List the runtime's handlers by name, with what each can do."""
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
    """Give what the runtime can do whatever the handler; None when it does not say."""
    if status is None or not status.HasField("features") or not gates.enabled("SupplementalGroupsPolicy"):
        return None
    return NodeFeatures(supplemental_groups_policy=status.features.supplemental_groups_policy)


def declared_features(status: pb.StatusResponse | None, gates: FeatureGates) -> list[str]:
    """List the features that others must know of before they ask this node for them, by name."""
    if status is None or not gates.enabled("NodeDeclaredFeatures"):
        return []
    return sorted(
        name for name, supported in _DECLARED.items() if gates.enabled(name) and supported(status.features)
    )


MERGE_KEYS = {"status.conditions": "type", "status.addresses": REPLACE}
"""How the API merges a node's lists; addresses share types, so merging them by type loses some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is known of the node at one moment; None: not known, leave what was."""

    machine: Machine
    capacity: Resources
    runtime_version: str | None = None
    """`containerd://1.6.20`."""
    runtime_status: pb.StatusResponse | None = None
    images: list[ContainerImage] | None = None
    own_address: IPAddress | None = None
    addresses_valid: bool = True
    """Whether what `--node-ip` names is this machine's; else the old addresses stay."""
    volumes_in_use: list[str] | None = None
    devices: DeviceCapacity = field(default_factory=DeviceCapacity)
    pressures: NodePressure = field(default_factory=NodePressure)
    problems: Sequence[str] = ()
    warning: str = ""


def next_node(
    old: Node, facts: Facts, settings: NodeSettings, now: datetime
) -> tuple[Node, list[Transition]]:
    """Give the node as it should be now, and which conditions changed."""
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
    """Give the status as it should be now, and which conditions changed."""
    capacity, allocatable = next_amounts(
        old.capacity, old.allocatable, facts.capacity, facts.devices, settings
    )
    problems = list(facts.problems)
    if missing := missing_amounts(capacity, storage=settings.config.local_storage_capacity_isolation):
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
    """Whether something differs that is worth telling at once: anything but the times of heartbeats."""
    return (
        old.metadata.labels != new.metadata.labels
        or old.metadata.annotations != new.metadata.annotations
        or _without_heartbeats(old.status) != _without_heartbeats(new.status)
    )


def node_patch(old: Node, new: Node) -> dict[str, Any]:
    """Give the patch of the node's status (and labels and annotations) that makes `new` of `old`."""
    return merge_patch(_sent(old), _sent(new), MERGE_KEYS)


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
    still = [
        msgspec.structs.replace(condition, last_heartbeat_time=None)
        for condition in sorted(status.conditions, key=lambda condition: condition.type)
    ]
    return msgspec.structs.replace(status, conditions=still)


def _sent(node: Node) -> dict[str, Any]:
    meta = {"labels": node.metadata.labels, "annotations": node.metadata.annotations}
    return {"metadata": meta, "status": to_document(node.status)}
