"""Objects of storage.k8s.io: drivers, what a node has of them, and volumes attached to nodes."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct


class TokenWish(ObjectStruct):
    """A token of the pod's service account that a driver wants to have."""

    audience: str = ""
    expiration_seconds: int | None = None


class CsiDriverSpec(ObjectStruct):
    """How a driver wants to be used; the API server fills in what was not said."""

    attach_required: bool | None = None
    pod_info_on_mount: bool | None = None
    volume_lifecycle_modes: list[str] = []
    fs_group_policy: str | None = None
    token_requests: list[TokenWish] = []
    requires_republish: bool | None = None
    se_linux_mount: bool | None = None
    node_allocatable_update_period_seconds: int | None = None
    service_account_token_in_secrets: bool | None = None


class CsiDriver(ObjectStruct):
    """A driver, as the cluster knows it."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CsiDriverSpec = field(default_factory=CsiDriverSpec)


class VolumeNodeResources(ObjectStruct):
    """How many volumes of a driver a node can have."""

    count: int | None = None


class CsiNodeDriver(ObjectStruct):
    """A driver on a node."""

    name: str = ""
    node_id: str = ""
    topology_keys: list[str] = []
    allocatable: VolumeNodeResources | None = None


class CsiNodeSpec(ObjectStruct, omit_defaults=False):
    """The drivers on a node; the list is written even when it is empty."""

    drivers: list[CsiNodeDriver] = []


class CsiNode(ObjectStruct):
    """What a node has of drivers; it has the node's name."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CsiNodeSpec = field(default_factory=CsiNodeSpec)


class VolumeProblem(ObjectStruct):
    """Why a volume could not be attached."""

    message: str = ""
    error_code: int | None = None


class AttachmentStatus(ObjectStruct):
    """How far an attachment is."""

    attached: bool = False
    attachment_metadata: dict[str, str] = {}
    attach_error: VolumeProblem | None = None


class VolumeAttachment(ObjectStruct):
    """A volume on its way to a node, or there."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    status: AttachmentStatus = field(default_factory=AttachmentStatus)
