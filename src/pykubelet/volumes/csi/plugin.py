"""csi: volumes that drivers give, asked over the sockets that they register.

The kind, which pods' volumes go through, and what it lives on: the registration of drivers, what the
cluster says about them and is told about them. `run` keeps all that going.

What was given is on disk (`volume_data.py`): an agent that never saw a pod takes its volumes down. What
is kept in memory only saves asking twice: after a restart, drivers are asked once more for what they have
given already, which every driver must be fine with.

A pod never waits for ever for a driver that has gone: it lets go of its volumes without the driver
(`letting_go.py`), which is asked to take them back when it is there again (`debts.py`, `paying.py`).
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
from pykubelet.volumes.csi.node_client import DriverUsage
from pykubelet.volumes.csi.paths import CsiPaths, read_data
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublishStore
from pykubelet.volumes.csi.request_context import CsiRequestContext
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
"""How long a sweep waits for drivers to unstage, who go on then."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A volume that a pod has."""

    volume: CsiVolume
    mounted: MountedVolume
    path: Path
    """Where the driver has published it."""

    @property
    def measured(self) -> Path:
        """Where the driver is asked how full it is: of a device, where it is bound for the pod."""
        return Path(self.mounted.bound, self.volume.wanted.uid) if self.mounted.bound else self.path


class CsiPlugin:
    """Gives volumes of kind csi, inline and persistent; `run` must run for drivers to be found."""

    folder = FOLDER
    live = True
    """Drivers may want to be asked again, and volumes grow."""
    slow = True
    blocks = True
    options = True

    def __init__(self, given: VolumeHost, clock: Callable[[], float] = time.time) -> None:
        """Take what kinds are made of; `clock` gives seconds since 1970."""
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
        self._paying = UnpublishRetrier(self._parts.debts, self.drivers, self._parts.locks, given.sweep)
        # What is staged by a driver that was away is unstaged when it is back.
        self.drivers.listen(given.sweep)
        self._files = CsiMounter(self._parts, given.tell)
        self._devices = CsiBlockMapper(self._parts)
        self._expanding = NodeExpander(self._parts, api, given.tell, clock)
        self._sweeps = PendingOperations(None)
        self._limits = (
            AttachLimitUpdater(self.drivers, self._objects, self._info) if self._info is not None else None
        )
        self._given_pod = given.find
        self._use = given.use
        self._tell = given.tell
        self._health = False
        self._ready: Callable[[], None] = lambda: None
        self._clock = clock
        self._given: dict[tuple[str, str], _Given] = {}

    @property
    def handlers(self) -> Mapping[str, PluginHandler]:
        """What is done with plugins that register as CSI drivers: for `PluginRegistration`."""
        return {PLUGIN_TYPE: self.drivers}

    @property
    def problem(self) -> str:
        """Why the node is not ready for pods yet; empty when it is."""
        waits = self._info is not None and not self._info.ready.is_set()
        return "CSINode is not yet initialized" if waits else ""

    def listen(
        self, tell_of: TellOf, *, health: bool = False, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Have events recorded about objects other than pods; `ready`: called when `problem` is over.

        `health`: volumes that are not well, in their drivers' eyes, become events (`CSIVolumeHealth`).
        """
        self._expanding.tell_of, self._health, self._ready = tell_of, health, ready

    def node_changed(self, status: bytes) -> None:
        """Take note of the node's own status, as the API server wrote it."""
        self.attachments.node_changed(status)
        if self._info is not None:
            self._info.node_seen()

    async def run(self) -> None:
        """Tell the cluster of this node's drivers, and hear of the cluster's, until cancelled."""
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

    # As a VolumeKind

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Have a volume ready, or do what its driver wants done again and again."""
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

    async def take_down(self, uid: str, name: str) -> None:
        """Have the driver undo what it gave to a pod."""
        self._given.pop((uid, name), None)
        await self._files.take_down(uid, name)
        await self._devices.take_down(uid, name)
        if not any(pod == uid for pod, _ in self._given):
            self.drivers.forget(uid)
            self.attachments.forget(uid)

    async def sweep(self, in_use: Collection[str]) -> None:
        """Have drivers undo what they did for the node, for volumes that no pod has."""
        self._expanding.keep({given.volume.unique_name for given in self._given.values()})
        for waited_for in (self.drivers, self.attachments):
            # Pods that left before they had anything are not taken down, and so not forgotten.
            waited_for.keep(self._is_around)
        sweeps = await self._files.sweeps(in_use) | await self._devices.sweeps(in_use)
        # Each for itself: a driver that hangs is waited for only shortly, and goes on hanging alone.
        await all_swept(
            [
                self._sweeps.run(name, "unstaging", work, patience=SWEEP_SECONDS, pauses=False)
                for name, work in sweeps.items()
            ]
        )

    # For others

    def in_use(self) -> frozenset[str]:
        """Give the names (`status.volumesInUse`) of all volumes that drivers have given or staged here.

        By what is on disk, so also those of an agent before this one, and those that drivers still have to
        take back; without those that are never attached. Blocks for a moment.
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
        """Ask drivers how full a pod's volumes are, by the pod's names for them; raises nothing.

        Those that drivers do not tell of are missing.
        """
        found = {}
        for (uid, _), given in list(self._given.items()):
            client = self.drivers.client(given.volume.driver)
            if uid != pod.uid or client is None:
                continue
            name = given.volume.wanted.volume.name
            try:
                if GET_STATS in await client.abilities():
                    usage = await client.usage(given.volume.handle, str(given.measured))
                    found[name] = as_usage(usage, self._clock())
                    self._tell_health(pod, name, usage)
            except PluginError as err:
                log.v(2).info("Could not measure a volume", volume=given.volume.unique_name, err=err)
        return found

    def _tell_health(self, pod: Pod, name: str, usage: DriverUsage) -> None:
        if self._health and usage.abnormal:
            self._tell(pod, "Warning", ABNORMAL, f"Volume {name}: {usage.message}")

    def _warn(self, uid: str, reason: str, message: str) -> None:
        pod = self._given_pod(uid)
        if pod is not None:
            self._tell(pod, "Warning", reason, message)

    def _is_around(self, uid: str) -> bool:
        """Whether somebody knows a pod, or something of it is on the disk."""
        return self._given_pod(uid) is not None or (self._parts.places.root / "pods" / uid).exists()

    def _owes(self) -> None:
        """Something was written down that a driver is owed; if the driver is there, it is asked again."""
        self._paying.look()

    def _is_there(self, wanted: VolumeToMount) -> bool:
        """Whether a volume that was given is still known on disk; asks no file system but the agent's own."""
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
    """Give a driver's numbers as everybody else's are."""
    return VolumeStats(
        capacity=found.capacity,
        available=found.available,
        used=found.used,
        inodes=found.inodes,
        inodes_free=found.inodes_free,
        inodes_used=found.inodes_used,
        moment=moment,
    )
