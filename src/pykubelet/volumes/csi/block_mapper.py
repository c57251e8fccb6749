"""CSI block volumes (`volumeMode: Block`): staged and published as devices, and bind-mounted for each pod.

The symlink in the pod's directory is created first and removed last, so that the pod's teardown finds the
device in any later kubelet process. A loop device on top of the bind mount keeps the device open while the
pod uses it, so that its device number cannot be reused for another device.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from pykubelet.api.storage import CsiDriverSpec
from pykubelet.linux.loop_devices import attach_loop, detach_loop, loops_of
from pykubelet.linux.mounts import MS_BIND, mount, read_mounts, remove_tree, unmount
from pykubelet.logs import get_logger
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.csi.dependencies import (
    CsiDependencies,
    DriverCallError,
    UnstageOperations,
    driver_call,
)
from pykubelet.volumes.csi.names import KIND, STAGE_UNSTAGE, unique_name
from pykubelet.volumes.csi.paths import BlockVolumePaths, VolumeData, read_data, remove_abandoned, write_data
from pykubelet.volumes.csi.unpublish import unpublish_or_force, unpublish_pending_before
from pykubelet.volumes.csi.volume import CsiVolume, must_attach
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.paths import make_directory
from pykubelet.volumes.plugin import MountedVolume

log = get_logger(__name__)


class CsiBlockMapper:
    """Mapper of CSI block volumes."""

    def __init__(self, deps: CsiDependencies) -> None:
        self._deps = deps

    async def set_up(self, volume: CsiVolume, spec: CsiDriverSpec | None) -> MountedVolume:
        """Stage, publish and bind-mount a device for a pod."""
        deps, volume_to_mount = self._deps, volume.volume_to_mount
        client = deps.drivers.client_for_pod(volume.driver, volume_to_mount.uid)
        published: dict[str, str] = {}
        if must_attach(volume, spec):
            published = await deps.attachments.publish_context(volume)
        paths, link = (
            deps.paths.device(volume_to_mount.name),
            deps.paths.device_link(volume_to_mount.uid, volume_to_mount.name),
        )
        target = paths.published / volume_to_mount.uid
        capability = volume.capability()
        with driver_call(f"{KIND}: failed to ask driver {volume.driver} what it can do: "):
            capabilities = await client.capabilities()
        async with deps.locks(volume.unique_name):
            await unpublish_pending_before(deps, volume, client, target)
            await finish_in_thread(lambda: _prepare(paths, link, target, deps.volume_data(volume)))
            if STAGE_UNSTAGE in capabilities and volume.unique_name not in deps.staged:
                context = await deps.request_context.for_staging(volume, published)
                with driver_call(action="MapVolume.SetUpDevice failed"):
                    await client.stage(volume.handle, str(paths.staging), capability, context)
                deps.staged.add(volume.unique_name)
            context = await deps.request_context.for_publishing(volume, published, spec, standalone=False)
            try:
                with driver_call(action="MapVolume.MapPodDevice failed"):
                    await client.publish(
                        volume.handle,
                        str(target),
                        str(paths.staging),
                        capability,
                        context,
                        read_only=volume.read_only,
                    )
            except DriverCallError as err:
                if err.is_final and not os.path.lexists(paths.maps / volume_to_mount.uid):
                    link.unlink(missing_ok=True)
                raise
            await finish_in_thread(lambda: _bind(target, paths.maps / volume_to_mount.uid, volume.read_only))
        return MountedVolume(
            "",
            device=str(link),
            bound=str(paths.maps),
            read_only=volume.read_only,
            attached=volume.unique_name if must_attach(volume, spec) else "",
        )

    async def tear_down(self, uid: str, name: str) -> None:
        """Unpublish a pod's device, or remove it without the driver after the driver's deadline.

        Raises VolumeNotReady while the driver is not registered and its deadline has not expired.
        """
        paths, link = self._deps.paths.device(name), self._deps.paths.device_link(uid, name)
        data = read_data(paths.data)
        if data is None or not any(map(os.path.lexists, _remaining_paths(paths, link, uid))):
            return
        target = paths.published / uid

        async def unpublish() -> None:
            await finish_in_thread(lambda: _unbind(paths.maps / uid))
            client = self._deps.drivers.client_for_pod(data.driver_name, uid)
            with driver_call(f"{KIND}: blockMapper.unpublishVolumeForBlock failed: "):
                await client.unpublish(data.volume_handle, str(target))
            await finish_in_thread(lambda: _remove_published(target, link))

        def remove_paths() -> None:
            _unbind(paths.maps / uid, detach=True)
            _remove_published(target, link)

        await unpublish_or_force(
            self._deps, data.pending_unpublish(target, link, uid, name), unpublish, remove_paths
        )

    async def unstage_operations(self, in_use: Collection[str]) -> UnstageOperations:
        """Return the operations that unstage the volumes that no pod uses."""
        found = await finish_in_thread(lambda: list(self._deps.paths.all_devices()))
        return {paths.name: partial(self._unstage_unused, paths, in_use) for paths in found}

    async def _unstage_unused(self, paths: BlockVolumePaths, in_use: Collection[str]) -> None:
        if paths.name in in_use:
            return
        data = read_data(paths.data)
        if data is None:
            await finish_in_thread(
                lambda: remove_abandoned(paths.data, (paths.data.parent, paths.volume_dir))
            )
            return
        name = unique_name(data.driver_name, data.volume_handle)
        async with self._deps.locks(name):
            used = any(_entries(paths.maps)) or any(_entries(paths.published))
            if not used and not await finish_in_thread(
                lambda: self._deps.pending_unpublishes.for_volume(name)
            ):
                await self._unstage(data, paths)

    async def _unstage(self, data: VolumeData, paths: BlockVolumePaths) -> None:
        client = self._deps.drivers.client(data.driver_name)
        if client is None:
            log.v(2).info(
                "Block volume stays staged until its CSI driver registers",
                driver=data.driver_name,
                path=paths.volume_dir,
            )
            return
        recording = self._deps.record_operation(data.driver_name, "unmap_device")
        with driver_call(f"{KIND}: blockMapper.unstageVolumeForBlock failed: "), recording:
            if paths.staging.exists() and STAGE_UNSTAGE in await client.capabilities():
                await client.unstage(data.volume_handle, str(paths.staging))
        self._deps.staged.discard(unique_name(data.driver_name, data.volume_handle))

        def remove_directories() -> None:
            for directory in (paths.staging, paths.published, paths.volume_dir):
                remove_tree(directory)
            for directory in (paths.staging.parent, paths.published.parent, paths.base):
                with suppress(OSError):
                    directory.rmdir()

        await finish_in_thread(remove_directories)


def _remaining_paths(paths: BlockVolumePaths, link: Path, uid: str) -> Iterable[Path]:
    return link, paths.maps / uid, paths.published / uid


def _prepare(paths: BlockVolumePaths, link: Path, target: Path, data: VolumeData) -> None:
    write_data(paths.data, data)
    make_directory(link.parent)
    # Always recreated: after a reboot an old link may point elsewhere.
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    for directory in (paths.staging, paths.published, paths.maps):
        make_directory(directory)


def _bind(device: Path, path: Path, read_only: bool) -> None:
    """Ensure that a device is bind-mounted at a path and kept open by a loop device."""
    device_stat = device.stat()
    if not stat.S_ISBLK(device_stat.st_mode):
        raise VolumePluginError(
            f"{KIND}: the driver has published something at {device} that is not a block device"
        )
    real = path.parent.resolve() / path.name
    while any(entry.point == real for entry in read_mounts(real)):
        if real.lstat().st_rdev == device_stat.st_rdev:
            break
        _unbind(real)
    else:
        real.touch(mode=0o640)
        mount(str(device), real, "", flags=MS_BIND)
    if not loops_of(real):
        _, lock = attach_loop(real, read_only=read_only)
        os.close(lock)


def _unbind(path: Path, *, detach: bool = False) -> None:
    real = path.parent.resolve() / path.name
    for device in loops_of(real):
        detach_loop(device)
    while unmount(real, detach=detach):
        continue
    real.unlink(missing_ok=True)


def _remove_published(target: Path, link: Path) -> None:
    """Remove the target path, which the driver should have removed, and the pod's symlink."""
    try:
        target.unlink(missing_ok=True)
    except OSError as err:
        raise VolumePluginError(f"{KIND}: the driver has left something at {target}: {err.strerror}") from err
    link.unlink(missing_ok=True)
    with suppress(OSError):
        link.parent.rmdir()


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
