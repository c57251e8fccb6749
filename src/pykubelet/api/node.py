"""The node as the API server keeps it: what the cluster wants of it, and what the agent reports.

Complete in its status, which the agent writes; of the spec only what the agent reads or sets.

Leases, by which a node shows that it is alive.

The struct is complete, because a lease is renewed by replacing it. Its times have microseconds,
always six digits of them: the API server refuses any other number.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import UNSET, UnsetType, field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources


class Taint(ObjectStruct):
    """What keeps pods away from a node."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: datetime | None = None


class NodeSpec(ObjectStruct):
    """What others decided about the node."""

    pod_cidr: str = ""
    pod_cidrs: list[str] = []
    provider_id: str = ""
    unschedulable: bool = False
    taints: list[Taint] = []


class NodeCondition(ObjectStruct):
    """One judgement about the node, such as Ready."""

    type: str = ""
    status: str = ""
    last_heartbeat_time: datetime | None = None
    last_transition_time: datetime | None = None
    reason: str = ""
    message: str = ""


class NodeAddress(ObjectStruct):
    """A way to reach the node: InternalIP, ExternalIP, Hostname…"""

    type: str = ""
    address: str = ""


class DaemonEndpoint(ObjectStruct):
    """A port; the field's capital letter is Kubernetes' own."""

    port: int = field(name="Port", default=0)


class NodeDaemonEndpoints(ObjectStruct):
    """Where the agent listens."""

    kubelet_endpoint: DaemonEndpoint = field(default_factory=DaemonEndpoint)


class NodeSwapStatus(ObjectStruct):
    """Swap space in bytes."""

    capacity: int | None = None


class NodeSystemInfo(ObjectStruct, omit_defaults=False):
    """What the machine is; every text is written, also an empty one."""

    machine_id: str = ""
    system_uuid: str = ""
    boot_id: str = ""
    kernel_version: str = ""
    os_image: str = ""
    container_runtime_version: str = ""
    kubelet_version: str = ""
    kube_proxy_version: str = ""
    operating_system: str = ""
    architecture: str = ""
    swap: NodeSwapStatus | UnsetType = UNSET


class ContainerImage(ObjectStruct):
    """An image that the node has; its size in bytes. One without names has null there."""

    names: list[str] | None = None
    size_bytes: int = 0


class AttachedVolume(ObjectStruct):
    """A volume that the attach controller attached."""

    name: str = ""
    device_path: str = ""


class NodeRuntimeHandlerFeatures(ObjectStruct):
    """What one runtime handler can do."""

    recursive_read_only_mounts: bool | None = None
    user_namespaces: bool | None = None


class NodeRuntimeHandler(ObjectStruct, omit_defaults=False):
    """A runtime handler; the default one has an empty name, which is written too."""

    name: str = ""
    features: NodeRuntimeHandlerFeatures | UnsetType = UNSET


class NodeFeatures(ObjectStruct):
    """What the runtime can do whatever the handler."""

    supplemental_groups_policy: bool | None = None


class NodeStatus(ObjectStruct):
    """What the agent reports."""

    capacity: Resources = {}
    allocatable: Resources = {}
    phase: str = ""
    conditions: list[NodeCondition] = []
    addresses: list[NodeAddress] = []
    daemon_endpoints: NodeDaemonEndpoints = field(default_factory=NodeDaemonEndpoints)
    node_info: NodeSystemInfo = field(default_factory=NodeSystemInfo)
    images: list[ContainerImage] = []
    volumes_in_use: list[str] = []
    volumes_attached: list[AttachedVolume] = []
    runtime_handlers: list[NodeRuntimeHandler] = []
    features: NodeFeatures | None = None
    declared_features: list[str] = []


class Node(ObjectStruct):
    """A node of the cluster."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)


class LeaseSpec(ObjectStruct):
    """Who holds the lease, since when and for how long; times as `micro_time` writes them."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class Lease(ObjectStruct):
    """A lease."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: LeaseSpec = field(default_factory=LeaseSpec)


def micro_time(moment: datetime) -> str:
    """Write a time with its microseconds: `2026-07-24T08:30:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
