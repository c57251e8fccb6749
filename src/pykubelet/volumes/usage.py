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
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pykubelet.api.pod import Pod, PodSpec
from pykubelet.logs import get_logger
from pykubelet.tasks import in_own_thread, wait_seconds
from pykubelet.volumes.config_map import ConfigMapKind
from pykubelet.volumes.downward_api import DownwardKind
from pykubelet.volumes.empty_dir import EmptyDirKind
from pykubelet.volumes.folders import VolumeFolders, is_mount_point
from pykubelet.volumes.projected import ProjectedKind
from pykubelet.volumes.secret import SecretKind
from pykubelet.volumes.usage_count import FileSystem, Interrupted, Pace, file_system, tally

log = get_logger(__name__)

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

_NONE: Mapping[str, Usage] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Usage:
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
    def of_file_system(cls, found: FileSystem, moment: float) -> Usage:
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


Others = Callable[[Pod], Awaitable[Mapping[str, Usage]]]
"""Gives the usage of a pod's volumes of other kinds, by name; raises nothing, and may take long."""


class VolumeUsage:
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
        self._own: dict[str, Mapping[str, Usage]] = {}
        self._foreign: dict[str, Mapping[str, Usage]] = {}
        self._asking: set[str] = set()
        self._walking: set[str] = set()
        self._interest: dict[str, tuple[PodSpec, bool]] = {}
        """Whether a pod is of interest, by uid, and the spec that this was found for."""

    def of(self, uid: str) -> Mapping[str, Usage]:
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
        pace = Pace(stop)
        walk = tasks.create_task(self._walk(pod, pace, stop), name=f"volume-walk-{pod.uid}")
        seen = -1
        while not walk.done() and pace.steps != seen:
            seen = pace.steps
            await asyncio.wait([walk], timeout=STUCK_SECONDS)
        if not walk.done():
            log.info("A pod's volumes cannot be measured: one does not answer", pod=pod.full_name)

    async def _walk(self, pod: Pod, pace: Pace, stop: threading.Event) -> None:
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
    root: Path, pod: Pod, pace: Pace, clock: Callable[[], float] = time.time
) -> dict[str, Usage] | None:
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


def _usage(path: Path, pace: Pace, clock: Callable[[], float]) -> Usage:
    around = file_system(path)
    # One that has no bounds does not count what it holds.
    if is_mount_point(path) and around.capacity and around.inodes:
        return Usage.of_file_system(around, clock())
    inside = tally(path, pace)
    return Usage(
        capacity=around.capacity,
        available=around.available,
        used=inside.used,
        inodes=around.inodes,
        inodes_free=around.inodes_free,
        inodes_used=inside.inodes,
        moment=clock(),
    )
