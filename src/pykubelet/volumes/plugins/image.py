"""image: the files of an image, which the runtime mounts by itself if it can.

The agent has the image pulled as it does the containers' (`runtime/start.py`), and names it.

Kinds of volumes that no node mounts by itself any more, and that no driver has taken over as they are.

Each is refused in one line that says what to use instead.
"""

from __future__ import annotations

from typing import NoReturn

from pykubelet.api.volume import ImageVolume
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount


class ImageKind(BaseVolumePlugin):
    """Gives volumes of kind image."""

    slow = False

    def __init__(self, given: VolumeHost) -> None:
        self._possible = given.image_volumes

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Say which image it is; raises KindError when the runtime would only show an empty folder."""
        source = wanted.source
        assert isinstance(source, ImageVolume)
        if not self._possible:
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
_GONE = ("flocker", "glusterfs", "photonPersistentDisk", "quobyte", "scaleIO", "storageos")
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
        for kind in _GONE
    },
    "gitRepo": _GIT,
}
"""Why a kind is refused, by the API's name of the kind."""


class UnsupportedVolumePlugin(BaseVolumePlugin):
    """Gives no volumes, and says why."""

    slow = False
    blocks = True
    options = True

    async def set_up(self, wanted: VolumeToMount) -> NoReturn:
        """Refuse it."""
        raise BadSource(REASONS[wanted.kind])
