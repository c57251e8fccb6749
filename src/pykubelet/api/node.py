"""Node and Lease objects.

The node status, which the kubelet writes, is complete; of the spec only the fields that the kubelet reads or
sets. The lease is complete, because it is renewed by replacing it; its times have exactly six digits of
microseconds, since the API server rejects any other number.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import UNSET, UnsetType, field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources


class Taint(ObjectStruct):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: datetime | None = None


class NodeSpec(ObjectStruct):
    """Spec of a node: decisions of other components."""

    pod_cidr: str = ""
    pod_cidrs: list[str] = []
    provider_id: str = ""
    unschedulable: bool = False
    taints: list[Taint] = []


class NodeCondition(ObjectStruct):
    """A condition of a node, such as Ready."""

    type: str = ""
    status: str = ""
    last_heartbeat_time: datetime | None = None
    last_transition_time: datetime | None = None
    reason: str = ""
    message: str = ""


class NodeAddress(ObjectStruct):
    """An address of a node: InternalIP, ExternalIP, Hostname, …."""

    type: str = ""
    address: str = ""


class DaemonEndpoint(ObjectStruct):
    """A port; the API writes the field name with a capital letter."""

    port: int = field(name="Port", default=0)


class NodeDaemonEndpoints(ObjectStruct):
    """The port of the kubelet's server."""

    kubelet_endpoint: DaemonEndpoint = field(default_factory=DaemonEndpoint)


class NodeSwapStatus(ObjectStruct):
    """Swap space in bytes."""

    capacity: int | None = None


class NodeSystemInfo(ObjectStruct, omit_defaults=False):
    """Host and version information; empty strings are written as well."""

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
    """An image on the node, with its size in bytes; `names` is null for an image without names."""

    names: list[str] | None = None
    size_bytes: int = 0


class AttachedVolume(ObjectStruct):
    """A volume that the attach/detach controller attached."""

    name: str = ""
    device_path: str = ""


class NodeRuntimeHandlerFeatures(ObjectStruct):
    """Features of a runtime handler."""

    recursive_read_only_mounts: bool | None = None
    user_namespaces: bool | None = None


class NodeRuntimeHandler(ObjectStruct, omit_defaults=False):
    """A runtime handler; the default handler has an empty name, which is written as well."""

    name: str = ""
    features: NodeRuntimeHandlerFeatures | UnsetType = UNSET


class NodeFeatures(ObjectStruct):
    """Features of the runtime, independent of the handler."""

    supplemental_groups_policy: bool | None = None


class NodeStatus(ObjectStruct):
    """Status of a node, as the kubelet reports it."""

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
    """A node."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)


class LeaseSpec(ObjectStruct):
    """Holder and times of a lease; the times are formatted by `micro_time`."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class Lease(ObjectStruct):
    """A lease: the heartbeat of a node."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: LeaseSpec = field(default_factory=LeaseSpec)


def micro_time(moment: datetime) -> str:
    """Format a time with microseconds: `2026-07-24T08:30:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
