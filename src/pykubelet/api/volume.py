"""Volumes of a pod spec, and volume sources that persistent volumes share.

Types that the kubelet mounts are typed; others are kept as written, so that they can be translated to CSI, or
the pod can be validated, shown, and rejected with the type's name.

The files of configMap, secret, downwardAPI and projected volumes are written by the kubelet. Their default
mode is 0644; the API server sets it explicitly, a manifest need not.

Pod volumes and persistent volumes share a struct where they only differ in the secret reference: a pod refers
to secrets of its own namespace, a persistent volume to those of any.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources
from pykubelet.api.quantity import Quantity
from pykubelet.api.selector import LabelSelector

DEFAULT_MODE = 0o644
DEFAULT_TOKEN_SECONDS = 3600


class ObjectFieldSelector(ObjectStruct):
    """A field of the pod."""

    field_path: str
    api_version: str = ""


class ResourceFieldSelector(ObjectStruct):
    """A resource of one of the pod's containers."""

    resource: str
    container_name: str = ""
    divisor: str | int = "0"


class KeyToPath(ObjectStruct):
    """Mapping of a key of a ConfigMap or secret to a file."""

    key: str
    path: str
    mode: int | None = None


class DownwardFile(ObjectStruct):
    """A file of a downward API volume: exactly one of a field and a resource."""

    path: str
    field_ref: ObjectFieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    mode: int | None = None


class ConfigMapVolume(ObjectStruct):
    """A ConfigMap as files: all its keys, or the listed ones."""

    name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class SecretVolume(ObjectStruct):
    """A secret as files: all its keys, or the listed ones."""

    secret_name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class DownwardVolume(ObjectStruct):
    """A downward API volume."""

    items: list[DownwardFile] = []
    default_mode: int | None = None


class ProjectedKeys(ObjectStruct):
    """A ConfigMap or secret as source of a projected volume."""

    name: str = ""
    items: list[KeyToPath] = []
    optional: bool | None = None


class ProjectedFields(ObjectStruct):
    """Downward API files as source of a projected volume."""

    items: list[DownwardFile] = []


class ProjectedToken(ObjectStruct):
    """A token of the pod's service account; without an audience it is for the API server."""

    path: str = ""
    audience: str = ""
    expiration_seconds: int | None = None


class ProjectedTrustBundle(ObjectStruct):
    """Root certificates: one bundle by name, or those of a signer that match the selector."""

    path: str = ""
    name: str | None = None
    signer_name: str | None = None
    label_selector: LabelSelector | None = None
    optional: bool | None = None


class PodCertificateProjection(ObjectStruct):
    """A key and a certificate chain that a signer issues for the pod, in one file or in two."""

    signer_name: str = ""
    key_type: str = ""
    max_expiration_seconds: int | None = None
    credential_bundle_path: str = ""
    key_path: str = ""
    certificate_chain_path: str = ""
    user_annotations: dict[str, str] = {}


class Projection(ObjectStruct):
    """A source of a projected volume; exactly one field is set."""

    config_map: ProjectedKeys | None = None
    secret: ProjectedKeys | None = None
    downward_api: ProjectedFields | None = None
    service_account_token: ProjectedToken | None = None
    cluster_trust_bundle: ProjectedTrustBundle | None = None
    pod_certificate: PodCertificateProjection | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """JSON names of the sources that are set."""
        return tuple(wire for name, wire in _PROJECTED_KINDS if getattr(self, name) is not None)


class ProjectedVolume(ObjectStruct):
    """Files of several sources in one volume; later sources have precedence."""

    sources: list[Projection] = []
    default_mode: int | None = None


_PROJECTED_KINDS = tuple(zip(Projection.__struct_fields__, Projection.__struct_encode_fields__, strict=True))


class SecretReference(ObjectStruct):
    """Reference to a secret; without a namespace it is the pod's."""

    name: str = ""
    namespace: str = ""


class HostPath(ObjectStruct):
    """A path on the host."""

    path: str
    type: str | None = None


class LocalDisk(ObjectStruct):
    """A directory or block device of one node; only for persistent volumes."""

    path: str = ""
    fs_type: str | None = None


class Nfs(ObjectStruct):
    """A directory exported by an NFS server."""

    server: str = ""
    path: str = ""
    read_only: bool = False


class Iscsi(ObjectStruct):
    """A LUN of an iSCSI target."""

    target_portal: str = ""
    iqn: str = ""
    lun: int = 0
    iscsi_interface: str = "default"
    fs_type: str = ""
    read_only: bool = False
    portals: list[str] = []
    chap_auth_discovery: bool = False
    chap_auth_session: bool = False
    secret_ref: SecretReference | None = None
    initiator_name: str | None = None


class FibreChannel(ObjectStruct):
    """A Fibre Channel disk: by target WWNs and LUN, or by WWID."""

    target_wwns: list[str] = field(name="targetWWNs", default_factory=list)
    lun: int | None = None
    fs_type: str = ""
    read_only: bool = False
    wwids: list[str] = []


class Flex(ObjectStruct):
    """A volume of a FlexVolume driver, an executable that the node's administrator installed."""

    driver: str = ""
    fs_type: str = ""
    secret_ref: SecretReference | None = None
    read_only: bool = False
    options: dict[str, str] = {}


class GitRepo(ObjectStruct):
    """A clone of a git repository."""

    repository: str = ""
    revision: str = ""
    directory: str = ""


class CsiInline(ObjectStruct):
    """A CSI ephemeral inline volume."""

    driver: str = ""
    read_only: bool | None = None
    fs_type: str | None = None
    volume_attributes: dict[str, str] = {}
    node_publish_secret_ref: SecretReference | None = None


class CsiPersistent(ObjectStruct):
    """A CSI volume with its handle."""

    driver: str = ""
    volume_handle: str = ""
    read_only: bool = False
    fs_type: str = ""
    volume_attributes: dict[str, str] = {}
    controller_publish_secret_ref: SecretReference | None = None
    node_stage_secret_ref: SecretReference | None = None
    node_publish_secret_ref: SecretReference | None = None
    node_expand_secret_ref: SecretReference | None = None


class ImageVolume(ObjectStruct):
    """An OCI image as volume."""

    reference: str = ""
    pull_policy: str = ""


class ClaimVolume(ObjectStruct):
    """The volume that a claim in the pod's namespace is bound to."""

    claim_name: str = ""
    read_only: bool = False


class ClaimSpec(ObjectStruct):
    """Requirements of a claim, and its bound volume."""

    access_modes: list[str] = []
    volume_name: str = ""
    volume_mode: str | None = None
    storage_class_name: str | None = None


class ClaimTemplate(ObjectStruct):
    """The claim that is created for a generic ephemeral volume."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ClaimSpec = field(default_factory=ClaimSpec)


class EphemeralVolume(ObjectStruct):
    """A generic ephemeral volume, whose claim has the pod's lifetime."""

    volume_claim_template: ClaimTemplate | None = None


class ClaimCondition(ObjectStruct):
    """A condition of a claim."""

    type: str = ""
    status: str = ""
    message: str = ""


class ClaimStatus(ObjectStruct):
    """Status of a claim; `capacity` is the actual size of its volume."""

    phase: str = ""
    access_modes: list[str] = []
    capacity: Resources = {}
    conditions: list[ClaimCondition] = []
    allocated_resource_statuses: dict[str, str] = {}


AsWritten = dict[str, Any]


class EmptyDir(ObjectStruct):
    """A directory with the pod's lifetime: on disk, in memory (`Memory`) or in huge pages."""

    medium: str = ""
    size_limit: Quantity | None = None


class Volume(ObjectStruct):
    """A named volume with exactly one source."""

    name: str
    empty_dir: EmptyDir | None = None
    host_path: HostPath | None = None
    aws_elastic_block_store: AsWritten | None = None
    azure_disk: AsWritten | None = None
    azure_file: AsWritten | None = None
    cephfs: AsWritten | None = None
    cinder: AsWritten | None = None
    config_map: ConfigMapVolume | None = None
    csi: CsiInline | None = None
    downward_api: DownwardVolume | None = None
    ephemeral: EphemeralVolume | None = None
    fc: FibreChannel | None = None
    flex_volume: Flex | None = None
    flocker: AsWritten | None = None
    gce_persistent_disk: AsWritten | None = None
    git_repo: GitRepo | None = None
    glusterfs: AsWritten | None = None
    image: ImageVolume | None = None
    iscsi: Iscsi | None = None
    nfs: Nfs | None = None
    persistent_volume_claim: ClaimVolume | None = None
    photon_persistent_disk: AsWritten | None = None
    portworx_volume: AsWritten | None = None
    projected: ProjectedVolume | None = None
    quobyte: AsWritten | None = None
    rbd: AsWritten | None = None
    scale_io: AsWritten | None = field(name="scaleIO", default=None)
    secret: SecretVolume | None = None
    storageos: AsWritten | None = None
    vsphere_volume: AsWritten | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """JSON names of the sources that are set; a valid volume has one."""
        return tuple(wire for name, wire in _VOLUME_KINDS if getattr(self, name) is not None)

    @property
    def sources(self) -> tuple[tuple[str, Any], ...]:
        """JSON name and value of each source that is set."""
        return tuple(
            (wire, found) for name, wire in _VOLUME_KINDS if (found := getattr(self, name)) is not None
        )


_VOLUME_KINDS = tuple(
    (name, wire)
    for name, wire in zip(Volume.__struct_fields__, Volume.__struct_encode_fields__, strict=True)
    if name != "name"
)
