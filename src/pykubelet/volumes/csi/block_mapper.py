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
from pykubelet.volumes.csi.dependencies import CsiDependencies, DriverCallError, Sweeps, asking
from pykubelet.volumes.csi.names import KIND, STAGE_UNSTAGE, unique_name
from pykubelet.volumes.csi.paths import BlockVolumePaths, VolumeData, drop_scraps, read_data, write_data
from pykubelet.volumes.csi.unpublish import let_go, pay_before
from pykubelet.volumes.csi.volume import CsiVolume, must_attach
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.paths import make_directory
from pykubelet.volumes.plugin import MountedVolume

log = get_logger(__name__)


class CsiBlockMapper:
    """Mapper of CSI block volumes."""

    def __init__(self, parts: CsiDependencies) -> None:
        self._parts = parts

    async def set_up(self, volume: CsiVolume, spec: CsiDriverSpec | None) -> MountedVolume:
        """Stage, publish and bind-mount a device for a pod."""
        parts, wanted = self._parts, volume.wanted
        client = parts.drivers.needed(volume.driver, wanted.uid)
        published: dict[str, str] = {}
        if must_attach(volume, spec):
            published = await parts.attachments.publish_context(volume.driver, volume.handle, wanted.uid)
        places, link = parts.places.device(wanted.name), parts.places.device_link(wanted.uid, wanted.name)
        target = places.published / wanted.uid
        use = volume.use()
        with asking(f"{KIND}: failed to ask driver {volume.driver} what it can do: "):
            abilities = await client.abilities()
        async with parts.locks(volume.unique_name):
            await pay_before(parts, volume, client, target)
            await finish_in_thread(lambda: _prepare(places, link, target, parts.data_of(volume)))
            if STAGE_UNSTAGE in abilities and volume.unique_name not in parts.staged:
                context = await parts.teller.for_staging(volume, published)
                with asking(action="MapVolume.SetUpDevice failed"):
                    await client.stage(volume.handle, str(places.staging), use, context)
                parts.staged.add(volume.unique_name)
            context = await parts.teller.for_publishing(volume, published, spec, standalone=False)
            try:
                with asking(action="MapVolume.MapPodDevice failed"):
                    await client.publish(
                        volume.handle,
                        str(target),
                        str(places.staging),
                        use,
                        context,
                        read_only=volume.read_only,
                    )
            except DriverCallError as err:
                if err.is_final and not os.path.lexists(places.maps / wanted.uid):
                    link.unlink(missing_ok=True)
                raise
            await finish_in_thread(lambda: _bind(target, places.maps / wanted.uid, volume.read_only))
        return MountedVolume(
            "",
            device=str(link),
            bound=str(places.maps),
            read_only=volume.read_only,
            attached=volume.unique_name if must_attach(volume, spec) else "",
        )

    async def tear_down(self, uid: str, name: str) -> None:
        """Unpublish a pod's device, or remove it without the driver after the driver's deadline.

        Raises VolumeNotReady while the driver is not registered and its deadline has not expired.
        """
        places, link = self._parts.places.device(name), self._parts.places.device_link(uid, name)
        data = read_data(places.data)
        if data is None or not any(map(os.path.lexists, _traces(places, link, uid))):
            return
        target = places.published / uid

        async def ordinary() -> None:
            await finish_in_thread(lambda: _unbind(places.maps / uid))
            client = self._parts.drivers.needed(data.driver_name, uid)
            with asking(f"{KIND}: blockMapper.unpublishVolumeForBlock failed: "):
                await client.unpublish(data.volume_handle, str(target))
            await finish_in_thread(lambda: _drop(target, link))

        def clear() -> None:
            _unbind(places.maps / uid, detach=True)
            _drop(target, link)

        await let_go(self._parts, data.owed(target, link, uid, name), ordinary, clear)

    async def sweeps(self, in_use: Collection[str]) -> Sweeps:
        """Return the operations that unstage the volumes that no pod uses."""
        found = await finish_in_thread(lambda: list(self._parts.places.all_devices()))
        return {places.name: partial(self._sweep_one, places, in_use) for places in found}

    async def _sweep_one(self, places: BlockVolumePaths, in_use: Collection[str]) -> None:
        if places.name in in_use:
            return
        data = read_data(places.data)
        if data is None:
            await finish_in_thread(lambda: drop_scraps(places.data, (places.data.parent, places.own)))
            return
        name = unique_name(data.driver_name, data.volume_handle)
        async with self._parts.locks(name):
            used = any(_entries(places.maps)) or any(_entries(places.published))
            if not used and not await finish_in_thread(lambda: self._parts.debts.of(name)):
                await self._unstage(data, places)

    async def _unstage(self, data: VolumeData, places: BlockVolumePaths) -> None:
        client = self._parts.drivers.client(data.driver_name)
        if client is None:
            log.v(2).info(
                "Block volume stays staged until its CSI driver registers",
                driver=data.driver_name,
                path=places.own,
            )
            return
        count = self._parts.counted(data.driver_name, "unmap_device")
        with asking(f"{KIND}: blockMapper.unstageVolumeForBlock failed: "), count:
            if places.staging.exists() and STAGE_UNSTAGE in await client.abilities():
                await client.unstage(data.volume_handle, str(places.staging))
        self._parts.staged.discard(unique_name(data.driver_name, data.volume_handle))

        def clean() -> None:
            for folder in (places.staging, places.published, places.own):
                remove_tree(folder)
            for folder in (places.staging.parent, places.published.parent, places.base):
                with suppress(OSError):
                    folder.rmdir()

        await finish_in_thread(clean)


def _traces(places: BlockVolumePaths, link: Path, uid: str) -> Iterable[Path]:
    return link, places.maps / uid, places.published / uid


def _prepare(places: BlockVolumePaths, link: Path, target: Path, data: VolumeData) -> None:
    write_data(places.data, data)
    make_directory(link.parent)
    # Always recreated: after a reboot an old link may point elsewhere.
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    for folder in (places.staging, places.published, places.maps):
        make_directory(folder)


def _bind(device: Path, place: Path, read_only: bool) -> None:
    """Ensure that a device is bind-mounted at a path and kept open by a loop device."""
    given = device.stat()
    if not stat.S_ISBLK(given.st_mode):
        raise VolumePluginError(
            f"{KIND}: the driver has published something at {device} that is not a block device"
        )
    real = place.parent.resolve() / place.name
    while any(entry.point == real for entry in read_mounts(real)):
        if real.lstat().st_rdev == given.st_rdev:
            break
        _unbind(real)
    else:
        real.touch(mode=0o640)
        mount(str(device), real, "", flags=MS_BIND)
    if not loops_of(real):
        _, lock = attach_loop(real, read_only=read_only)
        os.close(lock)


def _unbind(place: Path, *, detach: bool = False) -> None:
    real = place.parent.resolve() / place.name
    for device in loops_of(real):
        detach_loop(device)
    while unmount(real, detach=detach):
        continue
    real.unlink(missing_ok=True)


def _drop(target: Path, link: Path) -> None:
    """Remove the target path, which the driver should have removed, and the pod's symlink."""
    try:
        target.unlink(missing_ok=True)
    except OSError as err:
        raise VolumePluginError(f"{KIND}: the driver has left something at {target}: {err.strerror}") from err
    link.unlink(missing_ok=True)
    with suppress(OSError):
        link.parent.rmdir()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
