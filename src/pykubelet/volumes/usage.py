"""Volume stats: capacity and usage of pods' volumes, measured periodically and cached for readers.

Each pod is measured between one and two `volumeStatsAggPeriod` after the last time, at random, as upstream
does. One pod at a time is measured, in a thread; a measurement that hangs is abandoned, because a container
may have mounted a share inside its volume whose server is down. Readers get the last result and never wait;
only `refresh` measures pods immediately, for an eviction that must not be based on a usage of minutes ago.

- emptyDir, configMap, secret, downwardAPI and projected volumes are on the node. Those on tmpfs are file
  systems that know their usage (each hard link takes an inode there); no file in them is opened, which could
  delay a pod's termination. Those on disk are walked.
- Other volumes are measured by `PluginStatsCollector`, for each pod separately: an unresponsive storage
  server delays no other pod. A plugin with stats of its own (CSI drivers) is called. For others, statvfs runs
  in a thread of its own, because it may never return, and is not called again while an earlier call is
  pending. Of block devices only the size is known.
- hostPath volumes have no stats: they belong to the host.

A walk counts like `du`: blocks, not lengths (a sparse file is small), an inode with several hard links once,
the directory itself, and nothing of other file systems mounted inside. Containers write to the tree
concurrently, so no symlink is followed, directories are opened from their open parents, and what vanishes is
skipped.

A walk over millions of files must not slow down the kubelet. It does not run at a low priority: a thread that
the kernel does not schedule while it holds the GIL would block the whole process. Instead it sleeps three
times as long as it has worked.
"""

from __future__ import annotations

import asyncio
import os
import random
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from pykubelet.api.pod import Pod, PodSpec
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_subdirectory, walk_tree
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread, wait_seconds
from pykubelet.volumes.paths import PodVolumePaths, is_mount_point
from pykubelet.volumes.plugin import MountedVolume
from pykubelet.volumes.plugins.config_map import ConfigMapPlugin
from pykubelet.volumes.plugins.downward_api import DownwardApiPlugin
from pykubelet.volumes.plugins.empty_dir import EmptyDirPlugin
from pykubelet.volumes.plugins.projected import ProjectedPlugin
from pykubelet.volumes.plugins.secret import SecretPlugin
from pykubelet.volumes.volume_state import VolumeRecord

log = get_logger(__name__)
WORK_SECONDS = 0.005
"""Seconds that a walk works between two sleeps."""
REST_FACTOR = 3
MAX_LINKED = 200_000
"""Inodes with several hard links that a walk remembers, so that a volume cannot fill the kubelet's memory."""
_BLOCK_BYTES = 512
_STEPS_PER_CHECK = 128


class Interrupted(Exception):
    """Raised in a walk whose caller no longer waits for it."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Capacity and usage of a file system, in bytes and inodes."""

    capacity: int
    available: int
    """Bytes available to unprivileged users."""
    used: int
    inodes: int
    inodes_free: int

    @property
    def inodes_used(self) -> int:
        """Inodes in use; 0 where the file system has no fixed number of them."""
        return self.inodes - self.inodes_free


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """Usage of a directory tree, in bytes and inodes."""

    used: int
    inodes: int


class WalkThrottle:
    """Throttle of long work in a thread; setting `stop` ends the work with Interrupted."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self.steps = 0
        """Number of pieces of work done, by which other threads detect progress."""
        self._started_at = clock()

    def step(self) -> None:
        """Count a small piece of work, and sleep when it is due. Raises Interrupted."""
        self.steps += 1
        if self.steps % _STEPS_PER_CHECK:
            return
        worked = self._clock() - self._started_at
        if worked < WORK_SECONDS:
            return
        if self._stop.wait(worked * REST_FACTOR):
            raise Interrupted
        self._started_at = self._clock()


def file_system(path: Path) -> FileSystem:
    """Return the statvfs numbers of a path. Raises OSError. Blocks while a file server is unreachable."""
    found = os.statvfs(path)
    return FileSystem(
        capacity=found.f_frsize * found.f_blocks,
        available=found.f_frsize * found.f_bavail,
        used=found.f_frsize * (found.f_blocks - found.f_bfree),
        inodes=found.f_files,
        inodes_free=found.f_ffree,
    )


def directory_usage(path: Path, throttle: WalkThrottle) -> DirectoryUsage:
    """Walk a directory and return its usage. Raises OSError, and Interrupted."""
    return _Walk(throttle).count(path)


class _Walk:
    """Visitor for `walk_tree` that sums up usage."""

    def __init__(self, throttle: WalkThrottle) -> None:
        self._throttle = throttle
        self._blocks = 0.0
        self._inodes = 0.0
        self._device = 0
        self._linked: set[int] = set()
        """Counted inodes with several hard links."""

    def count(self, path: Path) -> DirectoryUsage:
        facts = path.lstat()
        self._device = facts.st_dev
        self._add(facts)
        walk_tree(os.open(path, OPEN_DIRECTORY), self)
        return DirectoryUsage(round(self._blocks * _BLOCK_BYTES), round(self._inodes))

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Count an entry; return whether it is a directory of the same file system."""
        self._throttle.step()
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        return facts.st_dev == self._device and self._add(facts) and stat.S_ISDIR(facts.st_mode)

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory that was counted; return None if it was removed or replaced."""
        opened = open_subdirectory(name, parent)
        if opened is None or os.fstat(opened).st_dev == self._device:
            return opened
        os.close(opened)
        return None

    def leave(self, opened: int) -> None:
        """Do nothing: a directory is counted as an entry of its parent."""

    def _add(self, facts: os.stat_result) -> bool:
        """Count a file, and return True, unless its inode has been counted under another name.

        When more inodes have several names than are remembered, each name counts for its share of the inode.
        """
        share = 1
        if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
            if facts.st_ino in self._linked:
                return False
            if len(self._linked) < MAX_LINKED:
                self._linked.add(facts.st_ino)
            else:
                share = facts.st_nlink
        self._blocks += facts.st_blocks / share
        self._inodes += 1 / share
        return True


LOCAL_PLUGIN_DIRS: Mapping[str, str] = MappingProxyType(
    {
        "configMap": ConfigMapPlugin.directory_name,
        "downwardAPI": DownwardApiPlugin.directory_name,
        "emptyDir": EmptyDirPlugin.directory_name,
        "projected": ProjectedPlugin.directory_name,
        "secret": SecretPlugin.directory_name,
    }
)
"""Volume types that are measured here, with the directories of their plugins."""
STUCK_SECONDS = 10.0
"""Seconds without progress after which a walk counts as hanging."""
UNMEASURED_TYPES = frozenset({"hostPath", "image", "gitRepo"})
_NO_STATS: Mapping[str, VolumeStats] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """Capacity and usage of a volume, in bytes and inodes."""

    capacity: int
    """Of the volume's file system, which may be shared; so are `available`, `inodes`, `inodes_free`."""
    available: int
    used: int
    inodes: int
    inodes_free: int
    inodes_used: int
    moment: float
    """Time of the measurement, in seconds since the epoch."""
    abnormal: bool | None = None
    """Whether its CSI driver reports it as unhealthy; None if the driver or `CSIVolumeHealth` does not."""

    @classmethod
    def from_file_system(cls, found: FileSystem, moment: float) -> VolumeStats:
        """Return the stats of a volume that is a file system of its own."""
        return cls(
            capacity=found.capacity,
            available=found.available,
            used=found.used,
            inodes=found.inodes,
            inodes_free=found.inodes_free,
            inodes_used=found.inodes_used,
            moment=moment,
        )


PluginStatsSource = Callable[[Pod], Awaitable[Mapping[str, VolumeStats]]]
"""Returns the stats of a pod's volumes of other types, by name; raises nothing, and may take long."""
ObserveDuration = Callable[[str, float], None]
"""Records a measurement's source (`du`, `statfs`, `block`, a CSI driver) and seconds, in any thread."""


def ignore_duration(_source: str, _seconds: float) -> None:
    """Record nothing."""


BATCH_SECONDS = 10.0
"""Shortest time between two rounds of measurements, unless the period is shorter than four of it."""


class VolumeStatCalculator:
    """Periodic measurement of the volumes of `pods`, each every `period` seconds or up to twice as long.

    A period that is not positive disables it. `clock` returns seconds since the epoch.
    """

    def __init__(
        self,
        root: Path,
        pods: Callable[[], Iterable[Pod]],
        period: float,
        *,
        plugin_stats: PluginStatsSource | None = None,
        observe_duration: ObserveDuration = ignore_duration,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._root = root
        self._pods = pods
        self._period = period
        self._plugin_stats_source = plugin_stats
        self._observe_duration = observe_duration
        self._clock = clock
        self._rng = rng
        self._due: dict[str, float] = {}
        self._local_stats: dict[str, Mapping[str, VolumeStats]] = {}
        self._plugin_stats: dict[str, Mapping[str, VolumeStats]] = {}
        self._collecting: set[str] = set()
        self._walking: set[str] = set()
        self._measurable: dict[str, tuple[PodSpec, bool]] = {}
        """Whether a pod has volumes to measure, by uid, and the spec for which this was computed."""
        self._requested: set[str] = set()
        """Uids of pods to measure before they are due."""
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        """Set after the measurement of each pod."""

    def for_pod(self, uid: str) -> Mapping[str, VolumeStats]:
        """Return the latest stats of a pod's volumes, by name; empty before the first measurement."""
        local, from_plugins = self._local_stats.get(uid, _NO_STATS), self._plugin_stats.get(uid)
        return {**local, **from_plugins} if from_plugins else local

    async def refresh(self, uids: Collection[str], timeout: float) -> None:
        """Measure pods now, and wait until that is done, at most for `timeout` seconds.

        Pods that are not reached in time are measured later. With a period that is not positive, nothing is
        measured.
        """
        if self._period <= 0:
            return
        remaining = set(uids)
        self._requested |= remaining
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                while remaining & self._requested:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            log.info("Volumes were not measured in time", pods=len(remaining & self._requested))

    async def run(self) -> None:
        """Measure until cancelled."""
        if self._period <= 0:
            log.info("Volume stats collection disabled")
            return
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                pods = self._pods_to_measure(loop.time())
                self._requested &= pods.keys()
                self._progress.set()
                requested = [uid for uid in self._due if uid in self._requested]
                due = [uid for uid, at in self._due.items() if at <= loop.time() and uid not in requested]
                for uid in [*requested, *due]:
                    await self._measure(pods[uid], tasks)
                    self._due[uid] = loop.time() + self._period * (1 + self._rng())
                    if uid in requested:
                        self._requested.discard(uid)
                        self._progress.set()
                wake = min(self._due.values(), default=loop.time() + self._period)
                # Pods that are due within a few seconds are measured together: each round looks at all pods.
                shortest = min(BATCH_SECONDS, self._period / 4)
                await self._sleep(max(shortest, min(wake - loop.time(), self._period)))

    async def _sleep(self, seconds: float) -> None:
        """Wait until the next round is due, or requested."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds(seconds)):
                await self._wake.wait()
        self._wake.clear()

    def _pods_to_measure(self, now: float) -> dict[str, Pod]:
        """Return the pods to measure; new pods are due at random within one period, to spread the load."""
        all_pods = {pod.uid: pod for pod in self._pods()}
        for uid in self._measurable.keys() - all_pods.keys():
            del self._measurable[uid]
        pods = {uid: pod for uid, pod in all_pods.items() if self._has_measurable_volumes(uid, pod.spec)}
        for uid in self._due.keys() - pods.keys():
            del self._due[uid]
            self._local_stats.pop(uid, None)
            self._plugin_stats.pop(uid, None)
        for uid in pods:
            if uid not in self._due:
                self._due[uid] = now + self._period * self._rng()
        return pods

    def _has_measurable_volumes(self, uid: str, spec: PodSpec) -> bool:
        # Called for all pods whenever one is due, so the result is cached per spec.
        known = self._measurable.get(uid)
        if known is None or known[0] is not spec:
            found = any(not UNMEASURED_TYPES.issuperset(volume.kinds) for volume in spec.volumes)
            known = self._measurable[uid] = spec, found
        return known[1]

    async def _measure(self, pod: Pod, tasks: asyncio.TaskGroup) -> None:
        if (
            self._plugin_stats_source is not None
            and pod.uid not in self._collecting
            and has_plugin_volumes(pod)
        ):
            self._collecting.add(pod.uid)
            tasks.create_task(
                self._collect_plugin_stats(self._plugin_stats_source, pod), name=f"volume-usage-{pod.uid}"
            )
        if pod.uid in self._walking or not own_volumes(self._root, pod):
            return
        stop = threading.Event()
        throttle = WalkThrottle(stop)
        walk = tasks.create_task(self._walk(pod, throttle, stop), name=f"volume-walk-{pod.uid}")
        seen = -1
        while not walk.done() and throttle.steps != seen:
            seen = throttle.steps
            await asyncio.wait([walk], timeout=STUCK_SECONDS)
        if not walk.done():
            log.info("Volume measurement hangs, continuing with other pods", pod=pod.full_name)

    async def _walk(self, pod: Pod, throttle: WalkThrottle, stop: threading.Event) -> None:
        self._walking.add(pod.uid)
        try:
            found = await in_own_thread(
                lambda: measure(self._root, pod, throttle, self._clock, self._observe_duration),
                name="volume-usage",
                cancel_timeout=0,
            )
        except OSError as err:
            log.error(err, "Failed to measure volumes of pod", pod=pod.full_name, podUID=pod.uid)
            return
        finally:
            stop.set()
            self._walking.discard(pod.uid)
        if found is not None and pod.uid in self._due:
            self._local_stats[pod.uid] = MappingProxyType(found)
            log.v(4).info(
                "Measured volumes of pod",
                pod=pod.full_name,
                podUID=pod.uid,
                used={name: usage.used for name, usage in found.items()},
            )

    async def _collect_plugin_stats(self, plugin_stats: PluginStatsSource, pod: Pod) -> None:
        try:
            found = await plugin_stats(pod)
            if pod.uid in self._due:
                self._plugin_stats[pod.uid] = found
        finally:
            self._collecting.discard(pod.uid)


def own_volumes(root: Path, pod: Pod) -> dict[str, Path]:
    """Return the paths of the pod's volumes that are measured here, by name."""
    try:
        paths = PodVolumePaths.for_pod(root, pod.uid)
    except ValueError:
        return {}  # Rejected elsewhere.
    return {
        volume.name: paths.volume(LOCAL_PLUGIN_DIRS[volume.kinds[0]], volume.name)
        for volume in pod.spec.volumes
        if len(volume.kinds) == 1 and volume.kinds[0] in LOCAL_PLUGIN_DIRS
    }


def has_plugin_volumes(pod: Pod) -> bool:
    """Return whether the pod has volumes that the plugin stats source measures."""
    return any(
        kind not in LOCAL_PLUGIN_DIRS and kind not in UNMEASURED_TYPES
        for v in pod.spec.volumes
        for kind in v.kinds
    )


def measure(
    root: Path,
    pod: Pod,
    throttle: WalkThrottle,
    clock: Callable[[], float] = time.time,
    observe_duration: ObserveDuration = ignore_duration,
) -> dict[str, VolumeStats] | None:
    """Measure the pod's existing volumes on the node; return None when interrupted. Blocks."""
    found = {}
    for name, path in own_volumes(root, pod).items():
        try:
            found[name] = _usage(path, throttle, clock, observe_duration)
        except Interrupted:
            return None
        except FileNotFoundError:
            continue
        except OSError as err:
            log.v(4).info(
                "Failed to measure volume", pod=pod.full_name, podUID=pod.uid, volumeName=name, err=err
            )
    return found


def _usage(
    path: Path, throttle: WalkThrottle, clock: Callable[[], float], observe_duration: ObserveDuration
) -> VolumeStats:
    started = time.perf_counter()
    fs = file_system(path)
    # A file system without limits on bytes and inodes does not report its usage.
    if is_mount_point(path) and fs.capacity and fs.inodes:
        observe_duration("statfs", time.perf_counter() - started)
        return VolumeStats.from_file_system(fs, clock())
    inside = directory_usage(path, throttle)
    observe_duration("du", time.perf_counter() - started)
    return VolumeStats(
        capacity=fs.capacity,
        available=fs.available,
        used=inside.used,
        inodes=fs.inodes,
        inodes_free=fs.inodes_free,
        inodes_used=inside.inodes,
        moment=clock(),
    )


STATVFS_TIMEOUT_SECONDS = 10.0


@runtime_checkable
class StatsProvider(Protocol):
    """A volume plugin that knows the usage of its volumes."""

    async def usage(self, pod: Pod) -> Mapping[str, VolumeStats]:
        """Return the stats of the pod's volumes of this type, by the pod's names for them; raises nothing."""


class PluginStatsCollector:
    """Collector of the stats of volumes of other types."""

    def __init__(
        self,
        records_for_pod: Callable[[str], Iterable[VolumeRecord]],
        plugins: Mapping[str, object],
        clock: Callable[[], float] = time.time,
        observe_duration: ObserveDuration = ignore_duration,
    ) -> None:
        self._records_for_pod = records_for_pod
        self._plugins = plugins
        self._clock = clock
        self._observe_duration = observe_duration
        self._pending_paths: set[str] = set()
        """Paths that a thread is still measuring."""

    async def for_pod(self, pod: Pod) -> dict[str, VolumeStats]:
        """Return the stats of a pod's volumes, by name, as far as available; raises nothing."""
        ignored = {*LOCAL_PLUGIN_DIRS, *UNMEASURED_TYPES}
        records = [record for record in self._records_for_pod(pod.uid) if record.volume.kind not in ignored]
        providers = {
            name: plugin
            for name in sorted({record.volume.kind for record in records})
            if isinstance(plugin := self._plugins.get(name), StatsProvider)
        }
        without_provider = {
            record.volume.pod_volume.name: record.mounted
            for record in records
            if record.mounted is not None and record.volume.kind not in providers
        }
        results = await asyncio.gather(
            *(_call_provider(provider, pod) for provider in providers.values()),
            *(self._statvfs(pod, name, mounted) for name, mounted in without_provider.items()),
        )
        return {name: usage for result in results for name, usage in result.items()}

    async def _statvfs(self, pod: Pod, name: str, mounted: MountedVolume) -> dict[str, VolumeStats]:
        path = mounted.device or mounted.path
        if not path or path in self._pending_paths:
            return {}
        self._pending_paths.add(path)
        started = time.perf_counter()

        def query() -> FileSystem:
            try:
                return _device(path) if mounted.device else file_system(Path(path))
            finally:
                self._pending_paths.discard(path)  # not before: the caller may have timed out

        try:
            async with asyncio.timeout(STATVFS_TIMEOUT_SECONDS):
                found = await in_own_thread(query, name=f"usage-{name}", cancel_timeout=0)
        except (OSError, TimeoutError) as err:
            if not isinstance(err, TimeoutError):
                self._pending_paths.discard(path)  # the thread may not have started
            log.v(4).info(
                "Failed to measure volume",
                pod=pod.full_name,
                podUID=pod.uid,
                volumeName=name,
                err=err if str(err) else "its file system does not answer",
            )
            return {}
        self._observe_duration("block" if mounted.device else "statfs", time.perf_counter() - started)
        return {name: VolumeStats.from_file_system(found, self._clock())}


async def _call_provider(provider: StatsProvider, pod: Pod) -> Mapping[str, VolumeStats]:
    try:
        return await provider.usage(pod)
    except Exception as err:  # third-party plugins may raise anything
        log.error(err, "Failed to get volume stats from plugin", pod=pod.full_name, podUID=pod.uid)
        return {}


def _device(path: str) -> FileSystem:
    """Return the size of a block device as a FileSystem. Raises OSError."""
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.lseek(device, 0, os.SEEK_END)
    finally:
        os.close(device)
    return FileSystem(capacity=size, available=0, used=0, inodes=0, inodes_free=0)
