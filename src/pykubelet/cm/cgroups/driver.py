"""The two ways to make and set cgroups, as one: through the kernel's files alone, or systemd's units first.

Which one a node uses must be the runtime's, too (`cgroupDriver`; containerd: `SystemdCgroup`): two
managers of one tree undo each other's work. With `systemd` each change is told to systemd before the
files are written, which then carry also what systemd has no word for.

Making cgroups and setting them, through the kernel's files.

On v1 a cgroup is a folder in each of the mounted hierarchies; on v2 it is one folder, and a
controller works in it only when every folder above hands it down (`cgroup.subtree_control`).
Everything may be repeated: what exists is kept and set again, so that an agent that died between
making and setting leaves no unlimited pod behind. A handful of small writes is quicker than a
thread, so nothing here is asynchronous but waiting for a cgroup to die.

Cgroups as systemd's slices: one unit per level, with the settings as its properties.

systemd must know of every cgroup that is to last, and of every limit that it has a property for: at
its next look it sets each of them to what it believes. So a slice is started before its folder is
used, and told its values before the files are written. The properties are those that container
runtimes set on the same slices.

How long the agent's work on cgroups takes, and which kind of cgroups the machine has.
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
"""How long to wait for the processes of a cgroup to end after they were killed."""
_NEEDED_V1 = frozenset({"cpu", "cpuacct", "cpuset", "memory", "hugetlb", "pids", "name=systemd"})
_NEEDED_V2 = frozenset({"cpu", "cpuset", "memory", "hugetlb", "pids"})
_V1_UNBOUNDED = 2**62
"""What v1 says of a cgroup without a limit is larger than this, by how much depends on the page size."""


class CgroupError(OSError):
    """A cgroup cannot be made, set or removed; the text is one line with the cause."""

    def __str__(self) -> str:
        return str(self.strerror)


class CgroupFiles:
    """The cgroups of one machine, by name."""

    def __init__(self, cgroups: Cgroups, driver: str = "cgroupfs") -> None:
        self._cgroups = cgroups
        self._unified = cgroups.unified
        self._driver = driver
        self._points = [cgroups.root] if self._unified else list(dict.fromkeys(cgroups.mounts.values()))
        # Asked for with every step of a pod, hence not as paths.
        self._needed = {str(point) for name, point in cgroups.mounts.items() if name in _NEEDED_V1}
        # systemd's own hierarchy holds no limits, but a runtime may have put processes there.
        self._others = [cgroups.root / "unified"] if cgroups.mode is CgroupMode.HYBRID else []

    def exists(self, name: CgroupName) -> bool:
        """Whether the cgroup is there with all controllers that matter."""
        if self._unified:
            return not self._lacking(*self._folders(name, self._points))
        below = self._path(name)
        return all(os.access(point + below, os.F_OK) for point in self._needed)

    def make(self, name: CgroupName, values: CgroupValues) -> None:
        """Make a cgroup, and those above it, and set it; raises CgroupError."""
        try:
            self._make(name)
        except OSError as err:
            raise CgroupError(err.errno, f"cannot make cgroup {self._path(name)}: {err}") from err
        self.write(name, values)

    def check(self, name: CgroupName, values: CgroupValues) -> None:
        """Raise CgroupError (EBUSY) when more memory is in use than may be from now on.

        v1 refuses such a limit by itself. v2 takes it and kills processes until it is kept, which is
        not what lowering the limit of all pods is meant to do.
        """
        if (
            not self._unified
            or not values.memory
            or values.memory < 0
            or "memory" not in self._cgroups.mounts
        ):
            return
        folder = self._cgroups.path("memory", self._path(name))
        if (used := _held_memory(folder)) > values.memory:
            raise CgroupError(
                errno.EBUSY, f"cannot set {folder}/memory.max to {values.memory}: {used} bytes are in use"
            )

    def write(self, name: CgroupName, values: CgroupValues) -> None:
        """Set a cgroup that exists; raises CgroupError with the file that refused its value.

        Limits of controllers that the machine does not have are left out.
        """
        self.check(name, values)
        path = self._path(name)
        for write in v2_writes(values) if self._unified else v1_writes(values):
            if write.controller in self._cgroups.mounts:
                _set(self._cgroups.path(write.controller, path) / write.file, write)

    def read(self, name: CgroupName) -> CgroupValues:
        """Give what a cgroup is set to in cpu and memory; None where there is no bound. Raises OSError."""

        def words(controller: str, file: str) -> list[str]:
            return (self._cgroups.path(controller, self._path(name)) / file).read_text().split()

        if not self._unified:
            (quota,), (period,) = words("cpu", "cpu.cfs_quota_us"), words("cpu", "cpu.cfs_period_us")
            (shares,), (memory,) = words("cpu", "cpu.shares"), words("memory", "memory.limit_in_bytes")
            return CgroupValues(
                shares=int(shares),
                quota=int(quota),
                period=int(period),
                memory=int(memory) if int(memory) < _V1_UNBOUNDED else None,
            )
        (quota, period), (weight,) = words("cpu", "cpu.max"), words("cpu", "cpu.weight")
        (memory,) = words("memory", "memory.max")
        return CgroupValues(
            shares=shares_of_weight(int(weight)),
            quota=None if quota == "max" else int(quota),
            period=int(period),
            memory=None if memory == "max" else int(memory),
        )

    def memory_usage(self, name: CgroupName) -> int:
        """Give the bytes that are in use; raises OSError."""
        file = "memory.current" if self._unified else "memory.usage_in_bytes"
        return int((self._cgroups.path("memory", self._path(name)) / file).read_text())

    def children(self, name: CgroupName) -> set[str]:
        """Give the folders below a cgroup that exist in any hierarchy."""
        found: set[str] = set()
        for folder in self._folders(name, (*self._points, *self._others)):
            try:
                with os.scandir(folder) as entries:
                    found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                continue
        return found

    async def remove(self, name: CgroupName, seconds: float = REMOVE_SECONDS) -> None:
        """Remove a cgroup with everything below it, and kill what is still inside.

        Raises CgroupError when it is still there after `seconds`.
        """
        folders = self._folders(name, (*self._points, *self._others))
        busy = [folder for folder in folders if not _rmdir(folder)]
        if not busy:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        await self._kill(name, busy, seconds)
        for folder in busy:
            if not await remove(folder, timeout=max(0.0, deadline - loop.time())):
                pids = await asyncio.to_thread(members, folder)
                inside = ", ".join(map(str, sorted(pids))) or "none"
                raise CgroupError(errno.EBUSY, f"cgroup {folder} does not go away; processes in it: {inside}")

    async def kill(self, name: CgroupName, seconds: float = REMOVE_SECONDS) -> None:
        """Kill what is in a cgroup and below it; what does not die within `seconds` is left."""
        folders = self._folders(name, (*self._points, *self._others))
        await self._kill(name, [folder for folder in folders if folder.is_dir()], seconds)

    async def _kill(self, name: CgroupName, folders: Iterable[Path], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        # In a thread: a privileged container may have made any number of cgroups below its own.
        if left := await asyncio.to_thread(lambda: set[int]().union(*map(members, folders))):
            log.info("Killing processes that are left in a cgroup", cgroup=self._path(name), pids=len(left))
        for folder in folders:
            await kill_members(folder, timeout=max(0.0, deadline - loop.time()))

    def _path(self, name: CgroupName) -> str:
        try:
            return driver_path(name, self._driver)
        except ValueError as err:
            raise CgroupError(errno.EINVAL, str(err)) from err

    def _folders(self, name: CgroupName, points: Iterable[Path]) -> list[Path]:
        below = self._path(name).lstrip("/")
        return [point / below for point in points]

    def _make(self, name: CgroupName) -> None:
        if not name:
            return
        folders = self._folders(name, self._points)
        for folder in folders:
            try:
                _mkdir(folder)
            except FileExistsError:
                continue
            except FileNotFoundError:
                self._make(name[:-1])
                _mkdir(folder)
        if not self._unified:
            if "cpuset" in self._cgroups.mounts:
                _inherit_cpuset(self._cgroups.path("cpuset", self._path(name)))
        elif self._lacking(folders[0]):
            self._hand_down(name)

    def _hand_down(self, name: CgroupName) -> None:
        """Have every folder above a v2 cgroup hand its controllers down."""
        for depth in range(len(name)):
            (above,) = self._folders(name[:depth], self._points)
            _enable(above / "cgroup.subtree_control", sorted(self._cgroups.controllers))
        if lacking := self._lacking(*self._folders(name, self._points)):
            raise OSError(
                errno.EOPNOTSUPP,
                f"the controllers {', '.join(sorted(lacking))} are not handed down to it: "
                "set cgroupRoot to a cgroup that has them and holds no processes itself",
            )

    def _lacking(self, folder: Path) -> set[str]:
        """Give the controllers that do not work in a v2 cgroup; all of them when it does not exist."""
        wanted = set(_NEEDED_V2 & self._cgroups.controllers)
        try:
            return wanted - set((folder / "cgroup.controllers").read_text().split())
        except FileNotFoundError:
            return wanted


def _enable(file: Path, controllers: Iterable[str]) -> None:
    handed = file.read_text().split()
    missing = [name for name in controllers if name not in handed]
    if not missing:
        return
    try:
        _put(file, " ".join(f"+{name}" for name in missing))
    except OSError:
        # One that cannot be had (realtime processes hold cpu back) must not cost us the others.
        for name in missing:
            try:
                _put(file, f"+{name}")
            except OSError as err:
                log.v(4).info("Controller is not handed down", file=str(file), controller=name, why=str(err))


def _held_memory(folder: Path) -> int:
    """Give the bytes in use that the kernel cannot take back by dropping caches; 0 when it does not say."""
    try:
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return used - int(stat["file"]) + int(stat["shmem"]) - int(stat["slab_reclaimable"])
    except (OSError, ValueError, KeyError):
        return 0


def _inherit_cpuset(folder: Path) -> None:
    """Let a new v1 cpuset have what its parent has: an empty one takes no processes."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not (folder / file).read_text().strip():
            _put(folder / file, (folder.parent / file).read_text().strip())


def _set(path: Path, write: Write) -> None:
    try:
        _put(path, write.text)
    except FileNotFoundError as err:
        if not path.parent.is_dir():
            raise CgroupError(errno.ENOENT, f"cgroup {path.parent} is gone") from err
        if not write.optional:
            log.warning("This kernel does not know a limit", file=str(path), value=write.text)
    except OSError as err:
        raise CgroupError(err.errno, f"cannot set {path} to {write.text}: {err.strerror}") from err


def _mkdir(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def _rmdir(folder: Path) -> bool:
    """Remove a cgroup that is empty; returns whether it is gone."""
    try:
        folder.rmdir()
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY):
            raise
        return err.errno == errno.ENOENT
    return True


def _put(path: Path, text: str) -> None:
    # Never creates: a file that is not there is a limit that the kernel does not have.
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
    """The slices of one machine, by the name of their cgroup."""

    def __init__(self, systemd: Systemd, *, unified: bool) -> None:
        self._systemd = systemd
        self._unified = unified

    async def start(self, name: CgroupName) -> None:
        """Have the slice, and those above it; raises SystemdError."""
        if name:
            await self._systemd.start(unit_of(name), start_properties(name, unified=self._unified))

    async def set(self, name: CgroupName, values: CgroupValues) -> None:
        """Tell systemd what the slice is set to; raises SystemdError."""
        version = await self._systemd.version()
        if properties := [*value_properties(values, unified=self._unified, version=version)]:
            await self._systemd.set(unit_of(name), properties)

    async def stop(self, name: CgroupName) -> None:
        """Have the slice no more, with everything in it; raises SystemdError."""
        await self._systemd.stop(unit_of(name))


def unit_of(name: CgroupName) -> str:
    """Give the unit of a cgroup; raises ValueError for a name that no unit can have."""
    return systemd_path(name).rpartition("/")[2] or _ROOT_SLICE


def start_properties(name: CgroupName, *, unified: bool) -> list[Property]:
    """Say what a new slice is: below its parent, counted in every way, and with no values yet."""
    counted = ("Memory", "CPU", "IO" if unified else "BlockIO", "Tasks")
    return [
        ("Description", Variant("s", f"libcontainer container {unit_of(name)}")),
        ("Wants", Variant("as", [unit_of(name[:-1])])),
        *((f"{what}Accounting", Variant("b", True)) for what in counted),
        ("DefaultDependencies", Variant("b", False)),
    ]


def value_properties(values: CgroupValues, *, unified: bool, version: int) -> Iterator[Property]:
    """Say a cgroup's settings in systemd's words; what it has none for is left to the files."""
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
        # None at all is not something that systemd can be told.
        yield _number("TasksMax", max(values.pids, 1) if values.pids >= 0 else INFINITY)
    if values.cpus and version >= _CPUSET_SINCE:
        yield "AllowedCPUs", Variant("ay", cpu_bits(values.cpus))
    if unified:
        for file, text in values.unified.items():
            if file in _UNIFIED:
                yield _number(_UNIFIED[file], INFINITY if text == "max" else int(text))


def in_whole_percent(values: CgroupValues) -> CgroupValues:
    """Round a quota up to what systemd can say: whole hundredths of a cpu.

    The files get the same, or the two would never agree; and less than asked for would bound the
    containers inside more than they were promised.
    """
    if not values.quota or values.quota < 0:
        return values
    per_second = values.quota * _MICROS // values.period
    if per_second % _PERCENT == 0:
        return values
    rounded = -(-per_second // _PERCENT) * _PERCENT
    return replace(values, quota=rounded * values.period // _MICROS)


def cpu_bits(cpus: frozenset[int]) -> bytes:
    """Write a set of cpus as systemd takes it: a bit for each, the lowest first."""
    return bytes(
        sum(1 << bit for bit in range(8) if 8 * byte + bit in cpus) for byte in range(max(cpus) // 8 + 1)
    )


def _number(name: str, value: int) -> Property:
    return name, Variant("t", value if value >= 0 else INFINITY)


class CgroupMetrics:
    """The cgroups of one agent."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, unified: bool = False, memory_qos: bool = False
    ) -> None:
        """Take whether the machine has cgroups v2, and whether the gate `MemoryQoS` is on.

        Without a registry nobody sees the numbers.
        """
        self._duration = Histogram(
            "kubelet_cgroup_manager_duration_seconds",
            "How long it took to make, set or remove a cgroup.",
            ["operation_type"],
            buckets=SECONDS,
            registry=registry,
        )
        version = Gauge("kubelet_cgroup_version", "The version of the machine's cgroups.", registry=registry)
        version.set(2 if unified else 1)
        seen = registry if memory_qos else None
        self._minimum = Gauge(
            "kubelet_memory_qos_node_memory_min_bytes",
            "Memory of guaranteed pods that the kernel never takes back.",
            registry=seen,
        )
        self._low = Gauge(
            "kubelet_memory_qos_node_memory_low_bytes",
            "Memory of burstable pods that the kernel takes back only when there is no other.",
            registry=seen,
        )

    def protected(self, guaranteed: int, burstable: int) -> None:
        """Note the bytes that are kept for pods of the two classes."""
        self._minimum.set(guaranteed)
        self._low.set(burstable)

    @contextmanager
    def timed(self, operation: Literal["create", "update", "destroy"]) -> Iterator[None]:
        """Count an operation from here to the end of the block, however it ends."""
        began = perf_counter()
        try:
            yield
        finally:
            self._duration.labels(operation).observe(perf_counter() - began)


class CgroupDriver:
    """The cgroups of one machine, by name, through the driver that the node is set to."""

    def __init__(
        self,
        cgroups: Cgroups,
        driver: str = "cgroupfs",
        metrics: CgroupMetrics | None = None,
        manager: Systemd | None = None,
    ) -> None:
        self._metrics = metrics or CgroupMetrics()
        self.files = CgroupFiles(cgroups, driver)
        """For looking: what exists, and what is used."""
        self._slices: SystemdSlices | None = None
        if driver == "systemd":
            self._slices = SystemdSlices(manager or Systemd(), unified=cgroups.unified)

    def check(self) -> None:
        """Raise CgroupError with a remedy when the machine does not have what the driver needs."""
        if self._slices is not None and not systemd.is_running():
            raise CgroupError(
                errno.ENOSYS,
                "cgroupDriver is systemd, but systemd does not run this machine: set it to cgroupfs, "
                "here and in the runtime (containerd: SystemdCgroup = false)",
            )

    def parse(self, text: str) -> CgroupName:
        """Take the name of an existing cgroup apart: a path, or a slice (`/system.slice`)."""
        return parse_path(text) if self._slices is None else parse_systemd_path(text)

    def granted(self, values: CgroupValues) -> CgroupValues:
        """Give what a cgroup gets of these values: systemd is coarser."""
        return values if self._slices is None else in_whole_percent(values)

    async def make(self, name: CgroupName, values: CgroupValues) -> None:
        """Make a cgroup, and those above it, and set it; raises CgroupError."""
        with self._metrics.timed("create"):
            if self._slices is not None:
                with _told("make"):
                    await self._slices.start(name)
            self.files.make(name, CgroupValues())
            await self._set(name, values)

    async def write(self, name: CgroupName, values: CgroupValues) -> None:
        """Set a cgroup that exists; raises CgroupError with what refused its value."""
        with self._metrics.timed("update"):
            await self._set(name, values)

    async def remove(self, name: CgroupName) -> None:
        """Remove a cgroup with everything below it, and kill what is still inside; raises CgroupError."""
        if self._slices is None:
            await self.files.remove(name)
            return
        # systemd would ask the processes politely first, and wait for a minute and a half.
        await self.files.kill(name)
        try:
            with _told("stop"):
                await self._slices.stop(name)
        finally:
            await self.files.remove(name)

    async def _set(self, name: CgroupName, values: CgroupValues) -> None:
        values = self.granted(values)
        self.files.check(name, values)
        if self._slices is not None:
            with _told("set"):
                await self._slices.set(name, values)
        self.files.write(name, values)


@contextmanager
def _told(doing: str) -> Iterator[None]:
    try:
        yield
    except SystemdError as err:
        raise CgroupError(err.errno, f"cannot {doing} a slice: {err}") from err
    except ValueError as err:
        # A name that no unit can have.
        raise CgroupError(errno.EINVAL, f"cannot {doing} a slice: {err}") from err
