"""Disk usage of pods besides their writable layers: container logs, `/etc/hosts` and volumes.

Logs and hosts files of all pods are measured in one pass, in a thread of its own, when a client requests
statistics and the last pass is older than `REFRESH_SECONDS`. The pass works in slices (`WalkThrottle`), since
it competes with the event loop for the interpreter. If the file system hangs, the thread is abandoned, no
second one is started, and the values are omitted when they are older than `MAX_AGE_SECONDS`.

A file counts as upstream counts it: its blocks, not its length, and one inode; rotated files are included.
Files and directories that vanish during the pass are skipped. Volumes are measured by `volumes/usage.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.volume import Volume
from pykubelet.linux.untrusted_files import TooManyEntries
from pykubelet.logs import get_logger
from pykubelet.stats.cached_call import CachedCall
from pykubelet.util.metrics import GaugeSlices, SlicedCollector
from pykubelet.util.tasks import TaskScope, in_own_thread
from pykubelet.volumes.pvc import claim_name
from pykubelet.volumes.usage import Interrupted, VolumeStats, WalkThrottle

log = get_logger(__name__)
REFRESH_SECONDS = 10.0
WAIT_SECONDS = 2.0
MAX_AGE_SECONDS = 120.0
"""Longer than usual scrape intervals: a scrape of `/metrics` reports the pass of the previous one."""
MAX_ENTRIES = 10_000
"""Directory entries of a pod's logs that are measured; the usage of a pod with more is unknown."""
_BLOCK_BYTES = 512


class FileUsage(msgspec.Struct, frozen=True, gc=False):
    """Bytes and inodes of the files in a directory; None if it has no files."""

    used: int | None = None
    inodes: int | None = None


class PodStorage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Usage of a pod's logs and hosts file at one time; what is None does not exist or is unknown."""

    time: float
    container_logs: dict[str, FileUsage] = {}
    """By container name; rotated files and those of previous containers are included."""
    pod_logs: FileUsage | None = None
    """Files in the pod's log directory itself."""
    hosts: FileUsage | None = None


class LoggedPod(msgspec.Struct, frozen=True, gc=False):
    """A pod to measure."""

    uid: str
    log_dir: str
    hosts_file: str


PodStorageByUid = Mapping[str, PodStorage]
_NOTHING: PodStorageByUid = MappingProxyType({})


class PodStorageMeter:
    """Cached disk usage of the logs and hosts files of `pods`."""

    def __init__(
        self,
        pods: Callable[[], Iterable[LoggedPod]],
        tasks: TaskScope,
        *,
        observe_duration: Callable[[float], None] = lambda _: None,
        interval: float = REFRESH_SECONDS,
        wait: float = WAIT_SECONDS,
        max_age: float = MAX_AGE_SECONDS,
    ) -> None:
        """Initialize; `observe_duration` receives the seconds of each pass."""
        self._pods = pods
        self._observe_duration = observe_duration
        self._call: CachedCall[PodStorageByUid] = CachedCall(
            "pod-storage",
            self._measure,
            tasks,
            interval=interval,
            wait=wait,
            max_age=max_age,
            errors=(OSError,),
        )

    async def get(self) -> PodStorageByUid:
        """Return the latest usage by pod uid, after a new pass if it is due; waits at most `wait` seconds."""
        return await self._call.get() or _NOTHING

    def latest(self) -> PodStorageByUid:
        """Return the latest usage by pod uid without waiting, and start a pass if it is due."""
        self._call.refresh()
        return self._call.latest() or _NOTHING

    async def _measure(self) -> PodStorageByUid:
        pods, stop = tuple(self._pods()), threading.Event()
        started = time.perf_counter()
        try:
            found = await in_own_thread(
                lambda: measure(pods, WalkThrottle(stop)), name="pod-storage", cancel_timeout=0
            )
        finally:
            stop.set()
        self._observe_duration(time.perf_counter() - started)
        return found


def measure(
    pods: Iterable[LoggedPod], throttle: WalkThrottle, clock: Callable[[], float] = time.time
) -> dict[str, PodStorage]:
    """Measure logs and hosts files; pods that are left when it is interrupted are missing. Blocks."""
    found: dict[str, PodStorage] = {}
    try:
        for pod in pods:
            pod_logs, container_logs = _logs(pod.log_dir, throttle)
            found[pod.uid] = PodStorage(
                time=clock(),
                container_logs=container_logs,
                pod_logs=pod_logs,
                hosts=_file(pod.hosts_file),
            )
    except Interrupted:
        log.v(4).info("Interrupted measurement of pod logs")
    return found


def _logs(path: str, throttle: WalkThrottle) -> tuple[FileUsage | None, dict[str, FileUsage]]:
    """Return the usage of the files in a pod's log directory, and in its subdirectories by name."""
    directories: list[str] = []
    try:
        files, entries = _files(path, throttle, MAX_ENTRIES, directories)
        by_container = {}
        for name in directories:
            usage, entries = _files(f"{path}/{name}", throttle, entries)
            if usage is not None:
                by_container[name] = usage
    except TooManyEntries:
        log.v(2).info("Too many log files to measure", path=path, limit=MAX_ENTRIES)
        return None, {}
    return files, by_container


def _files(
    path: str, throttle: WalkThrottle, entries: int, directories: list[str] | None = None
) -> tuple[FileUsage | None, int]:
    """Return the usage of the files in a directory, None if it cannot be read, and how many entries remain.

    Names of subdirectories are appended to `directories`. Symbolic links are not followed.
    """
    blocks = inodes = 0
    try:
        with os.scandir(path) as listing:
            for entry in listing:
                throttle.step()
                entries -= 1
                if entries < 0:
                    raise TooManyEntries
                if entry.is_dir(follow_symlinks=False):
                    if directories is not None:
                        directories.append(entry.name)
                    continue
                try:
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    continue
                inodes += 1
    except OSError as err:
        if not isinstance(err, FileNotFoundError):
            log.v(4).info("Failed to measure log directory", path=path, err=err)
        return None, entries
    return (FileUsage(blocks * _BLOCK_BYTES, inodes) if inodes else FileUsage()), entries


def _file(path: str) -> FileUsage | None:
    try:
        return FileUsage(os.lstat(path).st_blocks * _BLOCK_BYTES, 1)
    except OSError:
        # The kubelet writes no file for pods that mount an /etc/hosts of their own.
        return None


class VolumeUsage(msgspec.Struct, frozen=True, gc=False):
    """Usage of a pod's volume."""

    name: str
    stats: VolumeStats
    claim: str
    """Name of its persistent volume claim; empty without one."""
    ephemeral: bool
    """Whether it counts as the pod's ephemeral storage."""


def volume_usage(pod: Pod, stats: Mapping[str, VolumeStats]) -> Sequence[VolumeUsage]:
    """Return the usage of the pod's volumes, ephemeral ones first.

    `stats` is the result of `VolumeStatCalculator.for_pod`.
    """
    if not stats:
        return ()
    found = [
        VolumeUsage(volume.name, stats[volume.name], claim_name(pod, volume), is_local_ephemeral(volume))
        for volume in pod.spec.volumes
        if volume.name in stats
    ]
    found.sort(key=lambda usage: not usage.ephemeral)
    return found


def is_local_ephemeral(volume: Volume) -> bool:
    """Return whether a volume is stored on the node's disk and belongs to its pod."""
    on_disk = volume.empty_dir is not None and not volume.empty_dir.medium
    return on_disk or volume.config_map is not None or volume.git_repo is not None


@dataclass(frozen=True, slots=True)
class LoggingContainer:
    """A running container, as the log metric labels it."""

    uid: str
    namespace: str
    pod: str
    container: str


class LogMetrics(SlicedCollector):
    """Collector of `kubelet_container_log_filesystem_used_bytes`."""

    def __init__(
        self,
        containers: Callable[[], Iterable[LoggingContainer]],
        storage: Callable[[], PodStorageByUid],
    ) -> None:
        """Initialize with the running containers and `PodStorageMeter.latest`."""
        self._containers = containers
        self._storage = storage

    def slices(self) -> Iterator[GaugeSlices | None]:
        """Yield the gauge."""
        yield GaugeSlices(
            "kubelet_container_log_filesystem_used_bytes",
            "Bytes used by the container's logs on the filesystem.",
            ("uid", "namespace", "pod", "container"),
            self._series,
        )

    def _series(self) -> Iterator[tuple[Sequence[str], float]]:
        storage = self._storage()
        for owner in self._containers():
            pod = storage.get(owner.uid)
            usage = pod.container_logs.get(owner.container) if pod is not None else None
            if usage is not None and usage.used is not None:
                yield (owner.uid, owner.namespace, owner.pod, owner.container), usage.used
