"""Samples of one cgroup as cAdvisor's JSON documents: the parts that its v1 and v2 types share.

Field names and units are those of cAdvisor's `info/v1` and `info/v2`. What the kubelet does not measure is
omitted: a client written in Go reads it as zero. Nothing here reads the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from pykubelet.stats.samples import (
    Details,
    DeviceIo,
    FilesystemUsage,
    MachineFacts,
    NetworkInterface,
    Psi,
    PsiLine,
    Record,
    Usage,
)

Document = dict[str, Any]
_NANOSECONDS_PER_MILLISECOND = 1_000_000
_IO_TABLES: tuple[tuple[str, Callable[[DeviceIo], dict[str, int]]], ...] = (
    ("io_service_bytes", attrgetter("bytes")),
    ("io_serviced", attrgetter("operations")),
    ("io_queued", attrgetter("queued")),
    ("sectors", attrgetter("sectors")),
    ("io_service_time", attrgetter("service_time")),
    ("io_merged", attrgetter("merged")),
)
_IO_COSTS = ("usage", "wait", "indebt", "indelay")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about the host that documents of cgroups refer to."""

    machine: MachineFacts
    filesystems: Sequence[FilesystemUsage]
    device_name: Callable[[int, int], str]
    has_pressure: bool


def timestamp(seconds: float) -> str | None:
    """Return seconds since the epoch in RFC 3339; None if the format cannot express them."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def known(document: Document) -> Document:
    """Return the document without the values that are None."""
    return {name: value for name, value in document.items() if value is not None}


def cpu(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return CpuStats."""
    times: Document = {"total": usage.cpu}
    document: Document = {"usage": times}
    if (load := record.load) is not None:
        document["load_average"] = int(load.running * 1000)
        document["load_d_average"] = int(load.uninterruptible * 1000)
    if (details := record.details) is not None:
        times.update(user=details.cpu_user, system=details.cpu_system)
        document["cfs"] = {
            "periods": details.periods,
            "throttled_periods": details.throttled_periods,
            "throttled_time": details.throttled,
            "bursts_periods": details.burst_periods,
            "burst_time": details.burst,
        }
    return document | _pressure(usage.cpu_psi, host)


def cpu_rate(record: Record) -> Document | None:
    """Return CpuInstStats, nanoseconds of processor time per second; None before the second sample."""
    return None if record.nano_cores is None else {"usage": {"total": record.nano_cores}}


def memory(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return MemoryStats."""
    faults = {"pgfault": usage.page_faults, "pgmajfault": usage.major_page_faults}
    document: Document = {
        "usage": usage.memory,
        "cache": usage.cache,
        "rss": usage.rss,
        "swap": usage.swap,
        "mapped_file": usage.mapped_file,
        "working_set": usage.working_set,
        "total_active_file": usage.active_file,
        "total_inactive_file": usage.inactive_file,
        "container_data": faults,
        "hierarchical_data": faults,
    }
    if (details := record.details) is not None:
        document |= {
            "max_usage": details.max_memory,
            "failcnt": details.memory_failures,
            "kernel": details.kernel_memory,
        }
    return document | _pressure(usage.memory_psi, host)


def disk_io(record: Record, usage: Usage, host: HostFacts) -> Document | None:
    """Return DiskIoStats; None unless the cgroup has caused I/O."""
    if record.details is None or not record.details.io:
        return None
    devices = record.details.io
    document: Document = {}
    for name, table in _IO_TABLES:
        document[name] = [_device(io, table(io), host) for io in devices if table(io)]
    for counter in _IO_COSTS:
        document[f"io_cost_{counter}"] = [
            _device(io, {"Count": io.cost[counter]}, host) for io in devices if counter in io.cost
        ]
    return {name: rows for name, rows in document.items() if rows} | _pressure(usage.io_psi, host)


def _device(io: DeviceIo, stats: dict[str, int], host: HostFacts) -> Document:
    name = host.device_name(io.major, io.minor)
    return {"device": name, "major": io.major, "minor": io.minor, "stats": stats}


def huge_pages(details: Details | None) -> Document | None:
    """Return HugetlbStats by page size; None where the kernel reports none."""
    if details is None or not details.huge_pages:
        return None
    return {
        pages.size: {"usage": pages.usage, "max_usage": pages.max_usage, "failcnt": pages.failures}
        for pages in details.huge_pages
    }


def processes(record: Record) -> Document | None:
    """Return ProcessStats; None before details were read."""
    if (details := record.details) is None:
        return None
    document: Document = {
        "process_count": details.processes,
        "fd_count": details.file_descriptors,
        "socket_count": details.sockets,
        "threads_current": details.threads,
        "threads_max": details.max_threads,
    }
    if details.max_open_files is not None:
        document["ulimits"] = [{"name": "max_open_files", "soft_limit": details.max_open_files}]
    return document


def interfaces(network: Sequence[NetworkInterface]) -> list[Document]:
    """Return InterfaceStats of each interface."""
    return [
        {
            "name": interface.name,
            "rx_bytes": interface.rx_bytes,
            "rx_packets": interface.rx_packets,
            "rx_errors": interface.rx_errors,
            "rx_dropped": interface.rx_dropped,
            "tx_bytes": interface.tx_bytes,
            "tx_packets": interface.tx_packets,
            "tx_errors": interface.tx_errors,
            "tx_dropped": interface.tx_dropped,
        }
        for interface in network
    ]


def filesystem_sizes(usage: FilesystemUsage) -> Document:
    """Return FsStats of a file system of the host."""
    io = usage.io
    return {
        "device": usage.device,
        "type": "vfs",  # cAdvisor's name for statvfs(2)
        "capacity": usage.capacity,
        "usage": usage.used,
        "available": usage.available,
        "has_inodes": usage.inodes is not None,
        **known({"inodes": usage.inodes, "inodes_free": usage.inodes_free}),
        "reads_completed": io.reads,
        "reads_merged": io.reads_merged,
        "sectors_read": io.sectors_read,
        "read_time": io.read_ms,
        "writes_completed": io.writes,
        "writes_merged": io.writes_merged,
        "sectors_written": io.sectors_written,
        "write_time": io.write_ms,
        "io_in_progress": io.in_progress,
        "io_time": io.io_ms,
        "weighted_io_time": io.weighted_io_ms,
    }


def machine_filesystem(usage: FilesystemUsage) -> Document:
    """Return MachineFsStats, whose counters cAdvisor nests below `inline`; durations are nanoseconds."""
    io, to_nanoseconds = usage.io, _NANOSECONDS_PER_MILLISECOND
    return {
        "device": usage.device,
        "type": "vfs",
        "capacity": usage.capacity,
        "usage": usage.used,
        "available": usage.available,
        **known({"inodes_free": usage.inodes_free}),
        "inline": {
            "reads_completed": io.reads,
            "reads_merged": io.reads_merged,
            "sectors_read": io.sectors_read,
            "read_duration": io.read_ms * to_nanoseconds,
            "writes_completed": io.writes,
            "writes_merged": io.writes_merged,
            "sectors_written": io.sectors_written,
            "write_duration": io.write_ms * to_nanoseconds,
            "io_in_progress": io.in_progress,
            "io_duration": io.io_ms * to_nanoseconds,
            "weighted_io_duration": io.weighted_io_ms * to_nanoseconds,
        },
    }


def storage_entry(usage: FilesystemUsage) -> Document:
    """Return FsInfo, for `/api/v2.0/storage`."""
    return {
        **known({"timestamp": timestamp(usage.time)}),
        "device": usage.device,
        "mountpoint": usage.mount_point,
        "capacity": usage.capacity,
        "available": usage.available,
        "usage": usage.used,
        "labels": ["root"] if usage.mount_point == "/" else [],
        **known({"inodes": usage.inodes, "inodes_free": usage.inodes_free}),
    }


def _pressure(psi: Psi, host: HostFacts) -> Document:
    if not host.has_pressure:
        return {}
    return {"psi": {"full": _pressure_line(psi.full), "some": _pressure_line(psi.some)}}


def _pressure_line(line: PsiLine) -> Document:
    return {"total": line.total, "avg10": line.avg10, "avg60": line.avg60, "avg300": line.avg300}
