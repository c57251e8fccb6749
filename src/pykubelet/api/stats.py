"""Summary API (`stats/v1alpha1`): resource usage of the node, its pods and their containers.

Sizes are bytes. A field that is None is unknown and not written; a time that is None is written as null, as
upstream does. Field order is upstream's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

from msgspec import field

from pykubelet.api.meta import ObjectStruct

_END_OF_TIME = 253_402_300_800
"""Seconds since the epoch of the year 10000, which RFC 3339 cannot express."""


@lru_cache(maxsize=4096)
def _datetime(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def stats_time(seconds: float) -> datetime | None:
    """Return seconds since the epoch as the API writes them: UTC, whole seconds; None if out of range."""
    return _datetime(int(seconds)) if 0 < seconds < _END_OF_TIME else None


class PSIData(ObjectStruct, gc=False, kw_only=True):
    """Pressure: shares of the time in percent, and the total as the kernel reports it, in microseconds."""

    total: int
    avg10: float
    avg60: float
    avg300: float


class PSIStats(ObjectStruct, gc=False, kw_only=True):
    """Pressure stall information of one resource."""

    full: PSIData
    some: PSIData


class CPUStats(ObjectStruct, gc=False, kw_only=True):
    """Processor usage."""

    time: datetime | None
    usage_nano_cores: int | None = None
    """Average over the sample window, in nanoseconds per second."""
    usage_core_nano_seconds: int | None = None
    psi: PSIStats | None = None


class MemoryStats(ObjectStruct, gc=False, kw_only=True):
    """Memory usage."""

    time: datetime | None
    available_bytes: int | None = None
    """Limit minus working set; unknown without a limit."""
    usage_bytes: int | None = None
    working_set_bytes: int | None = None
    rss_bytes: int | None = None
    page_faults: int | None = None
    major_page_faults: int | None = None
    psi: PSIStats | None = None


class IOStats(ObjectStruct, gc=False, kw_only=True):
    """Pressure of I/O."""

    time: datetime | None
    psi: PSIStats | None = None


class SwapStats(ObjectStruct, gc=False, kw_only=True):
    """Swap usage."""

    time: datetime | None
    swap_available_bytes: int | None = None
    swap_usage_bytes: int | None = None


class ProcessStats(ObjectStruct, gc=False, kw_only=True):
    """Number of processes."""

    process_count: int | None = field(name="process_count", default=None)


class InterfaceStats(ObjectStruct, gc=False, kw_only=True):
    """Counters of a network interface."""

    name: str
    rx_bytes: int | None = None
    rx_errors: int | None = None
    tx_bytes: int | None = None
    tx_errors: int | None = None


class NetworkStats(ObjectStruct, gc=False, kw_only=True):
    """Network usage: the counters of the default interface, and all interfaces."""

    time: datetime | None
    name: str
    """Name of the default interface; empty if there is none."""
    rx_bytes: int | None = None
    rx_errors: int | None = None
    tx_bytes: int | None = None
    tx_errors: int | None = None
    interfaces: list[InterfaceStats] = []


class FsStats(ObjectStruct, gc=False, kw_only=True):
    """Usage of a file system, or of a part of it together with the capacity of the file system."""

    time: datetime | None
    available_bytes: int | None = None
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    inodes_free: int | None = None
    inodes: int | None = None
    inodes_used: int | None = None


class PVCReference(ObjectStruct, gc=False, kw_only=True):
    """Reference to a persistent volume claim."""

    name: str
    namespace: str


class VolumeHealthStats(ObjectStruct, gc=False, kw_only=True):
    """Health of a volume, as its CSI driver reports it."""

    abnormal: bool


class VolumeStats(FsStats, gc=False, kw_only=True):
    """Usage of a volume."""

    name: str = ""
    pvc_ref: PVCReference | None = None
    volume_health_stats: VolumeHealthStats | None = None


class ContainerStats(ObjectStruct, gc=False, kw_only=True):
    """Usage of a container, or of a system container (`kubelet`, `runtime`, `misc`, `pods`)."""

    name: str
    start_time: datetime | None
    cpu: CPUStats | None = None
    memory: MemoryStats | None = None
    io: IOStats | None = None
    rootfs: FsStats | None = None
    """Writable layer."""
    logs: FsStats | None = None
    swap: SwapStats | None = None


class PodReference(ObjectStruct, gc=False, kw_only=True):
    """Reference to a pod."""

    name: str
    namespace: str
    uid: str


class PodStats(ObjectStruct, gc=False, kw_only=True):
    """Usage of a pod: of its cgroup, its sandbox's network, its volumes and its containers."""

    pod_ref: PodReference
    start_time: datetime | None
    containers: list[ContainerStats]
    cpu: CPUStats | None = None
    memory: MemoryStats | None = None
    io: IOStats | None = None
    network: NetworkStats | None = None
    volume_stats: list[VolumeStats] = field(name="volume", default_factory=list)
    ephemeral_storage: FsStats | None = field(name="ephemeral-storage", default=None)
    process_stats: ProcessStats | None = field(name="process_stats", default=None)
    swap: SwapStats | None = None


class RuntimeStats(ObjectStruct, gc=False, kw_only=True):
    """File systems of the container runtime: of images, and of writable layers."""

    image_fs: FsStats | None = None
    container_fs: FsStats | None = None


class RlimitStats(ObjectStruct, gc=False, kw_only=True):
    """Limit on tasks of the host, and their number."""

    time: datetime | None
    maxpid: int | None = None
    curproc: int | None = None


class NodeStats(ObjectStruct, gc=False, kw_only=True):
    """Usage of the node."""

    node_name: str
    system_containers: list[ContainerStats] = []
    start_time: datetime | None
    cpu: CPUStats | None = None
    memory: MemoryStats | None = None
    io: IOStats | None = None
    network: NetworkStats | None = None
    fs: FsStats | None = None
    runtime: RuntimeStats | None = None
    rlimit: RlimitStats | None = None
    swap: SwapStats | None = None


class Summary(ObjectStruct, gc=False, kw_only=True):
    """The Summary API's document."""

    node: NodeStats
    pods: list[PodStats]
