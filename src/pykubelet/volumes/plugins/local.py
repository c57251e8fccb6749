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
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mounts.block import map_device
from pykubelet.volumes.mounts.disks import format_and_mount
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import apply_fs_group
from pykubelet.volumes.paths import PodVolumePaths, bind_directory, bind_flags, mount_at, path_component
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

log = get_logger(__name__)
T = TypeVar("T")


class LocalPlugin(BaseVolumePlugin):
    """Plugin for local volumes."""

    directory_name = "kubernetes.io~local-volume"
    blocks = True
    options = True

    def __init__(self, host: VolumeHost) -> None:
        self._host = host
        self._disks = host.root / "plugins/kubernetes.io/local-volume/mounts"
        self._locks = Locks()

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Bind-mount the directory, or map the block device."""
        source = volume.source
        assert isinstance(source, LocalDisk)
        path = checked_path(source.path, volume.name)
        if volume.block:
            link = await _thread(
                lambda: map_device(
                    self._host.root,
                    self.directory_name,
                    volume.uid,
                    volume.name,
                    path,
                    read_only=volume.read_only,
                )
            )
            return MountedVolume("", read_only=volume.read_only, device=link)
        mount_point = PodVolumePaths.for_pod(self._host.root, volume.uid).volume(
            self.directory_name, volume.name
        )
        flags = bind_flags((*volume.mount_options, *(("ro",) if volume.read_only else ())))
        async with self._locks(volume.name):
            directory = await self._source_directory(volume, source, path)
            if not await _thread(lambda: mount_at(mount_point) is not None):
                await self._apply_fs_group(volume, directory)
            await _thread(lambda: bind_directory(directory, mount_point, flags))
        return MountedVolume(str(mount_point), read_only=volume.read_only, relabel=not volume.read_only)

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Unmount the disks that no pod uses."""
        for mount_point in await _thread(self._mounted_disks):
            async with self._locks(mount_point.name):
                if mount_point.name not in in_use:
                    await _thread(functools.partial(_release, mount_point))
                    log.info("Unmounted unused disk", volumeName=mount_point.name)

    async def _source_directory(self, volume: VolumeToMount, source: LocalDisk, path: Path) -> Path:
        """Return the directory to bind-mount; a disk is mounted first."""
        mode = await _thread(lambda: _mode(path))
        if stat.S_ISDIR(mode):
            return path
        if not stat.S_ISBLK(mode):
            raise BadSource("only directory and block device are supported")
        mount_point = self._disks / path_component(volume.name)
        options = (*volume.mount_options, *(("ro",) if volume.read_only else ()))
        await format_and_mount(path, mount_point, source.fs_type or "", options, read_only=volume.read_only)
        return mount_point

    async def _apply_fs_group(self, volume: VolumeToMount, directory: Path) -> None:
        group = volume.pod.spec.security_context.fs_group
        if group is None or volume.read_only:
            return
        if not await _thread(lambda: self._is_used_by_other_pod(volume)):
            await apply_fs_group(volume.pod, directory, self._host.record_event)
            return
        found = await _thread(lambda: directory.stat().st_gid)
        if found != group:
            self._host.record_event(
                volume.pod,
                "Warning",
                "AlreadyMountedVolume",
                f"The requested fsGroup is {group}, but the volume {volume.name} has GID {found}. "
                "The volume may not be shareable.",
            )

    def _is_used_by_other_pod(self, volume: VolumeToMount) -> bool:
        """Return whether another pod has mounted the volume."""
        mount_points = (self._host.root / "pods").glob(
            f"*/volumes/{self.directory_name}/{glob.escape(volume.name)}"
        )
        return any(
            mount_point.parts[-4] != volume.uid and mount_at(mount_point) is not None
            for mount_point in mount_points
        )

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


def _release(mount_point: Path) -> None:
    while unmount(mount_point):
        continue
    mount_point.rmdir()


async def _thread(work: Callable[[], T]) -> T:
    return await in_own_thread(work, name="local volume")
