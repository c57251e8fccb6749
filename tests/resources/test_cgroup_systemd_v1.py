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

from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.host import cgroup_tree, systemd
from pykubelet.host.cgroups import detect_cgroups
from pykubelet.host.systemd import Property
from pykubelet.resources import cgroup_driver
from pykubelet.resources.cgroup_names import parse_systemd_path, systemd_path
from pykubelet.resources.pod_cgroups import PodCgroups
from tests.resources.making import pod_of
from tests.resources.test_cgroup_tree import CAPACITY, needs_v1, process_in, value

pytestmark = [pytest.mark.machine, needs_v1]

COUNTED = ("name=systemd", "cpu", "memory", "pids", "blkio")
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
        self.reload(unit)

    async def stop(self, unit: str) -> None:
        if self.units.pop(unit, None) is not None:
            for folder in self._folders(unit):
                assert await cgroup_tree.remove(folder)

    def reload(self, unit: str) -> None:
        """Set what it believes, as at a `systemctl daemon-reload`."""
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


def pods_in(root: str) -> PodCgroups:
    settings = KubeletConfiguration(cgroup_root=f"/{root}", cgroup_driver="systemd", pod_pids_limit=99)
    return PodCgroups(settings, FeatureGates(), detect_cgroups(), CAPACITY)


async def test_a_life(root: str, manager: Systemd) -> None:
    cgroups = pods_in(root)
    await cgroups.setup()
    best_effort, burstable = pod_of({}), pod_of({"requests": {"cpu": "300m"}})
    guaranteed = pod_of({"limits": {"cpu": "1", "memory": "64Mi"}})
    pods = [best_effort, burstable, guaranteed]
    await cgroups.update_qos(pods)
    parents = [await cgroups.ensure(pod) for pod in pods]
    tiers = (f"{root}-kubepods-besteffort", f"{root}-kubepods-burstable", f"{root}-kubepods")
    escaped = [pod.uid.replace("-", "_") for pod in pods]
    assert parents == [f"{tier}-pod{uid}.slice" for tier, uid in zip(tiers, escaped, strict=True)]
    places = [systemd_path(parse_systemd_path(unit)) for unit in parents]
    for controller in detect_cgroups().mounts:
        assert all(detect_cgroups().path(controller, place).is_dir() for place in places), controller
    shares = ["2", "307", "1024"]
    assert [value("cpu", place, "cpu.shares") for place in places] == shares
    assert [value("pids", place, "pids.max") for place in places] == ["99"] * 3
    assert value("memory", places[2], "memory.limit_in_bytes") == str(64 << 20)
    assert value("cpu", places[2], "cpu.cfs_quota_us") == "100000"
    assert value("cpu", systemd_path((root, "kubepods", "burstable")), "cpu.shares") == "307"
    assert value("cpuset", places[0], "cpuset.cpus") == value("cpuset", "/", "cpuset.cpus")
    for unit in manager.units:
        manager.reload(unit)
    assert [value("cpu", place, "cpu.shares") for place in places] == shares, "both say the same"
    assert cgroups.uids() == {pod.uid for pod in pods}
    # Another life of the agent knows them, and takes them down with all who are inside.
    again = pods_in(root)
    await again.setup()
    assert again.uids() == {pod.uid for pod in pods}
    with process_in(places[2]) as process:
        for pod in pods:
            await again.remove(pod.uid)
        assert process.wait(30) != 0
    assert again.uids() == set()
    assert not any(detect_cgroups().path(controller, places[0]).exists() for controller in COUNTED)
    assert {unit for unit in manager.units if "-pod" in unit} == set()
