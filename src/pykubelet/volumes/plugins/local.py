"""local: a directory or a disk of this node, used through a PersistentVolumeClaim.

A directory is bind-mounted into the pod's directory. A disk that is used as a file system is mounted once for
all pods (`plugins/kubernetes.io/local-volume/mounts/<volume>`), formatted if it has no file system, and
bind-mounted from there; a disk that is used as a block device is mapped (`block.py`). fsGroup is applied
before the bind mount, so that a bound volume is ready; it is not applied while another pod uses the volume.
"""

from __future__ import annotations

import functools
import glob
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from pykubelet.api.volume import LocalDisk
from pykubelet.linux.mounts import unmount
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.block import map_device
from pykubelet.volumes.disks import format_and_mount
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import own
from pykubelet.volumes.paths import VolumeFolders, bind_flags, bind_folder, mount_at, plain
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

log = get_logger(__name__)
T = TypeVar("T")


class LocalKind(BaseVolumePlugin):
    """Plugin for local volumes."""

    folder = "kubernetes.io~local-volume"
    blocks = True
    options = True

    def __init__(self, given: VolumeHost) -> None:
        self._given = given
        self._disks = given.root / "plugins/kubernetes.io/local-volume/mounts"
        self._locks = Locks()

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Bind-mount the directory, or map the block device."""
        source = wanted.source
        assert isinstance(source, LocalDisk)
        path = checked_path(source.path, wanted.name)
        if wanted.block:
            link = await _thread(
                lambda: map_device(
                    self._given.root,
                    self.folder,
                    wanted.uid,
                    wanted.name,
                    path,
                    read_only=wanted.read_only,
                )
            )
            return MountedVolume("", read_only=wanted.read_only, device=link)
        place = VolumeFolders.of(self._given.root, wanted.uid).volume(self.folder, wanted.name)
        flags = bind_flags((*wanted.mount_options, *(("ro",) if wanted.read_only else ())))
        async with self._locks(wanted.name):
            origin = await self._origin(wanted, source, path)
            if not await _thread(lambda: mount_at(place) is not None):
                await self._own(wanted, origin)
            await _thread(lambda: bind_folder(origin, place, flags))
        return MountedVolume(str(place), read_only=wanted.read_only, relabel=not wanted.read_only)

    async def sweep(self, in_use: Collection[str]) -> None:
        """Unmount the disks that no pod uses."""
        for place in await _thread(self._mounted_disks):
            async with self._locks(place.name):
                if place.name not in in_use:
                    await _thread(functools.partial(_release, place))
                    log.info("Unmounted unused disk", volumeName=place.name)

    async def _origin(self, wanted: VolumeToMount, source: LocalDisk, path: Path) -> Path:
        """Return the directory to bind-mount; a disk is mounted first."""
        mode = await _thread(lambda: _mode(path))
        if stat.S_ISDIR(mode):
            return path
        if not stat.S_ISBLK(mode):
            raise BadSource("only directory and block device are supported")
        place = self._disks / plain(wanted.name)
        options = (*wanted.mount_options, *(("ro",) if wanted.read_only else ()))
        await format_and_mount(path, place, source.fs_type or "", options, read_only=wanted.read_only)
        return place

    async def _own(self, wanted: VolumeToMount, origin: Path) -> None:
        group = wanted.pod.spec.security_context.fs_group
        if group is None or wanted.read_only:
            return
        if not await _thread(lambda: self._others(wanted)):
            await own(wanted.pod, origin, self._given.tell)
            return
        found = await _thread(lambda: origin.stat().st_gid)
        if found != group:
            self._given.tell(
                wanted.pod,
                "Warning",
                "AlreadyMountedVolume",
                f"The requested fsGroup is {group}, but the volume {wanted.name} has GID {found}. "
                "The volume may not be shareable.",
            )

    def _others(self, wanted: VolumeToMount) -> bool:
        """Return whether another pod has mounted the volume."""
        places = (self._given.root / "pods").glob(f"*/volumes/{self.folder}/{glob.escape(wanted.name)}")
        return any(place.parts[-4] != wanted.uid and mount_at(place) is not None for place in places)

    def _mounted_disks(self) -> list[Path]:
        return sorted(self._disks.iterdir()) if self._disks.is_dir() else []


def checked_path(path: str, volume: str) -> Path:
    """Return the path of a local volume. Raises VolumePluginError if it is invalid."""
    if not path:
        raise VolumePluginError(f'LocalVolume volume "{volume}" path is empty')
    if ".." in path.split("/"):
        raise VolumePluginError(f"invalid path: {path} must not contain '..'")
    return Path("/", path)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise BadSource(f'path "{path}" does not exist') from None


def _release(place: Path) -> None:
    while unmount(place):
        continue
    place.rmdir()


async def _thread(work: Callable[[], T]) -> T:
    return await in_own_thread(work, name="local volume")
