"""The systemd driver on the real hierarchies of v1, with a systemd of our own.

It does what systemd does there: a slice gets folders in the hierarchies that it counts in, and in no
others; the properties that it is told are set in the kernel's files of those; and a slice that is stopped
loses its folders.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pykubelet.cm.cgroups import driver as cgroup_driver
from pykubelet.cm.cgroups.values import parse_systemd_path, systemd_path
from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux import systemd
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.systemd import Property
from tests.support.cgroups import needs_v1
from tests.support.systemd_v1 import COUNTED, a_life

pytestmark = [pytest.mark.machine, needs_v1]

FILES = {
    "CPUShares": ("cpu", "cpu.shares"),
    "MemoryLimit": ("memory", "memory.limit_in_bytes"),
    "TasksMax": ("pids", "pids.max"),
}


class Systemd:
    """Slices as systemd keeps them."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, object]] = {}

    async def version(self) -> int:
        return 252

    async def start(self, unit: str, properties: Iterable[Property]) -> None:
        if unit in self.units:
            return
        self.units[unit] = {name: it.value for name, it in properties}
        for folder in self._folders(unit):
            folder.mkdir(parents=True, exist_ok=True)

    async def set(self, unit: str, properties: Iterable[Property]) -> None:
        self.units[unit] |= {name: it.value for name, it in properties}
        self._write(unit)

    async def stop(self, unit: str) -> None:
        if self.units.pop(unit, None) is not None:
            for folder in self._folders(unit):
                assert await cgroup_tree.remove(folder)

    def reload(self) -> None:
        for unit in self.units:
            self._write(unit)

    def names(self, root: str) -> list[str]:
        return [unit for unit in self.units if unit.startswith(root)]

    def _write(self, unit: str) -> None:
        for name, (controller, file) in FILES.items():
            if name in self.units[unit]:
                path = detect_cgroups().path(controller, systemd_path(parse_systemd_path(unit))) / file
                path.write_text(str(self.units[unit][name]))

    def _folders(self, unit: str) -> list[Path]:
        found = detect_cgroups()
        below = systemd_path(parse_systemd_path(unit))
        return [found.path(controller, below) for controller in COUNTED if controller in found.mounts]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Systemd:
    made = Systemd()
    monkeypatch.setattr(systemd, "is_running", lambda: True)
    monkeypatch.setattr(cgroup_driver, "Systemd", lambda: made)
    return made


@pytest.fixture
def root() -> Iterator[str]:
    """The name of a slice of our own, gone afterwards in every hierarchy."""
    name = f"pyktest{secrets.token_hex(4)}"
    try:
        yield name
    finally:
        for tree in cgroup_tree.find_trees(f"{name}.slice"):
            assert asyncio.run(_drop(tree)), f"{tree} stays"


async def _drop(tree: Path) -> bool:
    await cgroup_tree.kill_members(tree)
    return await cgroup_tree.remove(tree)


async def test_pod_cgroups_systemd_driver_v1_pods_created_and_removed(root: str, manager: Systemd) -> None:
    await a_life(root, manager)
