"""Reader of a cgroup v2: one directory, whose files depend on the controllers that are enabled for it.

Values, and the files that they come from, are cAdvisor's. The root cgroup has neither memory.current nor
pids.current: its memory is computed from memory.stat, its swap is that of /proc/meminfo, and its threads are
the processes in it. cAdvisor has no memory failures and no kernel memory on v2.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from pykubelet.stats.cgroups.files import (
    NO_LIMIT,
    SMALL,
    STAT,
    CgroupFile,
    StatParser,
    to_limit,
)
from pykubelet.stats.cgroups.host import BaseCgroupReader, ReaderHost
from pykubelet.stats.processes import read_pids
from pykubelet.stats.samples import (
    NO_PSI,
    Details,
    DeviceIo,
    HugePages,
    Limits,
    Psi,
    PsiLine,
    Usage,
)

_CPU = StatParser(
    "usage_usec",
    "user_usec",
    "system_usec",
    "nr_periods",
    "nr_throttled",
    "throttled_usec",
    "nr_bursts",
    "burst_usec",
)
_MEMORY = StatParser("file", "anon", "file_mapped", "pgfault", "pgmajfault", "active_file", "inactive_file")
_EVENTS = StatParser("max", "")
"""hugetlb.<size>.events; the second key never exists (a single one would not yield a list)."""

_IO_ITEMS = {
    "rbytes": ("bytes", "Read"),
    "wbytes": ("bytes", "Write"),
    "rios": ("operations", "Read"),
    "wios": ("operations", "Write"),
    "cost.usage": ("cost", "usage"),
    "cost.wait": ("cost", "wait"),
    "cost.indebt": ("cost", "indebt"),
    "cost.indelay": ("cost", "indelay"),
}
"""Table and operation by name in io.stat."""


class CgroupV2Reader(BaseCgroupReader):
    """A reader of a cgroup v2."""

    def __init__(self, path: str, root: Path, host: ReaderHost) -> None:
        super().__init__(path, host)
        self._directory = str(root / self._path)
        self._cpu_stat = self._file("cpu.stat", usage=True, size=STAT)
        self._memory_stat = self._file("memory.stat", usage=True, size=STAT)
        self._memory_current = self._file("memory.current", usage=True)
        self._swap_current = self._file("memory.swap.current", usage=True)
        self._pressure = [PressureFile(self._file(f"{name}.pressure", usage=True)) for name in _PRESSURE]
        self._memory_peak = self._file("memory.peak")
        self._pids_current = self._file("pids.current")
        self._pids_max = self._file("pids.max")
        self._io_stat = self._file("io.stat")
        self._cpu_weight = self._file("cpu.weight")
        self._cpu_max = self._file("cpu.max")
        self._memory_max = self._file("memory.max")
        self._memory_min = self._file("memory.min")
        self._swap_max = self._file("memory.swap.max")
        self._huge_files: list[tuple[str, CgroupFile, CgroupFile]] | None = None

    @property
    def procs_file(self) -> Path:
        """File with the processes of the cgroup."""
        return Path(self._directory, "cgroup.procs")

    def _file(self, name: str, *, usage: bool = False, size: int = SMALL) -> CgroupFile:
        file = CgroupFile(
            self._directory, name, self._host.budget, size=size, low_priority=not usage, required=True
        )
        self._files[name] = file
        return file

    def _read_cpu(self) -> list[int]:
        data = self._cpu_stat.read()
        return _CPU.zeros() if data is None else _CPU.parse(self._cpu_stat, data)

    def _read_usage(self) -> Usage:
        return self._usage(self._read_cpu())

    def _read(self) -> tuple[Usage, Details]:
        cpu = self._read_cpu()
        return self._usage(cpu), self._details(cpu)

    def _usage(self, cpu: list[int]) -> Usage:
        now, memory = time.time(), 0
        pressure = [file.read() for file in self._pressure]
        if not self._is_root:
            memory = self._memory_current.number() or 0
            if (same := self._idle_usage(now, cpu[0] * 1000, memory)) is not None:
                return with_pressure(same, *pressure)
        data = self._memory_stat.read()
        values = _MEMORY.zeros() if data is None else _MEMORY.parse(self._memory_stat, data)
        if self._is_root:
            cache, rss, *_ = values
            memory = rss + cache
            _, _, swap = self._host.memory_and_swap()
        else:
            swap = self._swap_current.number() or 0
        usage = self._keep(now, cpu[0] * 1000, memory, swap, values)
        return with_pressure(usage, *pressure)

    def _details(self, cpu: list[int]) -> Details:
        _, user, system, periods, throttled_periods, throttled, burst_periods, burst = cpu
        threads = self._pids_current.number()
        max_threads = 0
        if threads is None:
            threads = len(read_pids(self.procs_file))
        else:
            max_threads = self._pids_max.number() or 0
        return Details(
            cpu_user=user * 1000,
            cpu_system=system * 1000,
            periods=periods,
            throttled_periods=throttled_periods,
            throttled=throttled * 1000,
            burst_periods=burst_periods,
            burst=burst * 1000,
            max_memory=0 if self._is_root else self._memory_peak.number() or 0,
            threads=threads,
            max_threads=0 if max_threads == NO_LIMIT else max_threads,
            io=self._io(),
            huge_pages=self._huge_pages(),
        )

    def _refresh(self, details: Details) -> Details:
        # The kernel writes dirty pages to the disk without a process of the cgroup.
        return msgspec.structs.replace(details, io=self._io())

    def _read_limits(self) -> Limits:
        quota, _, period = (self._cpu_max.read() or b"").decode(errors="replace").strip().partition(" ")
        if self._is_root:
            memory, swap, _ = self._host.memory_and_swap()
        else:
            memory, swap = self._memory_max.limit(), self._swap_max.limit()
        return Limits(
            created=self._creation_time([self._directory], "cgroup.events"),
            has_memory=memory > 0 or self._memory_max.read() is not None,
            cpu_shares=_weight_to_shares(self._cpu_weight.limit()),
            cpu_period=to_limit(period),
            cpu_quota=0 if quota == "max" or not period else to_limit(quota),
            memory_limit=memory,
            memory_swap_limit=swap,
            memory_reservation=self._memory_min.limit(),
            max_processes=self._pids_max.limit(),
        )

    def _io(self) -> tuple[DeviceIo, ...]:
        data = self._io_stat.read()
        if not data:
            return ()
        found = []
        for line in data.decode(errors="replace").splitlines():
            tables: dict[str, dict[str, int]] = {}
            with suppress(ValueError):
                device, *items = line.split()
                major, minor = map(int, device.split(":"))
                for item in items:
                    name, _, value = item.partition("=")
                    if name in _IO_ITEMS:
                        table, operation = _IO_ITEMS[name]
                        tables.setdefault(table, {})[operation] = int(value)
                if tables:
                    found.append(DeviceIo(major=major, minor=minor, **tables))
        return tuple(found)

    def _huge_pages(self) -> tuple[HugePages, ...]:
        if self._huge_files is None:
            self._huge_files = list(filter(None, map(self._open_huge_pages, self._host.huge_page_sizes)))
        found = []
        for size, current, events in self._huge_files:
            data = events.read()
            failures = 0 if data is None else _EVENTS.parse(events, data)[0]
            found.append(HugePages(size=size, usage=current.number() or 0, max_usage=0, failures=failures))
        return tuple(found)

    def _open_huge_pages(self, size: str) -> tuple[str, CgroupFile, CgroupFile] | None:
        # Reserved pages are what the limits of containers apply to, where the kernel counts them.
        for prefix in (f"hugetlb.{size}.rsvd", f"hugetlb.{size}"):
            if Path(self._directory, f"{prefix}.current").exists():
                return size, self._file(f"{prefix}.current"), self._file(f"hugetlb.{size}.events")
        return None


_PRESSURE = ("cpu", "memory", "io")


class PressureFile:
    """A file with pressure stall information; the content of an idle cgroup is parsed only once."""

    __slots__ = ("_data", "_file", "_psi")

    def __init__(self, file: CgroupFile) -> None:
        self._file = file
        self._data = b""
        self._psi = NO_PSI

    def read(self) -> Psi:
        """Return the pressure, zeros if the kernel does not measure it. Raises CgroupGone and CgroupError."""
        data = self._file.read()
        if not data:
            return NO_PSI
        if data != self._data:
            try:
                self._psi = parse_psi(data)
            except ValueError:
                raise self._file.invalid(data) from None
            self._data = data
        return self._psi


def with_pressure(usage: Usage, cpu: Psi, memory: Psi, io: Psi) -> Usage:
    """Return the usage with pressure stall information; the same one if there is none."""
    if cpu is NO_PSI and memory is NO_PSI and io is NO_PSI:
        return usage
    return msgspec.structs.replace(usage, cpu_psi=cpu, memory_psi=memory, io_psi=io)


def parse_psi(data: bytes) -> Psi:
    """Parse a pressure file: lines `some avg10=0.00 avg60=0.00 avg300=0.00 total=0` and `full …`.

    Raises ValueError if a value is not a number.
    """
    lines = {}
    for line in data.decode(errors="replace").splitlines():
        kind, *items = line.split()
        values = dict(item.split("=", 1) for item in items)
        lines[kind] = PsiLine(
            avg10=float(values.get("avg10", 0)),
            avg60=float(values.get("avg60", 0)),
            avg300=float(values.get("avg300", 0)),
            total=int(values.get("total", 0)),
        )
    return Psi(some=lines.get("some", PsiLine()), full=lines.get("full", PsiLine()))


def _weight_to_shares(weight: int) -> int:
    """Convert cpu.weight (1 to 10000) to CPU shares (2 to 262144) as cAdvisor does; 0 if it is invalid."""
    return 2 + (weight - 1) * 262142 // 9999 if 1 <= weight <= 10000 else 0
