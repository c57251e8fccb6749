"""Families of `/metrics/cadvisor` about file systems, block devices, network interfaces and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from pykubelet.stats.cadvisor.page import CadvisorPage, CgroupRow, DiskRow
from pykubelet.stats.exposition import Family, Kind, Value, constant, multiple
from pykubelet.stats.samples import DeviceIo, FilesystemUsage, MachineFacts, MemoryModules, NetworkInterface
from pykubelet.util.metrics import escape_label

Page = CadvisorPage
_NANOSECONDS = 1e9
_MICROSECONDS = 1e6


def _filesystem(name: str, text: str, value: Callable[[FilesystemUsage], float]) -> Family[Page]:
    """Return a family of the mounted file systems."""

    def lines(name: str, page: Page) -> Iterator[str]:
        for disk in page.filesystems:
            yield _device_line(name, disk, value(disk.filesystem))

    return multiple(name, "gauge", text, lines)


def _disk(
    name: str,
    text: str,
    *,
    disk: Value | None = None,
    cgroup: Callable[[DeviceIo], float | None] | None = None,
    kind: Kind = "counter",
) -> Family[Page]:
    """Return a family of block devices: counters of the host's disks (`disk`) and of cgroups (`cgroup`).

    Where a cgroup with file systems has a counter of its own for a device, that is the one reported.
    """

    def lines(name: str, page: Page) -> Iterator[str]:
        counted: dict[str, set[str]] = {row.texts.target.path: set() for row in page.disks}
        if cgroup is not None:
            for row in page.detailed:
                seen = counted.get(row.texts.target.path)
                yield from _cgroup_lines(name, page, row, cgroup, set() if seen is None else seen)
        if disk is not None:
            for of_disk in page.disks:
                if of_disk.device not in counted[of_disk.texts.target.path]:
                    yield _device_line(name, of_disk, disk(of_disk.filesystem.io))

    return multiple(name, kind, text, lines)


def _cgroup_lines(
    name: str, page: Page, row: CgroupRow, read: Callable[[DeviceIo], float | None], seen: set[str]
) -> Iterator[str]:
    """Yield the lines of a cgroup's devices; of devices with equal names (unknown ones) only the first."""
    for io in _devices(row):
        device = page.device_names[io.major, io.minor]
        if device in seen or (value := read(io)) is None:
            continue
        seen.add(device)
        labels = f'{row.texts.container},device="{device}"{row.texts.tail}'
        yield f"{name}{labels}}} {value}{row.details_stamp}\n"


def _devices(row: CgroupRow) -> tuple[DeviceIo, ...]:
    return row.details.io if row.details is not None else ()


def _device_line(name: str, row: DiskRow, value: float) -> str:
    labels = f'{row.texts.container},device="{row.device}"{row.texts.tail}'
    return f"{name}{labels}}} {value}{row.stamp}\n"


def _operation(table: str, operation: str) -> Callable[[DeviceIo], float | None]:
    counters = attrgetter(table)

    def value(io: DeviceIo) -> float | None:
        by_operation: dict[str, int] = counters(io)
        return by_operation.get(operation, 0) if by_operation else None

    return value


def _cost(counter: str, text: str) -> Family[Page]:
    """Return a family of the I/O cost model; the kernel may have only some of its counters."""

    def seconds(io: DeviceIo) -> float | None:
        microseconds = io.cost.get(counter)
        return None if microseconds is None else microseconds / _MICROSECONDS

    return _disk(f"container_fs_io_cost_{counter}_seconds_total", text, cgroup=seconds)


def _milliseconds(counter: str) -> Value:
    # cAdvisor divides milliseconds by the nanoseconds of a second; dashboards expect its values.
    milliseconds = attrgetter(counter)
    return lambda io: milliseconds(io) / _NANOSECONDS


def _block_io(name: str, page: Page) -> Iterator[str]:
    for row in page.detailed:
        texts = row.texts
        for io in _devices(row):
            start = (
                f'{name}{texts.container},device="{page.device_names[io.major, io.minor]}"{texts.id_image}'
                f',major="{io.major}",minor="{io.minor}"{texts.name_namespace},operation='
            )
            for operation, value in sorted(io.bytes.items()):
                yield f'{start}"{escape_label(operation)}"{texts.pod}}} {value}{row.details_stamp}\n'


def _network(direction: str, counter: str, text: str, value: str) -> Family[Page]:
    read: Callable[[NetworkInterface], int] = attrgetter(value)

    def lines(name: str, page: Page) -> Iterator[str]:
        for texts, interfaces, stamp in page.network:
            start = f"{name}{texts.container}{texts.id_image},interface="
            end = f"{texts.name_namespace}{texts.pod}}} "
            for interface in interfaces:
                yield f'{start}"{escape_label(interface.name)}"{end}{read(interface)}{stamp}\n'

    return multiple(f"container_network_{direction}_{counter}_total", "counter", text, lines)


def _machine(name: str, text: str, value: Callable[[MachineFacts], int]) -> Family[Page]:
    def lines(name: str, page: Page) -> Iterator[str]:
        yield f"{name}{_machine_labels(page.machine)}}} {value(page.machine)}\n"

    return multiple(name, "gauge", text, lines)


def _nvm_capacity(name: str, page: Page) -> Iterator[str]:
    machine = page.machine
    ids = f'{{boot_id="{escape_label(machine.boot_id)}",machine_id="{escape_label(machine.machine_id)}"'
    end = f',system_uuid="{escape_label(machine.system_uuid)}"}}'
    yield f'{name}{ids},mode="app_direct_mode"{end} {machine.nvm_app_direct_mode}\n'
    yield f'{name}{ids},mode="memory_mode"{end} {machine.nvm_memory_mode}\n'


def _modules(name: str, text: str, value: Callable[[MemoryModules], int]) -> Family[Page]:
    def lines(name: str, page: Page) -> Iterator[str]:
        for modules in page.machine.modules:
            kind = escape_label(modules.type)
            yield f'{name}{_machine_labels(page.machine)},type="{kind}"}} {value(modules)}\n'

    return multiple(name, "gauge", text, lines)


def _machine_labels(machine: MachineFacts) -> str:
    return (
        f'{{boot_id="{escape_label(machine.boot_id)}",machine_id="{escape_label(machine.machine_id)}"'
        f',system_uuid="{escape_label(machine.system_uuid)}"'
    )


def _version(name: str, page: Page) -> Iterator[str]:
    kernel, system = escape_label(page.machine.kernel_version), escape_label(page.machine.os_version)
    empty = 'cadvisorRevision="",cadvisorVersion="",dockerVersion=""'
    yield f'{name}{{{empty},kernelVersion="{kernel}",osVersion="{system}"}} 1\n'


_FILESYSTEMS = (
    _filesystem("container_fs_inodes_free", "Free inodes.", lambda usage: usage.inodes_free or 0),
    _filesystem("container_fs_inodes_total", "Inodes.", lambda usage: usage.inodes or 0),
    _filesystem("container_fs_limit_bytes", "Capacity of the file system in bytes.", attrgetter("capacity")),
    _filesystem("container_fs_usage_bytes", "Usage of the file system in bytes.", attrgetter("used")),
    _disk("container_fs_reads_bytes_total", "Bytes read.", cgroup=_operation("bytes", "Read")),
    _disk("container_fs_writes_bytes_total", "Bytes written.", cgroup=_operation("bytes", "Write")),
    _disk(
        "container_fs_reads_total",
        "Completed reads.",
        disk=attrgetter("reads"),
        cgroup=_operation("operations", "Read"),
    ),
    _disk(
        "container_fs_writes_total",
        "Completed writes.",
        disk=attrgetter("writes"),
        cgroup=_operation("operations", "Write"),
    ),
    _disk("container_fs_reads_merged_total", "Merged reads.", disk=attrgetter("reads_merged")),
    _disk("container_fs_writes_merged_total", "Merged writes.", disk=attrgetter("writes_merged")),
    _disk("container_fs_sector_reads_total", "Sectors read.", disk=attrgetter("sectors_read")),
    _disk("container_fs_sector_writes_total", "Sectors written.", disk=attrgetter("sectors_written")),
    _disk("container_fs_read_seconds_total", "Time of reads.", disk=_milliseconds("read_ms")),
    _disk("container_fs_write_seconds_total", "Time of writes.", disk=_milliseconds("write_ms")),
    _disk("container_fs_io_current", "I/O in progress.", disk=attrgetter("in_progress"), kind="gauge"),
    _disk("container_fs_io_time_seconds_total", "Time with I/O in progress.", disk=_milliseconds("io_ms")),
    _disk(
        "container_fs_io_time_weighted_seconds_total",
        "Time with I/O in progress, weighted by its number.",
        disk=_milliseconds("weighted_io_ms"),
    ),
    _cost("usage", "I/O cost of completed requests in seconds."),
    _cost("wait", "Time for which requests waited because of their I/O cost."),
    _cost("indebt", "Time in debt of I/O cost."),
    _cost("indelay", "Time for which processes were delayed because of debt of I/O cost."),
    multiple("container_blkio_device_usage_total", "counter", "Bytes by device and operation.", _block_io),
)
_NETWORK = (
    _network("receive", "bytes", "Bytes received.", "rx_bytes"),
    _network("receive", "errors", "Receive errors.", "rx_errors"),
    _network("receive", "packets", "Packets received.", "rx_packets"),
    _network("receive", "packets_dropped", "Received packets dropped.", "rx_dropped"),
    _network("transmit", "bytes", "Bytes sent.", "tx_bytes"),
    _network("transmit", "errors", "Transmit errors.", "tx_errors"),
    _network("transmit", "packets", "Packets sent.", "tx_packets"),
    _network("transmit", "packets_dropped", "Packets dropped before sending.", "tx_dropped"),
)
_MACHINE: tuple[Family[Page], ...] = (
    multiple("cadvisor_version_info", "gauge", "Kernel and operating system, always 1.", _version),
    constant(
        "container_scrape_error", "1 if statistics could not be read.", lambda page: int(page.has_error)
    ),
    constant("machine_scrape_error", "1 if machine facts could not be read.", lambda page: 0),
    _machine("machine_cpu_books", "CPU books (s390x); not read, always 0.", lambda _: 0),
    _machine("machine_cpu_cores", "Logical CPUs.", attrgetter("cores")),
    _machine("machine_cpu_drawers", "CPU drawers (s390x); not read, always 0.", lambda _: 0),
    _machine("machine_cpu_physical_cores", "Physical CPU cores.", attrgetter("physical_cores")),
    _machine("machine_cpu_sockets", "CPU sockets.", attrgetter("sockets")),
    _modules("machine_dimm_capacity_bytes", "Capacity of memory modules by type.", attrgetter("capacity")),
    _modules("machine_dimm_count", "Memory modules by type.", attrgetter("count")),
    _machine("machine_memory_bytes", "Memory of the host in bytes.", attrgetter("memory")),
    _machine("machine_nvm_avg_power_budget_watts", "NVM power budget.", attrgetter("nvm_power_budget")),
    multiple("machine_nvm_capacity", "gauge", "NVM capacity by mode.", _nvm_capacity),
    _machine("machine_swap_bytes", "Swap of the host in bytes.", attrgetter("swap")),
)

DEVICE_FAMILIES: tuple[Family[Page], ...] = (*_FILESYSTEMS, *_NETWORK, *_MACHINE)
