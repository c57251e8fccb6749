"""Samples of resource usage: what the readers return, and what the endpoints and the eviction manager use.

A cgroup is sampled in two depths. `Usage` (processor time and memory) is read every housekeeping interval,
because rates need two samples and eviction needs fresh ones. `Details` (throttling, I/O, open files, …) are
read only when a client asks for them.

Times are seconds since the epoch, sizes are bytes, processor times are nanoseconds, unless a name says
otherwise. None means that the kernel does not report the value; it is omitted from responses.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pykubelet.linux.taskstats import TaskStates

UNLIMITED = 1 << 62
"""Memory limits above this one mean no limit: the kernel rounds the largest number to pages."""


class CgroupError(Exception):
    """Raised when a file of a cgroup cannot be read or parsed; one line with the path and the cause."""


class CgroupGone(CgroupError):
    """Raised when a cgroup was removed before or while it was read."""


class PsiLine(msgspec.Struct, frozen=True, gc=False):
    """Pressure stall information: share of the time in percent, and its total in microseconds."""

    avg10: float = 0.0
    avg60: float = 0.0
    avg300: float = 0.0
    total: int = 0


class Psi(msgspec.Struct, frozen=True, gc=False):
    """Pressure of one resource: time in which some tasks, or all of them (full), waited for it."""

    some: PsiLine = PsiLine()
    full: PsiLine = PsiLine()


NO_PSI = Psi()
"""Pressure as it is reported where the kernel has none (cgroup v1)."""


class Usage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Processor time and memory of a cgroup at one time."""

    time: float
    cpu: int
    """Total processor time."""
    memory: int
    """Charged memory, with page cache."""
    working_set: int
    """Charged memory without inactive page cache."""
    rss: int = 0
    cache: int = 0
    mapped_file: int = 0
    active_file: int = 0
    inactive_file: int = 0
    swap: int = 0
    page_faults: int = 0
    major_page_faults: int = 0
    cpu_psi: Psi = NO_PSI
    memory_psi: Psi = NO_PSI
    io_psi: Psi = NO_PSI


class CpuLoad(msgspec.Struct, frozen=True, gc=False):
    """Tasks of a cgroup itself, without the cgroups below it, and smoothed numbers of some of them."""

    tasks: TaskStates = TaskStates()
    running: float = 0.0
    uninterruptible: float = 0.0


NO_LOAD = CpuLoad()
"""Load as it is reported where it is not read."""


class DeviceIo(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """I/O of a cgroup on one block device, by operation of the block cgroup ("Read", "Write", "Total", …).

    A table is empty where the kernel does not report it. Current kernels fill `bytes` and `operations`, and
    on v2 `cost` where the device has a cost model; the others need CFQ or the debug files of BFQ.
    """

    major: int
    minor: int
    bytes: dict[str, int] = {}
    operations: dict[str, int] = {}
    sectors: dict[str, int] = {}
    """Sectors; the only operation is "Count"."""
    merged: dict[str, int] = {}
    queued: dict[str, int] = {}
    service_time: dict[str, int] = {}
    """Nanoseconds."""
    cost: dict[str, int] = {}
    """Microseconds by counter of the I/O cost model: "usage", "wait", "indebt", "indelay"."""


class HugePages(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Huge pages of one size, such as `2MB`."""

    size: str
    usage: int
    max_usage: int
    failures: int


class Details(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What is read of a cgroup only on demand, at the time of its usage."""

    cpu_user: int = 0
    cpu_system: int = 0
    periods: int = 0
    throttled_periods: int = 0
    throttled: int = 0
    """Nanoseconds for which the cgroup was throttled."""
    burst_periods: int = 0
    burst: int = 0
    max_memory: int = 0
    memory_failures: int = 0
    """How often the memory limit was hit (failcnt)."""
    kernel_memory: int = 0
    threads: int = 0
    max_threads: int = 0
    """Limit on threads; 0 for none."""
    processes: int = 0
    file_descriptors: int = 0
    sockets: int = 0
    max_open_files: int | None = None
    """Soft limit on open files of the first process; -1 for none, None for cgroups without one."""
    io: tuple[DeviceIo, ...] = ()
    huge_pages: tuple[HugePages, ...] = ()


class Limits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Limits of a cgroup, which cAdvisor calls its spec."""

    created: float
    """Creation time of the cgroup."""
    has_cpu: bool = True
    """Whether the cgroup exists in the CPU hierarchy."""
    has_memory: bool = True
    """Whether the memory controller is enabled for the cgroup; always for the root."""
    cpu_shares: int = 0
    cpu_period: int = 0
    """Microseconds; 0 where the cgroup has none (the root)."""
    cpu_quota: int = 0
    """Microseconds per period; 0 for no limit."""
    memory_limit: int = 0
    """0 without memory controller; a number above `UNLIMITED` for no limit; total memory for the root."""
    memory_reservation: int = 0
    memory_swap_limit: int = 0
    """As cAdvisor reads it: above `UNLIMITED` for no limit; 0 is a limit of 0, or no swap accounting."""
    max_processes: int = 0
    """Limit on threads (pids.max); 2**64 - 1 for no limit, 0 for the root."""


class NetworkInterface(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Counters of a network interface."""

    name: str
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int


class DiskIo(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Counters of a block device since boot (/proc/diskstats); times are milliseconds."""

    reads: int = 0
    reads_merged: int = 0
    sectors_read: int = 0
    read_ms: int = 0
    writes: int = 0
    writes_merged: int = 0
    sectors_written: int = 0
    write_ms: int = 0
    in_progress: int = 0
    io_ms: int = 0
    weighted_io_ms: int = 0


class FilesystemUsage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Capacity and usage of a mounted file system, and the counters of its device."""

    time: float
    device: str
    """Name as cAdvisor reports it: the device (`/dev/vda`), or the mount point of a tmpfs (`/dev/shm`)."""
    major: int
    minor: int
    capacity: int
    available: int
    """Bytes available to unprivileged users."""
    used: int
    inodes: int | None
    inodes_free: int | None
    io: DiskIo = DiskIo()
    mount_point: str = ""
    """Mount point at which it was measured."""

    @property
    def inodes_used(self) -> int | None:
        """Inodes in use, if the file system has a fixed number of them."""
        return None if self.inodes is None or self.inodes_free is None else self.inodes - self.inodes_free


class MemoryModules(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Memory modules of one type, as far as the kernel lists them (EDAC); `capacity` is in bytes."""

    type: str
    capacity: int
    count: int


class MachineFacts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Constants of the host, as cAdvisor reports them."""

    machine_id: str = ""
    system_uuid: str = ""
    boot_id: str = ""
    kernel_version: str = ""
    os_version: str = ""
    cores: int = 0
    """Logical CPUs."""
    physical_cores: int = 0
    sockets: int = 0
    books: int = 0
    drawers: int = 0
    memory: int = 0
    swap: int = 0
    modules: tuple[MemoryModules, ...] = ()
    nvm_memory_mode: int = 0
    nvm_app_direct_mode: int = 0
    nvm_power_budget: int = 0
    """Watts."""


TargetKind = Literal["root", "node", "pod", "sandbox", "container"]
"""`node`: a cgroup that is neither the root nor a pod's, such as `/kubepods/burstable`."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A cgroup that is sampled, and whose it is."""

    path: str
    """Path in the cgroup hierarchy, such as `/kubepods/burstable/pod<uid>/<id>`."""
    kind: TargetKind
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    """Name of the container in its pod; empty for sandboxes and cgroups that are no container."""
    runtime_id: str = ""
    """Id of the container or sandbox in the runtime."""
    image: str = ""
    created: float = 0.0
    """Creation time in the runtime, of containers and sandboxes."""


class LabelTexts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Rendered labels of a target, in pieces: other labels are inserted between them, sorted by name."""

    target: Target
    container: str
    """Opening brace and the label `container`."""
    id_image: str
    """Comma, `id` and `image`; the other pieces begin with a comma, too."""
    name_namespace: str
    pod: str
    tail: str
    """All pieces after `container`."""
    series: str
    """All pieces, without the closing brace."""
    resource: str
    """Labels of `/metrics/resource`, without the closing brace."""


class Record(msgspec.Struct, kw_only=True):
    """A sampled cgroup with its latest samples; the collector updates it, others only read."""

    target: Target
    limits: Limits
    usage: Usage | None = None
    """None before the first sample; a stale one is never kept."""
    nano_cores: int | None = None
    """Processor usage between the last two samples, in nanoseconds per second; None before the second."""
    details: Details | None = None
    details_time: float = 0.0
    network: tuple[NetworkInterface, ...] | None = None
    """Interfaces of the host (root) or of a pod (sandbox); None where nothing is measured."""
    network_time: float = 0.0
    processes: int | None = None
    """Number of processes of a container; None before it was counted."""
    summary_time: float = 0.0
    """When the network was read and the processes were counted."""
    oom_events: int = 0
    """Out-of-memory kills seen in the cgroup since the kubelet has started."""
    load: CpuLoad | None = None
    """Load at the latest sample; None unless it is read."""
    labels: LabelTexts | None = None
    """Rendered labels, which the exposition builds once per target."""


class ContainerMemoryCurve(msgspec.Struct, gc=False, omit_defaults=True, rename="camel"):
    """Working set of a container in the last minutes; the last slot is the current one."""

    name: str
    limit: int | None = None
    sizes: list[int] = []
    """Largest sample of each slot, 0 without a sample."""
    kills: list[int] = []
    """Out-of-memory kills in each slot."""


class MemoryCurves(msgspec.Struct, kw_only=True, rename="camel"):
    """Memory of a pod's containers in the last minutes."""

    slot_seconds: float = 10.0
    containers: list[ContainerMemoryCurve] = []
