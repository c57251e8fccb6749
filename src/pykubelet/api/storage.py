"""CSIDriver, CSINode and VolumeAttachment of storage.k8s.io, PersistentVolume and PersistentVolumeClaim.

Only the fields that a node reads. The source of a persistent volume is one of several types, as in a pod's
volume; types without an in-tree plugin are kept as written, to be translated to CSI or rejected by name.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources
from pykubelet.api.selector import NodeSelector
from pykubelet.api.volume import (
    ClaimSpec,
    ClaimStatus,
    CsiPersistent,
    FibreChannel,
    Flex,
    HostPath,
    Iscsi,
    LocalDisk,
    Nfs,
)


class CSIDriverTokenRequest(ObjectStruct):
    """A token of the pod's service account that a driver requires."""

    audience: str = ""
    expiration_seconds: int | None = None


class CsiDriverSpec(ObjectStruct):
    """Capabilities and requirements of a driver; the API server sets the defaults."""

    attach_required: bool | None = None
    pod_info_on_mount: bool | None = None
    volume_lifecycle_modes: list[str] = []
    fs_group_policy: str | None = None
    token_requests: list[CSIDriverTokenRequest] = []
    requires_republish: bool | None = None
    se_linux_mount: bool | None = None
    node_allocatable_update_period_seconds: int | None = None
    service_account_token_in_secrets: bool | None = None


class CsiDriver(ObjectStruct):
    """A CSIDriver object."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CsiDriverSpec = field(default_factory=CsiDriverSpec)


class VolumeNodeResources(ObjectStruct):
    """Maximum number of volumes of a driver on a node."""

    count: int | None = None


class CsiNodeDriver(ObjectStruct):
    """A CSI driver on a node."""

    name: str = ""
    node_id: str = ""
    topology_keys: list[str] = []
    allocatable: VolumeNodeResources | None = None


class CsiNodeSpec(ObjectStruct, omit_defaults=False):
    """The CSI drivers on a node; the list is written even if it is empty."""

    drivers: list[CsiNodeDriver] = []


class CsiNode(ObjectStruct):
    """A CSINode object; it has the node's name."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: CsiNodeSpec = field(default_factory=CsiNodeSpec)


class VolumeAttachmentSource(ObjectStruct):
    """The volume to attach: a PersistentVolume, or the spec of a translated in-tree volume."""

    persistent_volume_name: str | None = None
    inline_volume_spec: VolumeSpec | None = None


class VolumeAttachmentSpec(ObjectStruct):
    """The node, the CSI driver and the volume of an attachment."""

    attacher: str = ""
    node_name: str = ""
    source: VolumeAttachmentSource = field(default_factory=VolumeAttachmentSource)


class VolumeAttachmentError(ObjectStruct):
    """Error of an attach or detach operation."""

    message: str = ""
    error_code: int | None = None


class AttachmentStatus(ObjectStruct):
    """Status of an attachment."""

    attached: bool = False
    attachment_metadata: dict[str, str] = {}
    attach_error: VolumeAttachmentError | None = None
    detach_error: VolumeAttachmentError | None = None


class VolumeAttachment(ObjectStruct):
    """The attachment of a volume to a node."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: VolumeAttachmentSpec = field(default_factory=VolumeAttachmentSpec)
    status: AttachmentStatus = field(default_factory=AttachmentStatus)


BOUND = "Bound"
BLOCK = "Block"
FILESYSTEM = "Filesystem"
READ_ONLY_MANY = "ReadOnlyMany"
READ_WRITE_ONCE = "ReadWriteOnce"
READ_WRITE_ONCE_POD = "ReadWriteOncePod"
MOUNT_OPTIONS = "volume.beta.kubernetes.io/mount-options"
"""Annotation with a volume's mount options, from before they had a field."""
GROUP = "pv.beta.kubernetes.io/gid"
"""Annotation with the supplemental group that pods need to use a volume."""
PROTECTION = "kubernetes.io/pvc-protection"
"""Finalizer that keeps a claim while pods use it."""
AsWritten = dict[str, Any]


class ClaimReference(ObjectStruct):
    """The claim that a volume is bound to."""

    namespace: str = ""
    name: str = ""
    uid: str = ""


class VolumeNodeAffinity(ObjectStruct):
    """The nodes from which a volume is accessible."""

    required: NodeSelector | None = None


class VolumeSpec(ObjectStruct):
    """Spec of a persistent volume: exactly one source, and its properties."""

    access_modes: list[str] = []
    capacity: Resources = {}
    claim_ref: ClaimReference | None = None
    mount_options: list[str] = []
    storage_class_name: str = ""
    volume_mode: str | None = None
    node_affinity: VolumeNodeAffinity | None = None
    csi: CsiPersistent | None = None
    fc: FibreChannel | None = None
    flex_volume: Flex | None = None
    host_path: HostPath | None = None
    iscsi: Iscsi | None = None
    local: LocalDisk | None = None
    nfs: Nfs | None = None
    aws_elastic_block_store: AsWritten | None = None
    azure_disk: AsWritten | None = None
    azure_file: AsWritten | None = None
    cephfs: AsWritten | None = None
    cinder: AsWritten | None = None
    flocker: AsWritten | None = None
    gce_persistent_disk: AsWritten | None = None
    glusterfs: AsWritten | None = None
    photon_persistent_disk: AsWritten | None = None
    portworx_volume: AsWritten | None = None
    quobyte: AsWritten | None = None
    rbd: AsWritten | None = None
    scale_io: AsWritten | None = field(name="scaleIO", default=None)
    storageos: AsWritten | None = None
    vsphere_volume: AsWritten | None = None

    @property
    def sources(self) -> tuple[tuple[str, Any], ...]:
        """JSON name and value of each source that is set; a valid volume has one."""
        return tuple((wire, found) for name, wire in _KINDS if (found := getattr(self, name)) is not None)

    @property
    def is_block(self) -> bool:
        """Whether the volume is a raw block device."""
        return self.volume_mode == BLOCK


class VolumeStatus(ObjectStruct):
    """Phase of a persistent volume."""

    phase: str = ""


class PersistentVolume(ObjectStruct):
    """A persistent volume."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: VolumeSpec = field(default_factory=VolumeSpec)
    status: VolumeStatus = field(default_factory=VolumeStatus)


class PersistentVolumeClaim(ObjectStruct):
    """A persistent volume claim."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ClaimSpec = field(default_factory=ClaimSpec)
    status: ClaimStatus = field(default_factory=ClaimStatus)


_NON_SOURCE_FIELDS = frozenset(
    ("accessModes", "capacity", "claimRef", "mountOptions", "storageClassName", "volumeMode", "nodeAffinity")
)
_KINDS = tuple(
    (name, wire)
    for name, wire in zip(VolumeSpec.__struct_fields__, VolumeSpec.__struct_encode_fields__, strict=True)
    if wire not in _NON_SOURCE_FIELDS
)
