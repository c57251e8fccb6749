"""image: the files of an image, which the runtime mounts by itself if it can.

The agent has the image pulled as it does the containers' (`runtime/start.py`), and names it.
"""

from __future__ import annotations

from pykubelet.api.volume_sources import ImageVolume
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.kind import PlainKind, Surroundings, Wanted
from pykubelet.volumes.mounted import MountedVolume


class ImageKind(PlainKind):
    """Gives volumes of kind image."""

    slow = False

    def __init__(self, given: Surroundings) -> None:
        self._possible = given.image_volumes

    async def set_up(self, wanted: Wanted) -> MountedVolume:
        """Say which image it is; raises KindError when the runtime would only show an empty folder."""
        source = wanted.source
        assert isinstance(source, ImageVolume)
        if not self._possible:
            raise KindError(
                "this node's container runtime cannot mount images: "
                "containerd can from version 2.1 on, CRI-O from 1.31"
            )
        if not source.reference:
            raise KindError("it names no image")
        return MountedVolume("", read_only=True, image=source.reference)
