"""Volumes as a pod names them.

The kinds that the agent mounts are typed; the others are kept as they were written, so that a pod that
uses one can be checked, shown, and refused with the kind's name.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from pykubelet.api.meta import ObjectStruct
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume_files import ConfigMapVolume, DownwardVolume, ProjectedVolume, SecretVolume
from pykubelet.api.volume_sources import (
    ClaimVolume,
    CsiInline,
    EphemeralVolume,
    FibreChannel,
    Flex,
    GitRepo,
    HostPath,
    ImageVolume,
    Iscsi,
    Nfs,
)

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
        return tuple(wire for name, wire in _KINDS if getattr(self, name) is not None)

    @property
    def sources(self) -> tuple[tuple[str, Any], ...]:
        """The kinds that are set, each with what was written of it."""
        return tuple((wire, found) for name, wire in _KINDS if (found := getattr(self, name)) is not None)


_KINDS = tuple(
    (name, wire)
    for name, wire in zip(Volume.__struct_fields__, Volume.__struct_encode_fields__, strict=True)
    if name != "name"
)
