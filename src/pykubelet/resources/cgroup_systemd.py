"""Cgroups as systemd's slices: one unit per level, with the settings as its properties.

systemd must know of every cgroup that is to last, and of every limit that it has a property for: at
its next look it sets each of them to what it believes. So a slice is started before its folder is
used, and told its values before the files are written. The properties are those that container
runtimes set on the same slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pykubelet.host.dbus_wire import Variant
from pykubelet.host.systemd import INFINITY, Property, Systemd
from pykubelet.resources.cgroup_names import CgroupName, systemd_path
from pykubelet.resources.cgroup_values import CgroupValues, weight_of_shares

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


class Slices:
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
