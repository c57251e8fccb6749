"""Pod status: phase, conditions, container states."""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import field

from pykubelet.api.meta import ObjectStruct, Resources, wire_name


class ContainerStateWaiting(ObjectStruct):
    """State of a container that does not run yet, with the reason."""

    reason: str = ""
    message: str = ""


class ContainerStateRunning(ObjectStruct):
    """State of a running container."""

    started_at: datetime | None = None


class ContainerStateTerminated(msgspec.Struct, kw_only=True, rename=wire_name):
    """State of a container that has exited; the exit code is written even if it is zero."""

    exit_code: int
    signal: int | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET
    started_at: datetime | None = None
    finished_at: datetime | None = None
    container_id: str | msgspec.UnsetType = msgspec.UNSET


class ContainerState(ObjectStruct):
    """State of a container; at most one field is set."""

    waiting: ContainerStateWaiting | None = None
    running: ContainerStateRunning | None = None
    terminated: ContainerStateTerminated | None = None


class StatusResources(ObjectStruct):
    """Actual resources of a running container."""

    limits: Resources = {}
    requests: Resources = {}


class ImageVolumeStatus(ObjectStruct):
    """Image that a volume contains."""

    image_ref: str = ""


class VolumeStatus(ObjectStruct):
    """Status of a mounted volume by its kind."""

    image: ImageVolumeStatus | None = None


class VolumeMountStatus(ObjectStruct):
    """Status of a volume mount."""

    name: str
    mount_path: str
    read_only: bool = False
    recursive_read_only: str | None = None
    volume_status: VolumeStatus | None = None


class LinuxUser(msgspec.Struct, kw_only=True, rename=wire_name):
    """User and group ids of a container's first process."""

    uid: int
    gid: int
    supplemental_groups: list[int] = []


class ContainerUser(ObjectStruct):
    """User of a container's first process."""

    linux: LinuxUser | None = None


class ResourceHealth(msgspec.Struct, kw_only=True, rename=wire_name):
    """Health of one device: `Healthy`, `Unhealthy` or `Unknown`."""

    resource_id: str
    health: str = "Healthy"
    message: str | msgspec.UnsetType = msgspec.UNSET


class ResourceStatus(msgspec.Struct, kw_only=True, rename=wire_name):
    """Health of a container's devices of one resource; claims are named `claim:NAME/REQUEST`."""

    name: str
    resources: list[ResourceHealth] = []


class ContainerStatus(msgspec.Struct, kw_only=True, rename=wire_name):
    """Status of one container; the fields up to `image_id` are always written, as clients expect."""

    name: str
    state: ContainerState = field(default_factory=ContainerState)
    last_state: ContainerState = field(default_factory=ContainerState)
    ready: bool = False
    restart_count: int = 0
    image: str = ""
    image_id: str = ""
    container_id: str | msgspec.UnsetType = msgspec.UNSET
    started: bool | msgspec.UnsetType = msgspec.UNSET
    allocated_resources: Resources | msgspec.UnsetType = msgspec.UNSET
    resources: StatusResources | msgspec.UnsetType = msgspec.UNSET
    volume_mounts: list[VolumeMountStatus] | msgspec.UnsetType = msgspec.UNSET
    user: ContainerUser | msgspec.UnsetType = msgspec.UNSET
    allocated_resources_status: list[ResourceStatus] | msgspec.UnsetType = msgspec.UNSET
    stop_signal: str | msgspec.UnsetType = msgspec.UNSET


class PodCondition(msgspec.Struct, kw_only=True, rename=wire_name):
    """A condition of a pod."""

    type: str
    status: str
    observed_generation: int | msgspec.UnsetType = msgspec.UNSET
    last_probe_time: datetime | None = None
    last_transition_time: datetime | None = None
    reason: str | msgspec.UnsetType = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET


class AddressStatus(ObjectStruct):
    """An IP address of the pod or its host."""

    ip: str = ""


class PodResourceClaimStatus(ObjectStruct):
    """The ResourceClaim of one of the pod's claims; without a name none was needed."""

    name: str = ""
    resource_claim_name: str | None = None


class ExtendedRequestMapping(ObjectStruct):
    """The request of the claim for a container's extended resource."""

    container_name: str = ""
    resource_name: str = ""
    request_name: str = ""


class ExtendedResourceClaimStatus(ObjectStruct):
    """The claim that the scheduler created for the pod's extended resources."""

    request_mappings: list[ExtendedRequestMapping] = []
    resource_claim_name: str = ""


class NodeAllocatableResourceClaimStatus(ObjectStruct):
    """Resources of the node that a claim of the pod uses, set by the scheduler."""

    resource_claim_name: str = ""
    containers: list[str] = []
    resources: Resources = {}


class PodStatus(ObjectStruct):
    """Status of a pod."""

    observed_generation: int = 0
    phase: str = ""
    conditions: list[PodCondition] = []
    message: str = ""
    reason: str = ""
    nominated_node_name: str = ""
    host_ip: str = ""
    host_ips: list[AddressStatus] = []
    pod_ip: str = ""
    pod_ips: list[AddressStatus] = []
    start_time: datetime | None = None
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []
    ephemeral_container_statuses: list[ContainerStatus] = []
    qos_class: str = ""
    resize: str = ""
    allocated_resources: Resources = {}
    resources: StatusResources | None = None
    resource_claim_statuses: list[PodResourceClaimStatus] = []
    extended_resource_claim_status: ExtendedResourceClaimStatus | None = None
    node_allocatable_resource_claim_statuses: list[NodeAllocatableResourceClaimStatus] = []
