"""nfs: an export of an NFS server, mounted into the pod's directory by the host's `mount`.

The server may become unreachable at any time, and then every access to the mounted directory blocks. So the
mount table is read instead of the directory, and mount and unmount run in processes that can be abandoned
(`mount_helper.py`).
"""

from __future__ import annotations

import ipaddress

from pykubelet.api.volume import Nfs
from pykubelet.linux.mounts import read_mounts
from pykubelet.logs import get_logger
from pykubelet.volumes.errors import BadSource
from pykubelet.volumes.mounts.mount_helper import (
    HelperError,
    is_mounted,
    join_options,
    mount_with_helper,
    mounts_of_volume,
    unmount_with_helper,
)
from pykubelet.volumes.paths import PodVolumePaths, make_directory
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

log = get_logger(__name__)


class NfsPlugin(BaseVolumePlugin):
    """Plugin for nfs volumes."""

    directory_name = "kubernetes.io~nfs"
    options = True

    def __init__(self, host: VolumeHost) -> None:
        self._root = host.root
        self._mounter = host.options.mounter

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Ensure that the export is mounted. Raises HelperError."""
        source = volume.source
        assert isinstance(source, Nfs)
        # A PersistentVolume is read-only if the pod uses the claim read-only, whatever its source specifies.
        read_only = volume.read_only or (volume.persistent is None and source.read_only)
        mount_point = PodVolumePaths.for_pod(self._root, volume.uid).volume(self.directory_name, volume.name)
        if not is_mounted(mount_point):
            options = join_options(volume.mount_options, ["ro"] if read_only else [])
            remote = nfs_source(source)
            make_directory(mount_point)
            try:
                await mount_with_helper("nfs", remote, mount_point, options, mounter=self._mounter)
            except HelperError:
                if is_mounted(mount_point):
                    await unmount_with_helper(mount_point)
                mount_point.rmdir()
                raise
        return MountedVolume(str(mount_point), read_only=read_only)

    async def tear_down(self, uid: str, name: str) -> None:
        """Unmount the volume, after the subPath mounts of it.

        A failure, such as a busy mount, is logged and left to the general unmount, which retries up to a
        deadline.
        """
        paths = PodVolumePaths(PodVolumePaths.for_pod(self._root, uid).pod.resolve())
        volume = paths.volume(self.directory_name, name)
        for mount in mounts_of_volume(read_mounts(paths.pod), volume, paths.sub_paths):
            try:
                await unmount_with_helper(mount.point)
            except HelperError as err:
                log.error(err, "Failed to unmount NFS volume", path=mount.point, podUID=uid)


def nfs_source(source: Nfs) -> str:
    """Return the source argument for `mount`. Raises BadSource."""
    if not source.server or source.server.startswith("-"):
        raise BadSource(f"{source.server!r} is no server")
    return f"{_bracketed(source.server)}:{source.path}"


def _bracketed(server: str) -> str:
    try:
        return f"[{server}]" if ipaddress.ip_address(server).version == 6 else server
    except ValueError:
        return server
