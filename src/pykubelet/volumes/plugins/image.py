"""image: images that the container runtime mounts itself; and the volume types that are not supported.

The image is pulled like those of containers (`kuberuntime/start.py`); the plugin only returns its reference.

Volume types that Kubernetes has removed, and that are not translated to a CSI driver, are rejected with one
line that names the alternative.
"""

from __future__ import annotations

from typing import NoReturn

from pykubelet.api.volume import ImageVolume
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class ImagePlugin(BaseVolumePlugin):
    """Plugin for image volumes."""

    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._supported = host.options.image_volumes

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Return the image. Raises VolumePluginError if the runtime would only mount an empty directory."""
        source = volume.source
        assert isinstance(source, ImageVolume)
        if not self._supported():
            raise VolumePluginError(
                "this node's container runtime cannot mount images: "
                "containerd can from version 2.1 on, CRI-O from 1.31"
            )
        if not source.reference:
            raise VolumePluginError("it names no image")
        return MountedVolume("", read_only=True, image=source.reference)


_DRIVERS = {
    "cephfs": "cephfs.csi.ceph.com",
    "rbd": "rbd.csi.ceph.com",
}
_REMOVED = ("flocker", "glusterfs", "photonPersistentDisk", "quobyte", "scaleIO", "storageos")
_GIT = (
    "gitRepo volumes are not supported: cloning runs programs of the repository's author as root on the "
    "node (CVE-2024-10220, CVE-2025-1767); clone into an emptyDir volume with an init container instead"
)
REASONS = {
    **{
        kind: f"{kind} volumes are no longer mounted by the node itself: use a persistent volume claim "
        f"with the CSI driver {driver}"
        for kind, driver in _DRIVERS.items()
    },
    **{
        kind: f"{kind} volumes were removed from Kubernetes: use a CSI driver, nfs or local volumes instead"
        for kind in _REMOVED
    },
    "gitRepo": _GIT,
}
"""Rejection messages, by the volume type's name in the API."""


class UnsupportedVolumePlugin(BaseVolumePlugin):
    """Plugin that rejects all volumes, with the reason."""

    slow = False
    blocks = True
    options = True

    async def set_up(self, volume: VolumeToMount) -> NoReturn:
        """Reject the volume. Raises BadSource."""
        raise BadSource(REASONS[volume.kind])
