"""The sources of volumes that lie outside of the pod and of the API's objects.

One struct serves a pod's own volume and a persistent one where they differ only in how a secret is
named: a pod names those of its own namespace, a persistent volume any.
"""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources


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
