"""csi volume plugin: inline and persistent volumes of the CSI drivers that register on the node.

The volume manager calls `CsiPlugin` to set up, take down and sweep volumes, plugin registration calls its
`handlers`. `run` maintains the CSINode, the CSIDriver informer, volume limits and pending unpublish calls.

The state of volumes is on disk (`paths.py`): a kubelet process that never saw a pod takes its volumes down.
The state in memory only saves repeated calls: after a restart, drivers are called again for volumes that
they have published already, which CSI requires to be idempotent.

A terminating pod does not wait indefinitely for a driver: after a deadline its volumes are unmounted without
the driver (`unpublish.py`), and NodeUnpublishVolume is called when the driver is available again
(`pending_unpublish.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.api.storage import CsiDriverSpec
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import PluginHandler
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.csi.block_mapper import CsiBlockMapper
from pykubelet.volumes.csi.csinode import AttachLimitUpdater, CsiNodeManager
from pykubelet.volumes.csi.dependencies import CsiDependencies, all_swept
from pykubelet.volumes.csi.drivers import PLUGIN_TYPE, CsiDriverInformer, CsiNodePublisher, Drivers
from pykubelet.volumes.csi.expansion import NodeExpander, TellOf
from pykubelet.volumes.csi.mounter import CsiMounter
from pykubelet.volumes.csi.names import EPHEMERAL, FOLDER, GET_STATS, unique_name
from pykubelet.volumes.csi.paths import CsiPaths, read_data
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublishStore
from pykubelet.volumes.csi.request_context import CsiRequestContext
from pykubelet.volumes.csi.types import DriverUsage
from pykubelet.volumes.csi.unpublish import UnpublishRetrier
from pykubelet.volumes.csi.volume import CsiVolume, check_mode, must_attach
from pykubelet.volumes.csi.volume_attachments import AttachLimitExceeded, Attachments
from pykubelet.volumes.errors import VolumeLimitExceeded
from pykubelet.volumes.operations import PendingOperations
from pykubelet.volumes.plugin import MountedVolume, VolumeHost, VolumeToMount
from pykubelet.volumes.usage import VolumeStats

log = get_logger(__name__)
ABNORMAL = "VolumeConditionAbnormal"
SWEEP_SECONDS = 10.0
"""Seconds that a sweep waits for drivers to unstage; the calls continue after that."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A volume that is set up for a pod."""

    volume: CsiVolume
    mounted: MountedVolume
    path: Path
    """Path at which the driver has published it."""

    @property
    def measured(self) -> Path:
        """Path for NodeGetVolumeStats; of a block volume, its bind mount for the pod."""
        return Path(self.mounted.bound, self.volume.wanted.uid) if self.mounted.bound else self.path


class CsiPlugin:
    """Plugin for csi volumes, inline and persistent; `run` must run for CSIDriver objects to be known."""

    directory_name = FOLDER
    live = True
    """Drivers may require republishing, and volumes may be expanded."""
    slow = True
    blocks = True
    options = True

    def __init__(self, given: VolumeHost, clock: Callable[[], float] = time.time) -> None:
        """Initialize the plugin; `clock` returns Unix time in seconds."""
        api = given.api
        self._info = CsiNodeManager(api, given.node_name) if api is not None else None
        self.drivers = Drivers(self._info or CsiNodePublisher(), given.wake, given.metrics)
        self.attachments = Attachments(api, given.node_name, given.wake)
        self._objects = CsiDriverInformer(api)
        self.drivers.listen(self._objects.want)
        self._parts = CsiDependencies(
            CsiPaths(given.root.resolve()),
            given.node_name,
            self.drivers,
            self._objects,
            self.attachments,
            CsiRequestContext(api, given.objects),
            PendingUnpublishStore(given.root.resolve()),
            given.metrics,
            tell=self._warn,
            owes=self._owes,
        )
        self._paying = UnpublishRetrier(
            self._parts.debts, self.drivers, self._parts.locks, given.request_cleanup
        )
        # Volumes that stayed staged without their driver are unstaged when it registers.
        self.drivers.listen(given.request_cleanup)
        self._files = CsiMounter(self._parts, given.record_event)
        self._devices = CsiBlockMapper(self._parts)
        self._expanding = NodeExpander(self._parts, api, given.record_event, clock)
        self._sweeps = PendingOperations(None)
        self._limits = (
            AttachLimitUpdater(self.drivers, self._objects, self._info) if self._info is not None else None
        )
        self._given_pod = given.find_pod
        self._use = given.report_in_use
        self._tell = given.record_event
        self._health = False
        self._ready: Callable[[], None] = lambda: None
        self._clock = clock
        self._given: dict[tuple[str, str], _Given] = {}

    @property
    def handlers(self) -> Mapping[str, PluginHandler]:
        """Registration handler of CSI drivers, for `PluginRegistration`."""
        return {PLUGIN_TYPE: self.drivers}

    @property
    def problem(self) -> str:
        """Reason why the node is not ready for pods yet; empty if it is ready."""
        waits = self._info is not None and not self._info.ready.is_set()
        return "CSINode is not yet initialized" if waits else ""

    def listen(
        self, tell_of: TellOf, *, health: bool = False, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Set the recorder of events about objects other than pods.

        `ready` is called when `problem` is resolved. With `health`, volumes that drivers report as abnormal
        become events (`CSIVolumeHealth`).
        """
        self._expanding.tell_of, self._health, self._ready = tell_of, health, ready

    def node_changed(self, status: bytes) -> None:
        """Handle an update of the node's own status, in JSON from the API server."""
        self.attachments.node_changed(status)
        if self._info is not None:
            self._info.node_seen()

    async def run(self) -> None:
        """Maintain the CSINode, the CSIDriver informer, volume limits and pending calls until cancelled."""
        async with TaskScope() as scope:
            self._sweeps = PendingOperations(scope)
            scope.start(self._objects.run(), name="csi-driver-objects")
            scope.start(self._paying.run(), name="csi-debts")
            if self._limits is not None:
                scope.start(self._limits.run(), name="csi-limits")
            try:
                if self._info is not None:
                    await self._info.initialize()
                    self._ready()
                await asyncio.get_running_loop().create_future()
            finally:
                self._sweeps = PendingOperations(None)

    # Methods of VolumePlugin

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Set up a volume; one that is set up is republished if its driver requires it, and expanded."""
        volume = CsiVolume.of(wanted)
        found = await self._objects.get(volume.driver)
        spec = found.spec if found is not None else None
        key = (wanted.uid, wanted.name)
        given = self._given.get(key)
        if given is not None and self._is_there(wanted):
            if spec is not None and spec.requires_republish and not wanted.block:
                await self._files.set_up(volume, spec, again=True)
            await self._expanding.expand(volume, given.path, mounting=False)
            return given.mounted
        if not self._objects.standalone:
            check_mode(volume, spec)
        mounted = await self._first(volume, spec)
        published = self._parts.places.device(wanted.name).published if wanted.block else None
        path = published / wanted.uid if published is not None else Path(mounted.path)
        await self._expanding.expand(volume, path, mounting=True)
        self._given[key] = _Given(volume, mounted, path)
        return mounted

    async def tear_down(self, uid: str, name: str) -> None:
        """Unpublish a volume of a pod."""
        self._given.pop((uid, name), None)
        await self._files.tear_down(uid, name)
        await self._devices.tear_down(uid, name)
        if not any(pod == uid for pod, _ in self._given):
            self.drivers.forget(uid)
            self.attachments.forget(uid)

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Unstage the volumes that no pod uses."""
        self._expanding.keep({given.volume.unique_name for given in self._given.values()})
        for waited_for in (self.drivers, self.attachments):
            # A pod that is deleted before any of its volumes was set up is not torn down: forget it here.
            waited_for.keep(self._is_around)
        sweeps = await self._files.sweeps(in_use) | await self._devices.sweeps(in_use)
        # One operation per volume: a hung driver is waited for briefly and does not block the others.
        await all_swept(
            [
                self._sweeps.run(name, "unstaging", work, timeout=SWEEP_SECONDS, use_backoff=False)
                for name, work in sweeps.items()
            ]
        )

    # State and statistics for other components

    def in_use(self) -> frozenset[str]:
        """Return the names (`status.volumesInUse`) of all attachable volumes published or staged here.

        Read from disk, hence with the volumes of an earlier kubelet process and those with a pending
        NodeUnpublishVolume call. Blocks briefly.
        """
        places = self._parts.places
        files = [
            *places.all_data(),
            *(place.parent / "vol_data.json" for place in places.all_staged()),
            *(device.data for device in places.all_devices()),
        ]
        found = [data for file in files if (data := read_data(file)) is not None]
        used = {
            (data.driver_name, data.volume_handle)
            for data in found
            if data.volume_lifecycle_mode != EPHEMERAL
        }
        used.update((debt.driver, debt.handle) for debt in self._parts.debts.all() if not debt.ephemeral)
        return frozenset(unique_name(driver, handle) for driver, handle in used if self._is_attached(driver))

    def _is_attached(self, driver: str) -> bool:
        found = self._objects.known(driver)
        return found is None or found.spec.attach_required is not False

    async def usage(self, pod: Pod) -> dict[str, VolumeStats]:
        """Return the usage that drivers report for a pod's volumes, by volume name in the pod. Never raises.

        Volumes for which a driver reports no usage are missing.
        """
        found = {}
        for (uid, _), given in list(self._given.items()):
            client = self.drivers.client(given.volume.driver)
            if uid != pod.uid or client is None:
                continue
            name = given.volume.wanted.pod_volume.name
            try:
                if GET_STATS in await client.abilities():
                    usage = await client.usage(given.volume.handle, str(given.measured))
                    found[name] = as_usage(usage, self._clock())
                    self._tell_health(pod, name, usage)
            except PluginError as err:
                log.v(2).info("Failed to get volume stats", volumeName=given.volume.unique_name, err=err)
        return found

    def _tell_health(self, pod: Pod, name: str, usage: DriverUsage) -> None:
        if self._health and usage.abnormal:
            self._tell(pod, "Warning", ABNORMAL, f"Volume {name}: {usage.message}")

    def _warn(self, uid: str, reason: str, message: str) -> None:
        pod = self._given_pod(uid)
        if pod is not None:
            self._tell(pod, "Warning", reason, message)

    def _is_around(self, uid: str) -> bool:
        """Return whether a pod is known or has a directory on disk."""
        return self._given_pod(uid) is not None or (self._parts.places.root / "pods" / uid).exists()

    def _owes(self) -> None:
        """Wake the retrier after an unpublish call was stored; it calls the driver if that is registered."""
        self._paying.look()

    def _is_there(self, wanted: VolumeToMount) -> bool:
        """Return whether a volume is still recorded on disk; accesses only the kubelet's own file system."""
        places = self._parts.places
        if wanted.block:
            return places.device_link(wanted.uid, wanted.name).is_symlink()
        return places.data(wanted.uid, wanted.name).exists()

    async def _first(self, volume: CsiVolume, spec: CsiDriverSpec | None) -> MountedVolume:
        if must_attach(volume, spec):
            await self._use(volume.wanted, volume.unique_name)
        try:
            if volume.wanted.block:
                return await self._devices.set_up(volume, spec)
            return await self._files.set_up(volume, spec)
        except AttachLimitExceeded as err:
            if self._limits is None or not self._limits.period(volume.driver):
                raise
            await self._limits.refresh(volume.driver)
            raise VolumeLimitExceeded(str(err)) from err


def as_usage(found: DriverUsage, moment: float) -> VolumeStats:
    """Convert a driver's usage to VolumeStats; `moment` is its Unix time in seconds."""
    return VolumeStats(
        capacity=found.capacity,
        available=found.available,
        used=found.used,
        inodes=found.inodes,
        inodes_free=found.inodes_free,
        inodes_used=found.inodes_used,
        moment=moment,
    )
