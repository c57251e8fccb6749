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
from pykubelet.volumes.csi.attacher import KubeletAttacher
from pykubelet.volumes.csi.block_mapper import CsiBlockMapper
from pykubelet.volumes.csi.csinode import AttachLimitUpdater, CsiNodeManager
from pykubelet.volumes.csi.dependencies import CsiDependencies, UnstageOperations, run_operations
from pykubelet.volumes.csi.drivers import PLUGIN_TYPE, CsiDriverInformer, CsiNodePublisher, Drivers
from pykubelet.volumes.csi.expansion import NodeExpander
from pykubelet.volumes.csi.mounter import CsiMounter
from pykubelet.volumes.csi.names import EPHEMERAL, GET_STATS, PLUGIN_DIR, unique_name
from pykubelet.volumes.csi.paths import CsiPaths, read_data
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublishStore
from pykubelet.volumes.csi.request_context import CsiRequestContext
from pykubelet.volumes.csi.types import DriverUsage
from pykubelet.volumes.csi.unpublish import UnpublishRetrier
from pykubelet.volumes.csi.volume import CsiVolume, check_mode, must_attach
from pykubelet.volumes.csi.volume_attachments import AttachLimitExceeded, Attachments
from pykubelet.volumes.errors import VolumeLimitExceeded, VolumePluginError
from pykubelet.volumes.operations import Locks, PendingOperations
from pykubelet.volumes.plugin import MountedVolume, VolumeHost, VolumeToMount
from pykubelet.volumes.usage import VolumeStats

log = get_logger(__name__)
ABNORMAL = "VolumeConditionAbnormal"
UNSTAGE_TIMEOUT_SECONDS = 10.0
"""Seconds that a sweep waits for drivers to unstage; the calls continue after that."""


@dataclass(frozen=True, slots=True)
class _PublishedVolume:
    """A volume that is set up for a pod."""

    volume: CsiVolume
    mounted: MountedVolume
    path: Path
    """Path at which the driver has published it."""

    @property
    def stats_path(self) -> Path:
        """Path for NodeGetVolumeStats; of a block volume, its bind mount for the pod."""
        return Path(self.mounted.bound, self.volume.volume_to_mount.uid) if self.mounted.bound else self.path


class CsiPlugin:
    """Plugin for csi volumes, inline and persistent; `run` must run for CSIDriver objects to be known."""

    directory_name = PLUGIN_DIR
    live = True
    """Drivers may require republishing, and volumes may be expanded."""
    slow = True
    blocks = True
    options = True

    def __init__(self, host: VolumeHost, clock: Callable[[], float] = time.time) -> None:
        """Initialize the plugin; `clock` returns Unix time in seconds."""
        api, root, node_name = host.api, host.root.resolve(), host.options.node_name
        self._csinode = CsiNodeManager(api, node_name) if api is not None else None
        self.drivers = Drivers(self._csinode or CsiNodePublisher(), host.wake, host.metrics)
        self._attacher = (
            KubeletAttacher(api, node_name, root, host.record_event, host.metrics, self._is_on_node)
            if api is not None and host.attaches_volumes
            else None
        )
        attach = self._attacher.attach if self._attacher is not None else None
        self.attachments = Attachments(api, node_name, host.wake, attach)
        self._informer = CsiDriverInformer(api)
        self.drivers.add_listener(self._informer.start_watch)
        pending_unpublishes, locks = PendingUnpublishStore(root), Locks()
        self._retrier = UnpublishRetrier(pending_unpublishes, self.drivers, locks, host.request_cleanup)
        self._deps = CsiDependencies(
            CsiPaths(root),
            node_name,
            self.drivers,
            self._informer,
            self.attachments,
            CsiRequestContext(api, host.objects),
            pending_unpublishes,
            host.metrics,
            host.record_event,
            host.find_pod,
            locks,
            # Wakes the retrier, which calls the driver if it is registered.
            on_pending_unpublish=self._retrier.wake,
            se_linux_mount=host.options.se_linux_mount,
        )
        # Volumes that stayed staged without their driver are unstaged when it registers.
        self.drivers.add_listener(host.request_cleanup)
        self._mounter = CsiMounter(self._deps)
        self._block_mapper = CsiBlockMapper(self._deps)
        self._expander = NodeExpander(self._deps, api, host.record_object_event, clock)
        self._unstage_operations = PendingOperations(None)
        self._limits = (
            AttachLimitUpdater(self.drivers, self._informer, self._csinode)
            if self._csinode is not None
            else None
        )
        self._use = host.report_in_use
        self._health_events = host.volume_health
        self._on_ready = host.on_ready
        self._clock = clock
        self._checkpoints = host.checkpoints
        self._published: dict[tuple[str, str], _PublishedVolume] = {}

    @property
    def handlers(self) -> Mapping[str, PluginHandler]:
        """Registration handler of CSI drivers, for `PluginRegistration`."""
        return {PLUGIN_TYPE: self.drivers}

    @property
    def problem(self) -> str:
        """Reason why the node is not ready for pods yet; empty if it is ready."""
        waits = self._csinode is not None and not self._csinode.ready.is_set()
        return "CSINode is not yet initialized" if waits else ""

    def node_changed(self, status: bytes) -> None:
        """Handle an update of the node's own status, in JSON from the API server."""
        self.attachments.node_changed(status)
        if self._csinode is not None:
            self._csinode.node_seen()

    async def run(self) -> None:
        """Maintain the CSINode, the CSIDriver informer, volume limits and pending calls until cancelled."""
        async with TaskScope() as scope:
            self._unstage_operations = PendingOperations(scope)
            scope.start(self._informer.run(), name="csi-driver-objects")
            scope.start(self._retrier.run(), name="csi-debts")
            if self._limits is not None:
                scope.start(self._limits.run(), name="csi-limits")
            try:
                if self._csinode is not None:
                    await self._csinode.initialize()
                    self._on_ready()
                await asyncio.get_running_loop().create_future()
            finally:
                self._unstage_operations = PendingOperations(None)

    # Methods of VolumePlugin

    async def set_up(self, volume_to_mount: VolumeToMount) -> MountedVolume:
        """Set up a volume; one that is set up is republished if its driver requires it, and expanded."""
        volume = CsiVolume.parse(volume_to_mount)
        spec = await self._driver_spec(volume)
        key = (volume_to_mount.uid, volume_to_mount.name)
        published = self._published.get(key)
        if published is not None and self._is_recorded(volume_to_mount):
            if spec is not None and spec.requires_republish and not volume_to_mount.block:
                await self._mounter.set_up(volume, spec, republish=True)
            await self._expander.expand(volume, published.path, mounting=False)
            return published.mounted
        if not self._informer.standalone:
            check_mode(volume, spec)
        mounted = await self._set_up_first(volume, spec)
        published_dir = (
            self._deps.paths.device(volume_to_mount.name).published if volume_to_mount.block else None
        )
        path = published_dir / volume_to_mount.uid if published_dir is not None else Path(mounted.path)
        await self._expander.expand(volume, path, mounting=True)
        self._published[key] = _PublishedVolume(volume, mounted, path)
        return mounted

    async def _driver_spec(self, volume: CsiVolume) -> CsiDriverSpec | None:
        """Return the spec of the driver's CSIDriver, or the checkpointed one; None if it has no CSIDriver."""
        uid = volume.volume_to_mount.uid
        try:
            found = await self._informer.get(volume.driver)
        except VolumePluginError:
            known = self._checkpoints.get(uid) if self._checkpoints is not None else None
            if known is None or volume.driver not in known.csi_drivers:
                raise
            return known.csi_drivers[volume.driver].spec
        if found is not None and self._checkpoints is not None:
            self._checkpoints.save_used_objects(uid, csi_driver=found)
        return found.spec if found is not None else None

    async def supports_context_mount(self, volume: VolumeToMount) -> bool:
        """Return whether the driver mounts volumes with a SELinux label (`seLinuxMount`)."""
        spec = await self._driver_spec(CsiVolume.parse(volume))
        return spec is not None and spec.se_linux_mount is True

    async def tear_down(self, uid: str, name: str) -> None:
        """Unpublish a volume of a pod."""
        self._published.pop((uid, name), None)
        await self._mounter.tear_down(uid, name)
        await self._block_mapper.tear_down(uid, name)
        if not any(pod == uid for pod, _ in self._published):
            self.drivers.forget(uid)
            self.attachments.forget(uid)

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Unstage the volumes that no pod uses, and detach those that the kubelet has attached."""
        self._expander.retain({published.volume.unique_name for published in self._published.values()})
        for waiters in (self.drivers, self.attachments):
            # A pod that is deleted before any of its volumes was set up is not torn down: forget it here.
            waiters.retain(self._is_pod_present)
        operations = await self._mounter.unstage_operations(
            in_use
        ) | await self._block_mapper.unstage_operations(in_use)
        failure: VolumePluginError | None = None
        try:
            await self._run_unstage_operations(operations, "unstaging")
        except VolumePluginError as err:
            # Volumes that could be unstaged are detached nevertheless.
            failure = err
        if self._attacher is not None:
            detach_operations = await self._attacher.detach_operations(in_use)
            await self._run_unstage_operations(detach_operations, "detaching")
        if failure is not None:
            raise failure

    async def _run_unstage_operations(self, operations: UnstageOperations, what: str) -> None:
        # One operation per volume: a hung driver is waited for briefly and does not block the others.
        await run_operations(
            [
                self._unstage_operations.run(
                    name, what, work, timeout=UNSTAGE_TIMEOUT_SECONDS, use_backoff=False
                )
                for name, work in operations.items()
            ]
        )

    # State and statistics for other components

    def in_use(self) -> frozenset[str]:
        """Return the names (`status.volumesInUse`) of all attachable volumes published or staged here.

        Read from disk, hence with the volumes of an earlier kubelet process and those with a pending
        NodeUnpublishVolume call. Blocks briefly.
        """
        paths = self._deps.paths
        files = [
            *paths.all_data(),
            *(staging_path.parent / "vol_data.json" for staging_path in paths.all_staged()),
            *(device.data for device in paths.all_devices()),
        ]
        found = [data for file in files if (data := read_data(file)) is not None]
        used = {
            (data.driver_name, data.volume_handle)
            for data in found
            if data.volume_lifecycle_mode != EPHEMERAL
        }
        used.update(
            (pending_call.driver, pending_call.handle)
            for pending_call in self._deps.pending_unpublishes.all()
            if not pending_call.ephemeral
        )
        return frozenset(unique_name(driver, handle) for driver, handle in used if self._is_attached(driver))

    def _is_on_node(self, name: str) -> bool:
        """Return whether a volume, by its unique name, is published or staged on this node. Blocks."""
        return name in self.in_use()

    def _is_attached(self, driver: str) -> bool:
        found = self._informer.cached(driver)
        return found is None or found.spec.attach_required is not False

    async def usage(self, pod: Pod) -> dict[str, VolumeStats]:
        """Return the usage that drivers report for a pod's volumes, by volume name in the pod. Never raises.

        Volumes for which a driver reports no usage are missing.
        """
        found = {}
        for (uid, _), published in list(self._published.items()):
            client = self.drivers.client(published.volume.driver)
            if uid != pod.uid or client is None:
                continue
            name = published.volume.volume_to_mount.pod_volume.name
            try:
                if GET_STATS in await client.capabilities():
                    started = time.perf_counter()
                    usage = await client.usage(published.volume.handle, str(published.stats_path))
                    seconds = time.perf_counter() - started
                    self._deps.metrics.record_measurement(published.volume.driver, seconds)
                    found[name] = to_volume_stats(usage, self._clock(), health=self._health_events)
                    self._record_abnormal(pod, name, usage)
            except PluginError as err:
                log.v(2).info("Failed to get volume stats", volumeName=published.volume.unique_name, err=err)
        return found

    def _record_abnormal(self, pod: Pod, name: str, usage: DriverUsage) -> None:
        if self._health_events and usage.abnormal:
            self._deps.record_event(pod, "Warning", ABNORMAL, f"Volume {name}: {usage.message}")

    def _is_pod_present(self, uid: str) -> bool:
        """Return whether a pod is known or has a directory on disk."""
        return self._deps.find_pod(uid) is not None or (self._deps.paths.root / "pods" / uid).exists()

    def _is_recorded(self, volume_to_mount: VolumeToMount) -> bool:
        """Return whether a volume is still recorded on disk; accesses only the kubelet's own file system."""
        paths = self._deps.paths
        if volume_to_mount.block:
            return paths.device_link(volume_to_mount.uid, volume_to_mount.name).is_symlink()
        return paths.data(volume_to_mount.uid, volume_to_mount.name).exists()

    async def _set_up_first(self, volume: CsiVolume, spec: CsiDriverSpec | None) -> MountedVolume:
        if must_attach(volume, spec):
            await self._use(volume.volume_to_mount, volume.unique_name)
        try:
            if volume.volume_to_mount.block:
                return await self._block_mapper.set_up(volume, spec)
            return await self._mounter.set_up(volume, spec)
        except AttachLimitExceeded as err:
            if self._limits is None or not self._limits.period(volume.driver):
                raise
            await self._limits.refresh(volume.driver)
            raise VolumeLimitExceeded(str(err)) from err


def to_volume_stats(usage: DriverUsage, moment: float, *, health: bool = False) -> VolumeStats:
    """Convert a driver's usage to VolumeStats, with its condition if `health` is set.

    `moment` is its Unix time in seconds.
    """
    return VolumeStats(
        capacity=usage.capacity,
        available=usage.available,
        used=usage.used,
        inodes=usage.inodes,
        inodes_free=usage.inodes_free,
        inodes_used=usage.inodes_used,
        moment=moment,
        abnormal=usage.abnormal if health else None,
    )
