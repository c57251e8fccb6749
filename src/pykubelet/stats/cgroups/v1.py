"""Reader of a cgroup v1: one directory per hierarchy, of which some may be missing.

Values, and the files that they come from, are cAdvisor's. A controller that is not mounted, and a hierarchy
that does not have the cgroup, count as zeros; the cgroup is gone when a directory disappears that was read
before, or when neither processor time nor memory is found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pykubelet.stats.cgroups.files import (
    NO_LIMIT,
    SMALL,
    STAT,
    CgroupFile,
    StatParser,
)
from pykubelet.stats.cgroups.host import BaseCgroupReader, ReaderHost
from pykubelet.stats.samples import CgroupGone, Details, DeviceIo, HugePages, Limits, Usage

_TICK = 10_000_000
"""Nanoseconds of a clock tick, which user space always sees as 1/100 s."""

_CREATION_HIERARCHIES = ("cpu", "cpuacct", "memory", "pids", "blkio", "devices")
"""Hierarchies whose directories determine the creation time."""

_MEMORY = StatParser(
    "total_cache",
    "total_rss",
    "total_swap",
    "total_mapped_file",
    "pgfault",
    "pgmajfault",
    "total_active_file",
    "total_inactive_file",
)
_FLAT_MEMORY = StatParser("cache", "rss", "swap", "mapped_file")
"""Keys of a cgroup without hierarchical accounting (before Linux 5.11), instead of the first four."""
_CPU = StatParser("nr_periods", "nr_throttled", "throttled_time")
_CPU_TIMES = StatParser("user", "system")


class _IoTable(NamedTuple):
    """A file of the block cgroup and the table that it fills."""

    name: str
    table: str


def _io_tables(prefix: str, *, debug: bool) -> tuple[_IoTable, ...]:
    always = (
        _IoTable(f"{prefix}io_serviced_recursive", "operations"),
        _IoTable(f"{prefix}io_service_bytes_recursive", "bytes"),
    )
    if not debug:
        return always
    return (
        _IoTable(f"{prefix}sectors_recursive", "sectors"),
        _IoTable(f"{prefix}io_service_time_recursive", "service_time"),
        _IoTable(f"{prefix}io_merged_recursive", "merged"),
        _IoTable(f"{prefix}io_queued_recursive", "queued"),
        *always,
    )


_IO_SOURCES = (
    _io_tables("blkio.bfq.", debug=True),
    _io_tables("blkio.bfq.", debug=False),
    _io_tables("blkio.", debug=True),
    _io_tables("blkio.throttle.", debug=False),
    (
        _IoTable("blkio.throttle.io_serviced", "operations"),
        _IoTable("blkio.throttle.io_service_bytes", "bytes"),
    ),
)
"""Sources of I/O counters in the order of preference; the first whose first file has a device counts."""


def find_io_sources(blkio: Path | None) -> tuple[tuple[_IoTable, ...], ...]:
    """Return the sources of I/O counters that this kernel has, by the files of the root cgroup."""
    if blkio is None:
        return ()
    sources = [source for source in _IO_SOURCES if (blkio / source[0].name).exists()]
    # The recursive counters include those of the last source.
    if len(sources) > 1 and sources[-1] is _IO_SOURCES[-1]:
        sources.pop()
    return tuple(sources)


class CgroupV1Reader(BaseCgroupReader):
    """A reader of a cgroup v1; a file of a hierarchy that is not mounted is None."""

    def __init__(
        self,
        path: str,
        mounts: Mapping[str, Path],
        host: ReaderHost,
        io_sources: tuple[tuple[_IoTable, ...], ...],
    ) -> None:
        super().__init__(path, host)
        self._directories = {
            name: str(mount / self._path)
            for name, mount in mounts.items()
            # The root has no pids.current, and cAdvisor ignores the controller there altogether.
            if not (name == "pids" and self._is_root)
        }
        self._cpu_usage = self._file("cpuacct.usage", low_priority=False)
        self._memory_usage = self._file("memory.usage_in_bytes", low_priority=False)
        self._memory_stat = self._file("memory.stat", low_priority=False, size=STAT)
        self._use_hierarchy: bool | None = None
        self._io_sources = io_sources
        self._huge_page_files: list[tuple[str, str]] | None = None

    @property
    def procs_file(self) -> Path | None:
        """File with the processes of the cgroup; None without the CPU controller."""
        directory = self._directories.get("cpu")
        return None if directory is None else Path(directory, "cgroup.procs")

    def _file(self, name: str, *, low_priority: bool = True, size: int = SMALL) -> CgroupFile | None:
        """Return a file of the hierarchy that its name begins with, None if that is not mounted."""
        file = self._files.get(name)
        if file is None and (directory := self._directories.get(name.partition(".")[0])) is not None:
            file = CgroupFile(directory, name, self._host.budget, size=size, low_priority=low_priority)
            self._files[name] = file
        return file

    def _number(self, name: str) -> int:
        file = self._file(name)
        return (file.number() or 0) if file is not None else 0

    def _limit(self, name: str) -> int:
        file = self._file(name)
        return file.limit() if file is not None else 0

    def _stat(self, name: str, parser: StatParser) -> list[int]:
        file = self._file(name)
        data = file.read() if file is not None else None
        return parser.zeros() if file is None or data is None else parser.parse(file, data)

    def _exists(self, controller: str) -> bool:
        directory = self._directories.get(controller)
        return directory is not None and Path(directory).is_dir()

    def _read_usage(self) -> Usage:
        now = time.time()
        cpu = self._cpu_usage.number() if self._cpu_usage is not None else None
        memory = self._memory_usage.number() if self._memory_usage is not None else None
        if cpu is None and memory is None and not any(map(self._exists, self._directories)):
            raise CgroupGone(f"cgroup {next(iter(self._directories.values()), '')} was removed")
        cpu, memory = cpu or 0, memory or 0
        if (same := self._idle_usage(now, cpu, memory)) is not None:
            return same
        file = self._memory_stat
        if file is None or (data := file.read()) is None:
            return Usage(time=now, cpu=cpu, memory=memory, working_set=memory)
        cache, rss, swap, mapped, faults, major, active, inactive = _MEMORY.parse(file, data)
        if self._use_hierarchy is None:
            self._use_hierarchy = self._limit("memory.use_hierarchy") == 1
        if not self._use_hierarchy:
            cache, rss, swap, mapped = _FLAT_MEMORY.parse(file, data)
        return self._keep(now, cpu, memory, swap, (cache, rss, mapped, faults, major, active, inactive))

    def _read(self) -> tuple[Usage, Details]:
        return self._read_usage(), self._details()

    def _details(self) -> Details:
        user, system = self._stat("cpuacct.stat", _CPU_TIMES)
        periods, throttled_periods, throttled = self._stat("cpu.stat", _CPU)
        max_threads = self._number("pids.max")
        return Details(
            cpu_user=user * _TICK,
            cpu_system=system * _TICK,
            periods=periods,
            throttled_periods=throttled_periods,
            throttled=throttled,
            max_memory=self._number("memory.max_usage_in_bytes"),
            memory_failures=self._number("memory.failcnt"),
            kernel_memory=self._number("memory.kmem.usage_in_bytes"),
            threads=self._number("pids.current"),
            max_threads=0 if max_threads == NO_LIMIT else max_threads,
            io=self._io(),
            huge_pages=self._huge_pages(),
        )

    def _read_limits(self) -> Limits:
        directories = [self._directories[n] for n in _CREATION_HIERARCHIES if n in self._directories]
        memory, swap = self._limit("memory.limit_in_bytes"), self._limit("memory.memsw.limit_in_bytes")
        has_memory = memory > 0 or self._exists("memory")
        if self._is_root:
            memory, swap, _ = self._host.memory_and_swap()
            has_memory = True
        shares = self._limit("cpu.shares")
        return Limits(
            created=self._creation_time(directories, "cgroup.clone_children"),
            has_cpu=shares > 0 or self._exists("cpu"),
            has_memory=has_memory,
            cpu_shares=shares,
            cpu_period=self._limit("cpu.cfs_period_us"),
            # Without a quota the file contains -1, which is 0 as a limit.
            cpu_quota=self._limit("cpu.cfs_quota_us"),
            memory_limit=memory,
            memory_swap_limit=swap,
            memory_reservation=self._limit("memory.soft_limit_in_bytes"),
            max_processes=self._limit("pids.max"),
        )

    def _io(self) -> tuple[DeviceIo, ...]:
        """Return the I/O counters of the first source that has any."""
        for source in self._io_sources:
            devices: dict[tuple[int, int], dict[str, dict[str, int]]] = {}
            for name, table in source:
                self._read_io_table(name, table, devices)
                if not devices:
                    break
            if devices:
                return tuple(
                    DeviceIo(major=major, minor=minor, **tables) for (major, minor), tables in devices.items()
                )
        return ()

    def _read_io_table(
        self, name: str, table: str, devices: dict[tuple[int, int], dict[str, dict[str, int]]]
    ) -> None:
        """Add the counters of a file, whose lines are `major:minor operation number`."""
        file = self._file(name)
        data = file.read() if file is not None else None
        if data is None or data.startswith(b"Total "):
            return
        for line in data.decode(errors="replace").splitlines():
            fields = line.replace(":", " ").split()
            if len(fields) not in (3, 4):
                continue
            with suppress(ValueError):
                device, value = (int(fields[0]), int(fields[1])), int(fields[-1])
                operation = fields[2] if len(fields) == 4 else "Count"
                devices.setdefault(device, {}).setdefault(table, {})[operation] = value

    def _huge_pages(self) -> tuple[HugePages, ...]:
        directory = self._directories.get("hugetlb")
        if directory is None:
            return ()
        if self._huge_page_files is None:
            # Reserved pages are what the limits of containers apply to, where the kernel counts them.
            prefixes = [
                next((p for p in (f"hugetlb.{size}.rsvd", f"hugetlb.{size}") if _has(directory, p)), "")
                for size in self._host.huge_page_sizes
            ]
            found = zip(self._host.huge_page_sizes, prefixes, strict=True)
            self._huge_page_files = [(size, prefix) for size, prefix in found if prefix]
        return tuple(
            HugePages(
                size=size,
                usage=self._number(f"{prefix}.usage_in_bytes"),
                max_usage=self._number(f"{prefix}.max_usage_in_bytes"),
                failures=self._number(f"{prefix}.failcnt"),
            )
            for size, prefix in self._huge_page_files
        )


def _has(directory: str, prefix: str) -> bool:
    return Path(directory, f"{prefix}.usage_in_bytes").exists()
