"""The node's status: put together from facts, compared with what the API server has, and sent as a patch.

Pure. Fields of the old status that no fact speaks of stay as they are, so that others can write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.merge_patch import REPLACE, merge_patch
from pykubelet.api.meta import Resources, to_document
from pykubelet.api.node import (
    ContainerImage,
    DaemonEndpoint,
    Node,
    NodeDaemonEndpoints,
    NodeStatus,
    NodeSwapStatus,
    NodeSystemInfo,
)
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.host.addresses import IPAddress
from pykubelet.host.machine import Machine
from pykubelet.node.addresses import PROVIDED_IP, next_addresses, provided_ip
from pykubelet.node.amounts import DeviceAmounts, missing_amounts, next_amounts
from pykubelet.node.conditions import Pressures, Transition, next_conditions
from pykubelet.node.features import declared_features, runtime_features, runtime_handlers
from pykubelet.node.settings import NodeSettings

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
    devices: DeviceAmounts = field(default_factory=DeviceAmounts)
    pressures: Pressures = field(default_factory=Pressures)
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
