"""How full pods' volumes are: measured now and then, and kept for whoever asks.

Each pod's volumes are measured every `volumeStatsAggPeriod`, at a moment of the pod's own: between one
and two periods after the last time, as the reference does it. One pod at a time is measured, in a
thread; what takes long takes its time (`usage_count.py`), but one that hangs is left behind: a container may
have mounted a server's share inside of its volume, and the server be away. A number is never older than it
must be and never waited for: readers get the last one.

- emptyDir, configMap, secret, downwardAPI and projected volumes are the node's own. Those in memory are
  file systems of their own, which know what they hold (a file's further names take an inode each there),
  and nothing is opened in them that a pod's end would have to wait for. Those on disk are walked.
- Whoever knows all others is asked (`usage_others.py`), for each pod by itself: a storage server that does
  not answer holds up nobody else.
- hostPath has no numbers: it is the machine's.

Counting what a volume takes: file systems are asked, folders on a shared disk are walked.

A walk counts what `du` counts: blocks, not lengths (a sparse file is small), a file with several names
once, the folder itself, and nothing of other file systems that are mounted inside. Containers write to
what is walked while it is walked, so no link is ever followed, folders are opened one from the other,
and what vanishes meanwhile is passed by.

A walk of millions of files must not be felt. It is not run at a low priority: a thread that the kernel
passes over while it holds the interpreter would hold up the whole agent. Instead it rests, three times
as long as it has worked.

How full those volumes are that are not the node's own: network shares, disks, what drivers give.

A kind that knows better is asked (a CSI driver tells what its storage says). Of all others the file system
is asked, in a thread of its own that nobody has to wait for: a server that is away answers never. It is
not asked again while an old question is open. Of a volume that is a block device only the size is known.
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
"""How long a walk works at a stretch."""
REST_FACTOR = 3
MAX_LINKED = 200_000
"""Inodes with several names that a walk remembers, so that a volume cannot fill the kubelet's memory."""
_BLOCK = 512
_EVERY = 128


class Interrupted(Exception):
    """Nobody waits for the walk any more."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a file system holds, in bytes and inodes."""

    capacity: int
    available: int
    """What is left for ordinary users."""
    used: int
    inodes: int
    inodes_free: int

    @property
    def inodes_used(self) -> int:
        """Inodes in use; 0 where the file system has no fixed number of them."""
        return self.inodes - self.inodes_free


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """What a folder takes, in bytes and inodes."""

    used: int
    inodes: int


class WalkThrottle:
    """Gives long work its rests, in a thread; `stop` ends the work with Interrupted."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self.steps = 0
        """How many pieces of work were done: others may see whether there is any progress."""
        self._began = clock()

    def step(self) -> None:
        """Count a small piece of work, and rest when it is time; raises Interrupted."""
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
    """Ask the file system that a path is on; raises OSError. Blocks for as long as its server is away."""
    found = os.statvfs(path)
    return FileSystem(
        capacity=found.f_frsize * found.f_blocks,
        available=found.f_frsize * found.f_bavail,
        used=found.f_frsize * (found.f_blocks - found.f_bfree),
        inodes=found.f_files,
        inodes_free=found.f_ffree,
    )


def tally(path: Path, pace: WalkThrottle) -> DirectoryUsage:
    """Walk a folder and count; raises OSError, and Interrupted."""
    return _Walk(pace).count(path)


class _Walk:
    """Counts what `walk_tree` visits."""

    def __init__(self, pace: WalkThrottle) -> None:
        self._pace = pace
        self._blocks = 0.0
        self._inodes = 0.0
        self._device = 0
        self._linked: set[int] = set()
        """Files with several names that were counted."""

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
        """Open a directory that was counted; None when it is gone, or something else has replaced it."""
        opened = open_subdirectory(name, parent)
        if opened is None or os.fstat(opened).st_dev == self._device:
            return opened
        os.close(opened)
        return None

    def leave(self, opened: int) -> None:
        """Do nothing: a directory is counted as an entry of its parent."""

    def _add(self, facts: os.stat_result) -> bool:
        """Count a file, unless it has been counted under another name.

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
"""The kinds that are measured here, with their folders."""
STUCK_SECONDS = 10.0
"""After which a walk that has not seen a single file more counts as one that hangs."""
UNMEASURED = frozenset({"hostPath", "image", "gitRepo"})
_NONE: Mapping[str, VolumeStats] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """How full a volume is, in bytes and inodes."""

    capacity: int
    """Of the file system that it lies on, which it may share; so are `available`, `inodes`, `inodes_free`."""
    available: int
    used: int
    inodes: int
    inodes_free: int
    inodes_used: int
    moment: float
    """When it was measured, in seconds since 1970."""

    @classmethod
    def of_file_system(cls, found: FileSystem, moment: float) -> VolumeStats:
        """Give the usage of a volume that is a file system of its own."""
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
"""Gives the usage of a pod's volumes of other kinds, by name; raises nothing, and may take long."""


class VolumeStatCalculator:
    """Measures the volumes of `pods` below the agent's root, each every `period` seconds or a bit more.

    A period that is not positive turns it off. `clock` gives seconds since 1970.
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
        """Whether a pod is of interest, by uid, and the spec that this was found for."""

    def of(self, uid: str) -> Mapping[str, VolumeStats]:
        """Give the last numbers of a pod's volumes, by name; none before they were measured once."""
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
        """Give the pods to measure; a new one has its turn within a period, so that not all come at once."""
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
        # All pods are looked at whenever one is due, so the result is kept for each spec.
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
            log.info("A pod's volumes cannot be measured: one does not answer", pod=pod.full_name)

    async def _walk(self, pod: Pod, pace: WalkThrottle, stop: threading.Event) -> None:
        self._walking.add(pod.uid)
        try:
            found = await in_own_thread(
                lambda: measure(self._root, pod, pace, self._clock), name="volume-usage", patience=0
            )
        finally:
            stop.set()
            self._walking.discard(pod.uid)
        if found is not None and pod.uid in self._due:
            self._own[pod.uid] = MappingProxyType(found)
            log.v(4).info(
                "Measured a pod's volumes",
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
    """Give the pod's volumes that are measured here, by name, with where they are."""
    try:
        folders = VolumeFolders.of(root, pod.uid)
    except ValueError:
        return {}  # It is refused elsewhere.
    return {
        volume.name: folders.volume(OWN_KINDS[volume.kinds[0]], volume.name)
        for volume in pod.spec.volumes
        if len(volume.kinds) == 1 and volume.kinds[0] in OWN_KINDS
    }


def has_others(pod: Pod) -> bool:
    """Whether somebody else has to be asked about a volume of the pod."""
    return any(kind not in OWN_KINDS and kind not in UNMEASURED for v in pod.spec.volumes for kind in v.kinds)


def measure(
    root: Path, pod: Pod, pace: WalkThrottle, clock: Callable[[], float] = time.time
) -> dict[str, VolumeStats] | None:
    """Measure a pod's own volumes, those that are there; None when nobody waits any more. Blocks."""
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
                "Could not measure a volume", pod=pod.full_name, podUID=pod.uid, volumeName=name, err=err
            )
    return found


def _usage(path: Path, pace: WalkThrottle, clock: Callable[[], float]) -> VolumeStats:
    around = file_system(path)
    # One that has no bounds does not count what it holds.
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
    """A kind that knows how full its volumes are."""

    async def usage(self, pod: Pod) -> Mapping[str, VolumeStats]:
        """Give the usage of the pod's volumes of this kind, by the pod's names for them; raises nothing."""


class PluginStatsCollector:
    """Measures volumes of other kinds; `held` gives those that a pod has, by its uid."""

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
        """Paths about which a thread still asks."""

    async def of_pod(self, pod: Pod) -> dict[str, VolumeStats]:
        """Give the usage of a pod's volumes, by name, as far as it can be had; raises nothing."""
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
                self._open.discard(place)  # only now: whoever asked may long have given up

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await in_own_thread(ask, name=f"usage-{name}", patience=0)
        except (OSError, TimeoutError) as err:
            log.v(4).info(
                "Could not measure a volume",
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
    except Exception as err:  # anything may go wrong in others' kinds, and the agent has to go on
        log.error(err, "A kind of volumes cannot tell how full they are", pod=pod.full_name, podUID=pod.uid)
        return {}


def _device(path: str) -> FileSystem:
    """Give the size of a block device; raises OSError."""
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.lseek(device, 0, os.SEEK_END)
    finally:
        os.close(device)
    return FileSystem(capacity=size, available=0, used=0, inodes=0, inodes_free=0)
