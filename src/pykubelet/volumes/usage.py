"""Volume stats: capacity and usage of pods' volumes, measured periodically and cached for readers.

Each pod is measured between one and two `volumeStatsAggPeriod` after the last time, at random, as upstream
does. One pod at a time is measured, in a thread; a measurement that hangs is abandoned, because a container
may have mounted a share inside its volume whose server is down. Readers get the last result and never wait.

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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from pykubelet.api.pod import Pod, PodSpec
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_subdirectory, walk_tree
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread, wait_seconds
from pykubelet.volumes.paths import VolumeFolders, is_mount_point
from pykubelet.volumes.plugin import MountedVolume
from pykubelet.volumes.plugins.config_map import ConfigMapKind
from pykubelet.volumes.plugins.downward_api import DownwardKind
from pykubelet.volumes.plugins.empty_dir import EmptyDirKind
from pykubelet.volumes.plugins.projected import ProjectedKind
from pykubelet.volumes.plugins.secret import SecretKind
from pykubelet.volumes.volume_state import VolumeRecord

log = get_logger(__name__)
WORK_SECONDS = 0.005
"""Seconds that a walk works between two sleeps."""
REST_FACTOR = 3
MAX_LINKED = 200_000
"""Inodes with several hard links that a walk remembers, so that a volume cannot fill the kubelet's memory."""
_BLOCK = 512
_EVERY = 128


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
        self._began = clock()

    def step(self) -> None:
        """Count a small piece of work, and sleep when it is due. Raises Interrupted."""
        self.steps += 1
        if self.steps % _EVERY:
            return
        worked = self._clock() - self._began
        if worked < WORK_SECONDS:
            return
        if self._stop.wait(worked * REST_FACTOR):
            raise Interrupted
        self._began = self._clock()


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


def tally(path: Path, pace: WalkThrottle) -> DirectoryUsage:
    """Walk a directory and return its usage. Raises OSError, and Interrupted."""
    return _Walk(pace).count(path)


class _Walk:
    """Visitor for `walk_tree` that sums up usage."""

    def __init__(self, pace: WalkThrottle) -> None:
        self._pace = pace
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
        return DirectoryUsage(round(self._blocks * _BLOCK), round(self._inodes))

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Count an entry; return whether it is a directory of the same file system."""
        self._pace.step()
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


OWN_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "configMap": ConfigMapKind.folder,
        "downwardAPI": DownwardKind.folder,
        "emptyDir": EmptyDirKind.folder,
        "projected": ProjectedKind.folder,
        "secret": SecretKind.folder,
    }
)
"""Volume types that are measured here, with the directories of their plugins."""
STUCK_SECONDS = 10.0
"""Seconds without progress after which a walk counts as hanging."""
UNMEASURED = frozenset({"hostPath", "image", "gitRepo"})
_NONE: Mapping[str, VolumeStats] = MappingProxyType({})


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

    @classmethod
    def of_file_system(cls, found: FileSystem, moment: float) -> VolumeStats:
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


Others = Callable[[Pod], Awaitable[Mapping[str, VolumeStats]]]
"""Returns the stats of a pod's volumes of other types, by name; raises nothing, and may take long."""


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
        others: Others | None = None,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._root = root
        self._pods = pods
        self._period = period
        self._others = others
        self._clock = clock
        self._chance = chance
        self._due: dict[str, float] = {}
        self._own: dict[str, Mapping[str, VolumeStats]] = {}
        self._foreign: dict[str, Mapping[str, VolumeStats]] = {}
        self._asking: set[str] = set()
        self._walking: set[str] = set()
        self._interest: dict[str, tuple[PodSpec, bool]] = {}
        """Whether a pod has volumes to measure, by uid, and the spec for which this was computed."""

    def of(self, uid: str) -> Mapping[str, VolumeStats]:
        """Return the latest stats of a pod's volumes, by name; empty before the first measurement."""
        own, foreign = self._own.get(uid, _NONE), self._foreign.get(uid)
        return {**own, **foreign} if foreign else own

    async def run(self) -> None:
        """Measure until cancelled."""
        if self._period <= 0:
            log.info("Volume stats collection disabled")
            return
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                pods = self._known(loop.time())
                for uid in [uid for uid, due in self._due.items() if due <= loop.time()]:
                    await self._measure(pods[uid], tasks)
                    self._due[uid] = loop.time() + self._period * (1 + self._chance())
                wake = min(self._due.values(), default=loop.time() + self._period)
                await asyncio.sleep(wait_seconds(min(wake - loop.time(), self._period)))

    def _known(self, now: float) -> dict[str, Pod]:
        """Return the pods to measure; new pods are due at random within one period, to spread the load."""
        every = {pod.uid: pod for pod in self._pods()}
        for uid in self._interest.keys() - every.keys():
            del self._interest[uid]
        pods = {uid: pod for uid, pod in every.items() if self._is_of_interest(uid, pod.spec)}
        for uid in self._due.keys() - pods.keys():
            del self._due[uid]
            self._own.pop(uid, None)
            self._foreign.pop(uid, None)
        for uid in pods:
            if uid not in self._due:
                self._due[uid] = now + self._period * self._chance()
        return pods

    def _is_of_interest(self, uid: str, spec: PodSpec) -> bool:
        # Called for all pods whenever one is due, so the result is cached per spec.
        known = self._interest.get(uid)
        if known is None or known[0] is not spec:
            found = any(not UNMEASURED.issuperset(volume.kinds) for volume in spec.volumes)
            known = self._interest[uid] = spec, found
        return known[1]

    async def _measure(self, pod: Pod, tasks: asyncio.TaskGroup) -> None:
        if self._others is not None and pod.uid not in self._asking and has_others(pod):
            self._asking.add(pod.uid)
            tasks.create_task(self._ask(self._others, pod), name=f"volume-usage-{pod.uid}")
        if pod.uid in self._walking or not own_volumes(self._root, pod):
            return
        stop = threading.Event()
        pace = WalkThrottle(stop)
        walk = tasks.create_task(self._walk(pod, pace, stop), name=f"volume-walk-{pod.uid}")
        seen = -1
        while not walk.done() and pace.steps != seen:
            seen = pace.steps
            await asyncio.wait([walk], timeout=STUCK_SECONDS)
        if not walk.done():
            log.info("Volume measurement hangs, continuing with other pods", pod=pod.full_name)

    async def _walk(self, pod: Pod, pace: WalkThrottle, stop: threading.Event) -> None:
        self._walking.add(pod.uid)
        try:
            found = await in_own_thread(
                lambda: measure(self._root, pod, pace, self._clock), name="volume-usage", cancel_timeout=0
            )
        finally:
            stop.set()
            self._walking.discard(pod.uid)
        if found is not None and pod.uid in self._due:
            self._own[pod.uid] = MappingProxyType(found)
            log.v(4).info(
                "Measured volumes of pod",
                pod=pod.full_name,
                podUID=pod.uid,
                used={name: usage.used for name, usage in found.items()},
            )

    async def _ask(self, others: Others, pod: Pod) -> None:
        try:
            found = await others(pod)
            if pod.uid in self._due:
                self._foreign[pod.uid] = found
        finally:
            self._asking.discard(pod.uid)


def own_volumes(root: Path, pod: Pod) -> dict[str, Path]:
    """Return the paths of the pod's volumes that are measured here, by name."""
    try:
        folders = VolumeFolders.of(root, pod.uid)
    except ValueError:
        return {}  # Rejected elsewhere.
    return {
        volume.name: folders.volume(OWN_KINDS[volume.kinds[0]], volume.name)
        for volume in pod.spec.volumes
        if len(volume.kinds) == 1 and volume.kinds[0] in OWN_KINDS
    }


def has_others(pod: Pod) -> bool:
    """Return whether the pod has volumes that `others` measures."""
    return any(kind not in OWN_KINDS and kind not in UNMEASURED for v in pod.spec.volumes for kind in v.kinds)


def measure(
    root: Path, pod: Pod, pace: WalkThrottle, clock: Callable[[], float] = time.time
) -> dict[str, VolumeStats] | None:
    """Measure the pod's existing volumes on the node; return None when interrupted. Blocks."""
    found = {}
    for name, path in own_volumes(root, pod).items():
        try:
            found[name] = _usage(path, pace, clock)
        except Interrupted:
            return None
        except FileNotFoundError:
            continue
        except OSError as err:
            log.v(4).info(
                "Failed to measure volume", pod=pod.full_name, podUID=pod.uid, volumeName=name, err=err
            )
    return found


def _usage(path: Path, pace: WalkThrottle, clock: Callable[[], float]) -> VolumeStats:
    around = file_system(path)
    # A file system without limits on bytes and inodes does not report its usage.
    if is_mount_point(path) and around.capacity and around.inodes:
        return VolumeStats.of_file_system(around, clock())
    inside = tally(path, pace)
    return VolumeStats(
        capacity=around.capacity,
        available=around.available,
        used=inside.used,
        inodes=around.inodes,
        inodes_free=around.inodes_free,
        inodes_used=inside.inodes,
        moment=clock(),
    )


ANSWER_SECONDS = 10.0


@runtime_checkable
class StatsProvider(Protocol):
    """A volume plugin that knows the usage of its volumes."""

    async def usage(self, pod: Pod) -> Mapping[str, VolumeStats]:
        """Return the stats of the pod's volumes of this type, by the pod's names for them; raises nothing."""


class PluginStatsCollector:
    """Collector of the stats of volumes of other types; `held` returns a pod's volumes, by its uid."""

    def __init__(
        self,
        held: Callable[[str], Iterable[VolumeRecord]],
        kinds: Mapping[str, object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._held = held
        self._kinds = kinds
        self._clock = clock
        self._open: set[str] = set()
        """Paths that a thread is still measuring."""

    async def of_pod(self, pod: Pod) -> dict[str, VolumeStats]:
        """Return the stats of a pod's volumes, by name, as far as available; raises nothing."""
        held = [h for h in self._held(pod.uid) if h.wanted.kind not in {*OWN_KINDS, *UNMEASURED}]
        knowing = {
            name: kind
            for name in sorted({holding.wanted.kind for holding in held})
            if isinstance(kind := self._kinds.get(name), StatsProvider)
        }
        plain = {
            holding.wanted.volume.name: holding.mounted
            for holding in held
            if holding.mounted is not None and holding.wanted.kind not in knowing
        }
        parts = await asyncio.gather(
            *(_asked(kind, pod) for kind in knowing.values()),
            *(self._one(pod, name, mounted) for name, mounted in plain.items()),
        )
        return {name: usage for part in parts for name, usage in part.items()}

    async def _one(self, pod: Pod, name: str, mounted: MountedVolume) -> dict[str, VolumeStats]:
        place = mounted.device or mounted.path
        if not place or place in self._open:
            return {}
        self._open.add(place)

        def ask() -> FileSystem:
            try:
                return _device(place) if mounted.device else file_system(Path(place))
            finally:
                self._open.discard(place)  # not before: the caller may have timed out

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await in_own_thread(ask, name=f"usage-{name}", cancel_timeout=0)
        except (OSError, TimeoutError) as err:
            log.v(4).info(
                "Failed to measure volume",
                pod=pod.full_name,
                podUID=pod.uid,
                volumeName=name,
                err=err if str(err) else "its file system does not answer",
            )
            return {}
        return {name: VolumeStats.of_file_system(found, self._clock())}


async def _asked(kind: StatsProvider, pod: Pod) -> Mapping[str, VolumeStats]:
    try:
        return await kind.usage(pod)
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
