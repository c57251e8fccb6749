"""Measured amounts of the eviction signals, and the usage of pods that ranking and limits need. Pure.

The facts come from `stats/`: samples of cgroups, file systems and the number of tasks. A fact that could not
be measured has no observation, and a threshold without an observation is never met: no pod is evicted by
guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pykubelet.api.stats import FsStats, PodStats, RlimitStats
from pykubelet.config.validation import validate_resources as signals
from pykubelet.eviction.signals import Disks
from pykubelet.stats.samples import UNLIMITED, FilesystemUsage, Record

MAX_SAMPLE_AGE_SECONDS = 60.0
"""Age from which on a sample is not used: what it shows may long be over."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Amount of a signal at one time, in bytes or counts; the time is in seconds since the epoch."""

    available: int
    capacity: int
    time: float


Observations = Mapping[str, Observation]
"""Observations by signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """Facts about the node at one time; None for those that could not be measured."""

    root: Record | None = None
    """Root cgroup."""
    pods: Record | None = None
    """Cgroup of all pods."""
    nodefs: FilesystemUsage | None = None
    imagefs: FilesystemUsage | None = None
    containerfs: FilesystemUsage | None = None
    """The same as imagefs if the runtime reports no other."""
    rlimit: RlimitStats | None = None
    rlimit_time: float = 0.0

    def disks(self) -> Disks | None:
        """Return which file systems differ; None if one of them is unknown.

        As upstream, writable layers that are not on the disk of the images count as being on nodefs.
        """
        if self.nodefs is None or self.imagefs is None or self.containerfs is None:
            return None
        split = not _same_device(self.imagefs, self.containerfs)
        dedicated = split or not _same_device(self.nodefs, self.imagefs)
        return Disks(dedicated_imagefs=dedicated, split=split)


def _same_device(left: FilesystemUsage, right: FilesystemUsage) -> bool:
    return (left.major, left.minor, left.device) == (right.major, right.minor, right.device)


def observe(node: NodeMeasurements, now: float) -> dict[str, Observation]:
    """Return the observations of all signals that were measured and are not older than the maximum age."""
    found = {
        **_memory(node.root, signals.MEMORY_AVAILABLE, signals.MEMORY_AVAILABLE_WITH_CACHE),
        **_memory(
            node.pods, signals.ALLOCATABLE_MEMORY_AVAILABLE, signals.ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE
        ),
        **_filesystem(node.nodefs, signals.NODEFS_AVAILABLE, signals.NODEFS_INODES_FREE),
        **_filesystem(node.imagefs, signals.IMAGEFS_AVAILABLE, signals.IMAGEFS_INODES_FREE),
        **_filesystem(node.containerfs, signals.CONTAINERFS_AVAILABLE, signals.CONTAINERFS_INODES_FREE),
    }
    rlimit = node.rlimit
    if rlimit is not None and rlimit.maxpid is not None and rlimit.curproc is not None:
        found[signals.PID_AVAILABLE] = Observation(
            rlimit.maxpid - rlimit.curproc, rlimit.maxpid, node.rlimit_time
        )
    return {
        signal: observation
        for signal, observation in found.items()
        if now - observation.time <= MAX_SAMPLE_AGE_SECONDS
    }


def _memory(record: Record | None, without_cache: str, with_cache: str) -> dict[str, Observation]:
    if record is None or record.usage is None or not 0 < record.limits.memory_limit <= UNLIMITED:
        return {}
    limit, usage = record.limits.memory_limit, record.usage
    available = max(0, limit - usage.working_set)
    reclaimable = min(usage.active_file, usage.working_set)
    return {
        without_cache: Observation(available, available + usage.working_set, usage.time),
        with_cache: Observation(max(0, limit - usage.working_set + reclaimable), limit, usage.time),
    }


def _filesystem(usage: FilesystemUsage | None, available: str, inodes_free: str) -> dict[str, Observation]:
    if usage is None:
        return {}
    found = {available: Observation(usage.available, usage.capacity, usage.time)}
    if usage.inodes is not None and usage.inodes_free is not None:
        found[inodes_free] = Observation(usage.inodes_free, usage.inodes, usage.time)
    return found


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Bytes and inodes of files; what was not measured is 0."""

    used: int = 0
    inodes: int = 0

    def __add__(self, other: DiskUsage) -> DiskUsage:
        return DiskUsage(self.used + other.used, self.inodes + other.inodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerUsage:
    """Usage of a running container."""

    name: str
    memory: int | None = None
    """Working set in bytes."""
    rootfs: DiskUsage | None = None
    """Writable layer; None if it was not measured."""
    logs: DiskUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodUsage:
    """Usage of a pod that has running containers."""

    memory: int | None = None
    """Working set of the pod's cgroup in bytes."""
    processes: int | None = None
    containers: tuple[ContainerUsage, ...] = ()
    volumes: Mapping[str, DiskUsage] = field(default_factory=lambda: MappingProxyType({}))
    """Measured volumes by name."""
    ephemeral_storage: int | None = None
    """Bytes of writable layers, logs, hosts file and volumes on the node's disk."""


def pod_usage(stats: PodStats) -> PodUsage:
    """Return the usage of a pod in the Summary API."""
    return PodUsage(
        memory=stats.memory.working_set_bytes if stats.memory is not None else None,
        processes=stats.process_stats.process_count if stats.process_stats is not None else None,
        containers=tuple(
            ContainerUsage(
                name=container.name,
                memory=container.memory.working_set_bytes if container.memory is not None else None,
                rootfs=_disk_usage(container.rootfs),
                logs=_disk_usage(container.logs),
            )
            for container in stats.containers
        ),
        volumes={
            volume.name: DiskUsage(volume.used_bytes, volume.inodes_used or 0)
            for volume in stats.volume_stats
            if volume.used_bytes is not None
        },
        ephemeral_storage=stats.ephemeral_storage.used_bytes if stats.ephemeral_storage is not None else None,
    )


def _disk_usage(stats: FsStats | None) -> DiskUsage | None:
    if stats is None or (stats.used_bytes is None and stats.inodes_used is None):
        return None
    return DiskUsage(stats.used_bytes or 0, stats.inodes_used or 0)
