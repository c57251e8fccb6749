"""Volumes as a pod names them.

The kinds that the agent mounts are typed; the others are kept as they were written, so that a pod that
uses one can be checked, shown, and refused with the kind's name.

Volumes whose files the agent writes itself: configMap, secret, downwardAPI and projected.

A mode that is not given here is 0644; the API server writes it out, a manifest need not.

The sources of volumes that lie outside of the pod and of the API's objects.

One struct serves a pod's own volume and a persistent one where they differ only in how a secret is
named: a pod names those of its own namespace, a persistent volume any.
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
    """A field of the pod itself."""

    field_path: str
    api_version: str = ""


class ResourceFieldSelector(ObjectStruct):
    """A resource of one of the pod's containers."""

    resource: str
    container_name: str = ""
    divisor: str | int = "0"


class KeyToPath(ObjectStruct):
    """One key of a configMap or secret, and the file that it becomes."""

    key: str
    path: str
    mode: int | None = None


class DownwardFile(ObjectStruct):
    """A file that says something about the pod: exactly one of a field and a resource."""

    path: str
    field_ref: ObjectFieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    mode: int | None = None


class ConfigMapVolume(ObjectStruct):
    """The files of a configMap: all its keys, or the given ones."""

    name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class SecretVolume(ObjectStruct):
    """The files of a secret: all its keys, or the given ones."""

    secret_name: str = ""
    items: list[KeyToPath] = []
    default_mode: int | None = None
    optional: bool | None = None


class DownwardVolume(ObjectStruct):
    """Files about the pod itself."""

    items: list[DownwardFile] = []
    default_mode: int | None = None


class ProjectedKeys(ObjectStruct):
    """A configMap or secret among the sources of a projected volume."""

    name: str = ""
    items: list[KeyToPath] = []
    optional: bool | None = None


class ProjectedFields(ObjectStruct):
    """Files about the pod among the sources of a projected volume."""

    items: list[DownwardFile] = []


class ProjectedToken(ObjectStruct):
    """A token of the pod's service account; no audience means the API server."""

    path: str = ""
    audience: str = ""
    expiration_seconds: int | None = None


class ProjectedTrustBundle(ObjectStruct):
    """Root certificates: one bundle by name, or all of a signer that the selector chooses."""

    path: str = ""
    name: str | None = None
    signer_name: str | None = None
    label_selector: LabelSelector | None = None
    optional: bool | None = None


class Projection(ObjectStruct):
    """One source of a projected volume; exactly one of these."""

    config_map: ProjectedKeys | None = None
    secret: ProjectedKeys | None = None
    downward_api: ProjectedFields | None = None
    service_account_token: ProjectedToken | None = None
    cluster_trust_bundle: ProjectedTrustBundle | None = None
    pod_certificate: dict[str, Any] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are set, as the API writes them."""
        return tuple(wire for name, wire in _PROJECTED_KINDS if getattr(self, name) is not None)


class ProjectedVolume(ObjectStruct):
    """The files of several sources in one volume; later sources win."""

    sources: list[Projection] = []
    default_mode: int | None = None


_PROJECTED_KINDS = tuple(zip(Projection.__struct_fields__, Projection.__struct_encode_fields__, strict=True))


class SecretReference(ObjectStruct):
    """A secret; no namespace means the pod's own."""

    name: str = ""
    namespace: str = ""


class HostPath(ObjectStruct):
    """A path of the machine."""

    path: str
    type: str | None = None


class LocalDisk(ObjectStruct):
    """A directory, or a block device, of one node; only persistent volumes may be such."""

    path: str = ""
    fs_type: str | None = None


class Nfs(ObjectStruct):
    """A directory of an NFS server."""

    server: str = ""
    path: str = ""
    read_only: bool = False


class Iscsi(ObjectStruct):
    """A disk of an iSCSI target."""

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
    """A disk of a fibre channel: by target and lun, or by its world-wide id."""

    target_wwns: list[str] = field(name="targetWWNs", default_factory=list)
    lun: int | None = None
    fs_type: str = ""
    read_only: bool = False
    wwids: list[str] = []


class Flex(ObjectStruct):
    """A volume that a program of the node's administrator makes."""

    driver: str = ""
    fs_type: str = ""
    secret_ref: SecretReference | None = None
    read_only: bool = False
    options: dict[str, str] = {}


class GitRepo(ObjectStruct):
    """A clone of a repository."""

    repository: str = ""
    revision: str = ""
    directory: str = ""


class CsiInline(ObjectStruct):
    """A volume that a driver makes for one pod."""

    driver: str = ""
    read_only: bool | None = None
    fs_type: str | None = None
    volume_attributes: dict[str, str] = {}
    node_publish_secret_ref: SecretReference | None = None


class CsiPersistent(ObjectStruct):
    """A volume that a driver knows by its handle."""

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
    """The files of an image."""

    reference: str = ""
    pull_policy: str = ""


class ClaimVolume(ObjectStruct):
    """Whatever volume a claim of the pod's namespace is bound to."""

    claim_name: str = ""
    read_only: bool = False


class ClaimSpec(ObjectStruct):
    """What a claim asks for, and the volume that it got."""

    access_modes: list[str] = []
    volume_name: str = ""
    volume_mode: str | None = None
    storage_class_name: str | None = None


class ClaimTemplate(ObjectStruct):
    """The claim that is made for a generic ephemeral volume."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ClaimSpec = field(default_factory=ClaimSpec)


class EphemeralVolume(ObjectStruct):
    """A volume with a claim that lives and dies with the pod."""

    volume_claim_template: ClaimTemplate | None = None


class ClaimCondition(ObjectStruct):
    """One thing that is true of a claim, or not."""

    type: str = ""
    status: str = ""
    message: str = ""


class ClaimStatus(ObjectStruct):
    """How far a claim is; `capacity` is the size of its volume as the pods see it."""

    phase: str = ""
    access_modes: list[str] = []
    capacity: Resources = {}
    conditions: list[ClaimCondition] = []
    allocated_resource_statuses: dict[str, str] = {}


AsWritten = dict[str, Any]


class EmptyDir(ObjectStruct):
    """A folder that lives and dies with the pod: on disk, `Memory` or huge pages."""

    medium: str = ""
    size_limit: Quantity | None = None


class Volume(ObjectStruct):
    """A named volume of exactly one kind."""

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
        """The kinds that are set, as the API writes them; a good volume has exactly one."""
        return tuple(wire for name, wire in _VOLUME_KINDS if getattr(self, name) is not None)

    @property
    def sources(self) -> tuple[tuple[str, Any], ...]:
        """The kinds that are set, each with what was written of it."""
        return tuple(
            (wire, found) for name, wire in _VOLUME_KINDS if (found := getattr(self, name)) is not None
        )


_VOLUME_KINDS = tuple(
    (name, wire)
    for name, wire in zip(Volume.__struct_fields__, Volume.__struct_encode_fields__, strict=True)
    if name != "name"
)
