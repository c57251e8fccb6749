"""Cgroup driver: creates, sets, reads and removes cgroups, through cgroupfs alone or systemd and cgroupfs.

The node must use the same driver as the runtime (`cgroupDriver`; containerd: `SystemdCgroup`): two managers
of one tree revert each other's changes.

`CgroupFiles` uses the kernel's files. On v1 a cgroup is a directory in each mounted hierarchy; on v2 it is
one directory, and a controller is active in it only if every ancestor enables it (`cgroup.subtree_control`).
All operations are idempotent: an existing cgroup is kept and set again, so that a kubelet killed between
creating and setting leaves no pod without limits. A few small writes are faster than a thread, so only
killing and removal are asynchronous.

`SystemdSlices` has one slice unit per level, with the settings as properties. systemd must know every cgroup
that is to last, and every limit that it has a property for: later it resets each to the value it knows. So a
slice is started before its directory is used, and its properties are set before the files, which also carry
the settings without a property. The properties are those that container runtimes set on the same slices.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, Histogram

from pykubelet.cm.cgroups.values import (
    CgroupName,
    CgroupValues,
    Write,
    driver_path,
    parse_path,
    parse_systemd_path,
    shares_of_weight,
    systemd_path,
    v1_writes,
    v2_writes,
    weight_of_shares,
)
from pykubelet.linux import systemd
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups, kill_members, members, remove
from pykubelet.linux.dbus import Variant
from pykubelet.linux.systemd import INFINITY, Property, Systemd, SystemdError
from pykubelet.logs import get_logger
from pykubelet.util.metrics import SECONDS

log = get_logger(__name__)
REMOVE_SECONDS = 5.0
"""Seconds to wait for killed processes of a cgroup to exit."""
_NEEDED_V1 = frozenset({"cpu", "cpuacct", "cpuset", "memory", "hugetlb", "pids", "name=systemd"})
_NEEDED_V2 = frozenset({"cpu", "cpuset", "memory", "hugetlb", "pids"})
_V1_UNBOUNDED = 2**62
"""Lower bound of the value that v1 reports without a limit; the exact value depends on the page size."""


class CgroupWriteError(OSError):
    """Raised when a cgroup cannot be created, set or removed; the text is one line with the cause."""

    def __str__(self) -> str:
        return str(self.strerror)


class CgroupFiles:
    """Cgroups of the host by name, through the cgroup file system."""

    def __init__(self, cgroups: Cgroups, driver: str = "cgroupfs") -> None:
        self._cgroups = cgroups
        self._unified = cgroups.unified
        self._driver = driver
        self._points = [cgroups.root] if self._unified else list(dict.fromkeys(cgroups.mounts.values()))
        # Used in every pod sync, hence strings instead of paths.
        self._needed = {str(point) for name, point in cgroups.mounts.items() if name in _NEEDED_V1}
        # systemd's own hierarchy holds no limits, but a runtime may have put processes there.
        self._extra_mounts = [cgroups.root / "unified"] if cgroups.mode is CgroupMode.HYBRID else []
        self._first = next((str(point) for point in (*self._points, *self._extra_mounts)), "")

    def exists(self, name: CgroupName) -> bool:
        """Return whether the cgroup exists with all required controllers."""
        if self._unified:
            return not self._missing_controllers(*self._directories(name, self._points))
        below = self._path(name)
        return all(os.access(point + below, os.F_OK) for point in self._needed)

    def make(self, name: CgroupName, values: CgroupValues) -> None:
        """Create a cgroup and its ancestors, and set it. Raises CgroupWriteError."""
        try:
            self._make(name)
        except OSError as err:
            raise CgroupWriteError(err.errno, f"cannot make cgroup {self._path(name)}: {err}") from err
        self.write(name, values)

    def check(self, name: CgroupName, values: CgroupValues) -> None:
        """Raise CgroupWriteError (EBUSY) if more memory is in use than the new limit.

        v1 rejects such a limit itself. v2 accepts it and kills processes until the limit is met, which must
        not happen when the limit of all pods is lowered.
        """
        if (
            not self._unified
            or not values.memory
            or values.memory < 0
            or "memory" not in self._cgroups.mounts
        ):
            return
        directory = self._cgroups.path("memory", self._path(name))
        if (used := _unreclaimable_memory(directory)) > values.memory:
            raise CgroupWriteError(
                errno.EBUSY, f"cannot set {directory}/memory.max to {values.memory}: {used} bytes are in use"
            )

    def write(self, name: CgroupName, values: CgroupValues) -> None:
        """Set an existing cgroup. Raises CgroupWriteError with the file that rejected its value.

        Limits of controllers that the host does not have are skipped.
        """
        self.check(name, values)
        path = self._path(name)
        for write in v2_writes(values) if self._unified else v1_writes(values):
            if write.controller in self._cgroups.mounts:
                _set(self._cgroups.path(write.controller, path) / write.file, write)

    def read(self, name: CgroupName) -> CgroupValues:
        """Return the CPU and memory settings of a cgroup. Raises OSError.

        Unlimited is None, except the quota of v1, which is -1.
        """

        def fields(controller: str, file: str) -> list[str]:
            return (self._cgroups.path(controller, self._path(name)) / file).read_text().split()

        if not self._unified:
            (quota,), (period,) = fields("cpu", "cpu.cfs_quota_us"), fields("cpu", "cpu.cfs_period_us")
            (shares,), (memory,) = fields("cpu", "cpu.shares"), fields("memory", "memory.limit_in_bytes")
            return CgroupValues(
                shares=int(shares),
                quota=int(quota),
                period=int(period),
                memory=int(memory) if int(memory) < _V1_UNBOUNDED else None,
            )
        (quota, period), (weight,) = fields("cpu", "cpu.max"), fields("cpu", "cpu.weight")
        (memory,) = fields("memory", "memory.max")
        return CgroupValues(
            shares=shares_of_weight(int(weight)),
            quota=None if quota == "max" else int(quota),
            period=int(period),
            memory=None if memory == "max" else int(memory),
        )

    def memory_usage(self, name: CgroupName) -> int:
        """Return the memory usage in bytes. Raises OSError."""
        file = "memory.current" if self._unified else "memory.usage_in_bytes"
        return int((self._cgroups.path("memory", self._path(name)) / file).read_text())

    def child_count(self, name: CgroupName) -> int:
        """Return the number of links of a cgroup's directory in the first hierarchy; 0 if it does not exist.

        The kernel counts a link for each child, so a change shows that children were created or removed. A
        pod has a cgroup in every hierarchy; one that an interruption has left in others only is not counted.
        """
        try:
            return os.stat(self._first + self._path(name)).st_nlink  # noqa: PTH116 - called every two seconds
        except OSError:
            return 0

    def children(self, name: CgroupName) -> set[str]:
        """Return the names of the child directories of a cgroup in any hierarchy."""
        found: set[str] = set()
        for directory in self._directories(name, (*self._points, *self._extra_mounts)):
            try:
                with os.scandir(directory) as entries:
                    found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                continue
        return found

    async def remove(self, name: CgroupName, seconds: float = REMOVE_SECONDS) -> None:
        """Remove a cgroup with everything below it, killing processes inside.

        Raises CgroupWriteError when it still exists after `seconds`.
        """
        directories = self._directories(name, (*self._points, *self._extra_mounts))
        busy = [directory for directory in directories if not _rmdir(directory)]
        if not busy:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        await self._kill(name, busy, seconds)
        for directory in busy:
            if not await remove(directory, timeout=max(0.0, deadline - loop.time())):
                pids = await asyncio.to_thread(members, directory)
                inside = ", ".join(map(str, sorted(pids))) or "none"
                raise CgroupWriteError(
                    errno.EBUSY, f"cgroup {directory} does not go away; processes in it: {inside}"
                )

    async def kill(self, name: CgroupName, seconds: float = REMOVE_SECONDS) -> None:
        """Kill the processes in a cgroup and below it; those still alive after `seconds` are left."""
        directories = self._directories(name, (*self._points, *self._extra_mounts))
        await self._kill(name, [directory for directory in directories if directory.is_dir()], seconds)

    async def _kill(self, name: CgroupName, directories: Iterable[Path], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        # In a thread: a privileged container may have created any number of cgroups below its own.
        if left := await asyncio.to_thread(lambda: set[int]().union(*map(members, directories))):
            log.info("Killing processes left in cgroup", cgroup=self._path(name), pids=len(left))
        for directory in directories:
            await kill_members(directory, timeout=max(0.0, deadline - loop.time()))

    def _path(self, name: CgroupName) -> str:
        try:
            return driver_path(name, self._driver)
        except ValueError as err:
            raise CgroupWriteError(errno.EINVAL, str(err)) from err

    def _directories(self, name: CgroupName, points: Iterable[Path]) -> list[Path]:
        below = self._path(name).lstrip("/")
        return [point / below for point in points]

    def _make(self, name: CgroupName) -> None:
        if not name:
            return
        directories = self._directories(name, self._points)
        for directory in directories:
            try:
                _mkdir(directory)
            except FileExistsError:
                continue
            except FileNotFoundError:
                self._make(name[:-1])
                _mkdir(directory)
        if not self._unified:
            if "cpuset" in self._cgroups.mounts:
                _inherit_cpuset(self._cgroups.path("cpuset", self._path(name)))
        elif self._missing_controllers(directories[0]):
            self._enable_controllers(name)

    def _enable_controllers(self, name: CgroupName) -> None:
        """Enable the controllers of a v2 cgroup in every ancestor."""
        for depth in range(len(name)):
            (ancestor,) = self._directories(name[:depth], self._points)
            _enable(ancestor / "cgroup.subtree_control", sorted(self._cgroups.controllers))
        if missing := self._missing_controllers(*self._directories(name, self._points)):
            raise OSError(
                errno.EOPNOTSUPP,
                f"the controllers {', '.join(sorted(missing))} are not handed down to it: "
                "set cgroupRoot to a cgroup that has them and holds no processes itself",
            )

    def _missing_controllers(self, directory: Path) -> set[str]:
        """Return the controllers that are not active in a v2 cgroup; all of them if it does not exist."""
        required = set(_NEEDED_V2 & self._cgroups.controllers)
        try:
            return required - set((directory / "cgroup.controllers").read_text().split())
        except FileNotFoundError:
            return required


def _enable(file: Path, controllers: Iterable[str]) -> None:
    enabled = file.read_text().split()
    missing = [name for name in controllers if name not in enabled]
    if not missing:
        return
    try:
        _put(file, " ".join(f"+{name}" for name in missing))
    except OSError:
        # A controller that cannot be enabled (cpu, with realtime processes) must not prevent the others.
        for name in missing:
            try:
                _put(file, f"+{name}")
            except OSError as err:
                log.v(4).info(
                    "Failed to enable cgroup controller", path=str(file), controller=name, err=str(err)
                )


def _unreclaimable_memory(directory: Path) -> int:
    """Return the bytes in use that the kernel cannot reclaim by dropping caches; 0 if unknown."""
    try:
        used = int((directory / "memory.current").read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return used - int(stat["file"]) + int(stat["shmem"]) - int(stat["slab_reclaimable"])
    except (OSError, ValueError, KeyError):
        return 0


def _inherit_cpuset(directory: Path) -> None:
    """Copy the parent's cpuset to a new v1 cgroup: an empty cpuset accepts no processes."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not (directory / file).read_text().strip():
            _put(directory / file, (directory.parent / file).read_text().strip())


def _set(path: Path, write: Write) -> None:
    try:
        _put(path, write.text)
    except FileNotFoundError as err:
        if not path.parent.is_dir():
            raise CgroupWriteError(errno.ENOENT, f"cgroup {path.parent} is gone") from err
        if not write.optional:
            log.warning("Kernel does not support cgroup limit", path=str(path), value=write.text)
    except OSError as err:
        raise CgroupWriteError(err.errno, f"cannot set {path} to {write.text}: {err.strerror}") from err


def _mkdir(directory: Path) -> None:
    directory.mkdir(mode=0o755)


def _rmdir(directory: Path) -> bool:
    """Remove a cgroup if it is empty; return whether it no longer exists."""
    try:
        directory.rmdir()
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY):
            raise
        return err.errno == errno.ENOENT
    return True


def _put(path: Path, text: str) -> None:
    # Without O_CREAT: a missing file is a limit that the kernel does not support.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


_ROOT_SLICE = "-.slice"
_PERIOD_SINCE = 242
_CPUSET_SINCE = 244
_MICROS = 1_000_000
_PERCENT = _MICROS // 100
_UNIFIED = {
    "memory.min": "MemoryMin",
    "memory.low": "MemoryLow",
    "memory.high": "MemoryHigh",
    "memory.max": "MemoryMax",
    "memory.swap.max": "MemorySwapMax",
}


class SystemdSlices:
    """Systemd slices of the host, by the name of their cgroup."""

    def __init__(self, systemd: Systemd, *, unified: bool) -> None:
        self._systemd = systemd
        self._unified = unified

    async def start(self, name: CgroupName) -> None:
        """Start the slice and its ancestors. Raises SystemdError."""
        if name:
            await self._systemd.start(unit_of(name), start_properties(name, unified=self._unified))

    async def set(self, name: CgroupName, values: CgroupValues) -> None:
        """Set the slice's properties. Raises SystemdError."""
        version = await self._systemd.version()
        if properties := [*value_properties(values, unified=self._unified, version=version)]:
            await self._systemd.set(unit_of(name), properties)

    async def stop(self, name: CgroupName) -> None:
        """Stop the slice with everything in it. Raises SystemdError."""
        await self._systemd.stop(unit_of(name))


def unit_of(name: CgroupName) -> str:
    """Return the unit name of a cgroup. Raises ValueError for a name that is invalid for a unit."""
    return systemd_path(name).rpartition("/")[2] or _ROOT_SLICE


def start_properties(name: CgroupName, *, unified: bool) -> list[Property]:
    """Return the properties of a new slice: its parent, all accounting, no limits yet."""
    accounted = ("Memory", "CPU", "IO" if unified else "BlockIO", "Tasks")
    return [
        ("Description", Variant("s", f"libcontainer container {unit_of(name)}")),
        ("Wants", Variant("as", [unit_of(name[:-1])])),
        *((f"{controller}Accounting", Variant("b", True)) for controller in accounted),
        ("DefaultDependencies", Variant("b", False)),
    ]


def value_properties(values: CgroupValues, *, unified: bool, version: int) -> Iterator[Property]:
    """Yield a cgroup's settings as systemd properties; those without a property are set in files only."""
    if values.memory:
        yield _number("MemoryMax" if unified else "MemoryLimit", values.memory)
    if values.shares:
        yield (
            _number("CPUWeight", weight_of_shares(values.shares))
            if unified
            else _number("CPUShares", values.shares)
        )
    if values.quota:
        if version >= _PERIOD_SINCE:
            yield _number("CPUQuotaPeriodUSec", values.period)
        per_second = values.quota * _MICROS // values.period if values.quota > 0 else INFINITY
        yield _number("CPUQuotaPerSecUSec", per_second)
    if values.pids is not None:
        # systemd has no value for a limit of 0 processes.
        yield _number("TasksMax", max(values.pids, 1) if values.pids >= 0 else INFINITY)
    if values.cpus and version >= _CPUSET_SINCE:
        yield "AllowedCPUs", Variant("ay", cpu_bits(values.cpus))
    if unified:
        for file, text in values.unified.items():
            if file in _UNIFIED:
                yield _number(_UNIFIED[file], INFINITY if text == "max" else int(text))


def round_up_to_percent(values: CgroupValues) -> CgroupValues:
    """Round a quota up to systemd's resolution of 1% of a CPU.

    The files get the same value, or the two would never agree; rounding down would limit the containers to
    less than their limits.
    """
    if not values.quota or values.quota < 0:
        return values
    per_second = values.quota * _MICROS // values.period
    if per_second % _PERCENT == 0:
        return values
    rounded = -(-per_second // _PERCENT) * _PERCENT
    return replace(values, quota=rounded * values.period // _MICROS)


def cpu_bits(cpus: frozenset[int]) -> bytes:
    """Return a set of CPUs as systemd's bit mask, lowest CPU first."""
    return bytes(
        sum(1 << bit for bit in range(8) if 8 * byte + bit in cpus) for byte in range(max(cpus) // 8 + 1)
    )


def _number(name: str, value: int) -> Property:
    return name, Variant("t", value if value >= 0 else INFINITY)


class CgroupMetrics:
    """Metrics of cgroup operations, the cgroup version and protected memory."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, unified: bool = False, memory_qos: bool = False
    ) -> None:
        """Initialize; `unified` is cgroup v2, `memory_qos` the feature gate `MemoryQoS`.

        Without a registry the metrics are not exported.
        """
        self._duration = Histogram(
            "kubelet_cgroup_manager_duration_seconds",
            "Duration of cgroup creation, update and removal in seconds.",
            ["operation_type"],
            buckets=SECONDS,
            registry=registry,
        )
        version = Gauge("kubelet_cgroup_version", "Cgroup version of the host.", registry=registry)
        version.set(2 if unified else 1)
        seen = registry if memory_qos else None
        self._minimum = Gauge(
            "kubelet_memory_qos_node_memory_min_bytes",
            "Memory of Guaranteed pods that is protected from reclaim (memory.min), in bytes.",
            registry=seen,
        )
        self._low = Gauge(
            "kubelet_memory_qos_node_memory_low_bytes",
            "Memory of Burstable pods that is reclaimed last (memory.low), in bytes.",
            registry=seen,
        )

    def protected(self, guaranteed: int, burstable: int) -> None:
        """Record the bytes protected for Guaranteed and Burstable pods."""
        self._minimum.set(guaranteed)
        self._low.set(burstable)

    @contextmanager
    def timed(self, operation: Literal["create", "update", "destroy"]) -> Iterator[None]:
        """Observe the duration of the block as an operation, also if it fails."""
        started_at = perf_counter()
        try:
            yield
        finally:
            self._duration.labels(operation).observe(perf_counter() - started_at)


class CgroupDriver:
    """Cgroups of the host by name, through the configured cgroup driver."""

    def __init__(
        self,
        cgroups: Cgroups,
        driver: str = "cgroupfs",
        metrics: CgroupMetrics | None = None,
        manager: Systemd | None = None,
    ) -> None:
        self._metrics = metrics or CgroupMetrics()
        self.files = CgroupFiles(cgroups, driver)
        """For queries only: existence, settings and usage."""
        self._slices: SystemdSlices | None = None
        if driver == "systemd":
            self._slices = SystemdSlices(manager or Systemd(), unified=cgroups.unified)

    def check(self) -> None:
        """Raise CgroupWriteError with a remedy if the host lacks what the driver requires."""
        if self._slices is not None and not systemd.is_running():
            raise CgroupWriteError(
                errno.ENOSYS,
                "cgroupDriver is systemd, but systemd does not run this machine: set it to cgroupfs, "
                "here and in the runtime (containerd: SystemdCgroup = false)",
            )

    def parse(self, text: str) -> CgroupName:
        """Parse the name of an existing cgroup: a path, or a slice (`/system.slice`)."""
        return parse_path(text) if self._slices is None else parse_systemd_path(text)

    def effective_values(self, values: CgroupValues) -> CgroupValues:
        """Return the values that a cgroup is actually set to: systemd's are coarser."""
        return values if self._slices is None else round_up_to_percent(values)

    async def make(self, name: CgroupName, values: CgroupValues) -> None:
        """Create a cgroup and its ancestors, and set it. Raises CgroupWriteError."""
        with self._metrics.timed("create"):
            if self._slices is not None:
                with _systemd_errors("make"):
                    await self._slices.start(name)
            self.files.make(name, CgroupValues())
            await self._set(name, values)

    async def write(self, name: CgroupName, values: CgroupValues) -> None:
        """Set an existing cgroup. Raises CgroupWriteError with the rejected value."""
        with self._metrics.timed("update"):
            await self._set(name, values)

    async def remove(self, name: CgroupName) -> None:
        """Remove a cgroup with everything below it, killing processes inside. Raises CgroupWriteError."""
        if self._slices is None:
            await self.files.remove(name)
            return
        # systemd would send SIGTERM first and wait for 90 seconds.
        await self.files.kill(name)
        try:
            with _systemd_errors("stop"):
                await self._slices.stop(name)
        finally:
            await self.files.remove(name)

    async def _set(self, name: CgroupName, values: CgroupValues) -> None:
        values = self.effective_values(values)
        self.files.check(name, values)
        if self._slices is not None:
            with _systemd_errors("set"):
                await self._slices.set(name, values)
        self.files.write(name, values)


@contextmanager
def _systemd_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except SystemdError as err:
        raise CgroupWriteError(err.errno, f"cannot {operation} a slice: {err}") from err
    except ValueError as err:
        # The name is invalid for a unit.
        raise CgroupWriteError(errno.EINVAL, f"cannot {operation} a slice: {err}") from err
