"""systemd itself, asked in both ways, and the agent's cgroups below it."""

import asyncio
import errno
import secrets
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.cm.cgroups import node_cgroups
from pykubelet.cm.cgroups.driver import CgroupDriver, CgroupWriteError
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import detect_cgroups, members
from pykubelet.linux.dbus import Variant
from pykubelet.linux.systemd import Systemd, SystemdError, is_running
from tests.support.pod_resources import amounts, pod_of
from tests.vm.guest.node import ROOT, value

NOWHERE = Path("/nonexistent")
EATER = """
import sys, time
sys.stdin.readline()
held = bytearray(int(sys.argv[1]))
for at in range(0, len(held), 4096): held[at] = 1
print("full", flush=True)
time.sleep(600)
"""


def show(unit: str, name: str) -> str:
    return subprocess.run(
        ["systemctl", "show", "--value", "-p", name, unit], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(params=["private", "bus"])
def systemd(request: pytest.FixtureRequest) -> Systemd:
    """systemd, on its own socket or by way of the system's bus."""
    assert is_running()
    if request.param == "private":
        return Systemd(bus=NOWHERE)
    subprocess.run(["systemctl", "start", "dbus.service"], check=True)
    return Systemd(private=NOWHERE)


async def test_systemd_slice_started_changed_and_stopped(systemd: Systemd) -> None:
    unit = f"pyk{secrets.token_hex(4)}.slice"
    assert await systemd.version() >= 252
    await systemd.start(unit, [("MemoryMax", Variant("t", 1 << 26)), ("Wants", Variant("as", ["-.slice"]))])
    try:
        assert show(unit, "ActiveState") == "active"
        assert value(ROOT / unit, "memory.max") == str(1 << 26)
        await systemd.start(unit, [])
        await systemd.set(unit, [("MemoryMax", Variant("t", 1 << 27))])
        assert value(ROOT / unit, "memory.max") == str(1 << 27)
        with pytest.raises(SystemdError, match=r"about pyk.*Cannot set property Nonsense"):
            await systemd.set(unit, [("Nonsense", Variant("t", 1))])
    finally:
        await systemd.stop(unit)
    assert not (ROOT / unit).exists()
    assert show(unit, "ActiveState") == "inactive"
    await systemd.stop(unit)
    with pytest.raises(SystemdError, match="about no-unit"):
        await systemd.start("no-unit", [])


@asynccontextmanager
async def group(driver: str) -> AsyncIterator[tuple[CgroupDriver, tuple[str, str], Path]]:
    """A cgroup of our own, two levels deep, which is gone afterwards."""
    groups = CgroupDriver(detect_cgroups(), driver)
    top, below = f"pyk{secrets.token_hex(4)}", "in-side"
    folder = ROOT / top / below if driver == "cgroupfs" else ROOT / f"{top}.slice/{top}-in_side.slice"
    try:
        yield groups, (top, below), folder
    finally:
        await groups.remove((top, below))
        await groups.remove((top,))
        assert not folder.parent.exists()


@pytest.mark.parametrize("driver", ["cgroupfs", "systemd"])
class TestGroups:
    async def test_cgroup_driver_make_writes_every_value(self, driver: str) -> None:
        values = CgroupValues(
            shares=1024,
            quota=12345,
            period=50000,
            memory=1 << 27,
            pids=77,
            huge_pages={"2MB": 4 << 20},
            unified={"memory.min": str(1 << 22), "memory.low": str(1 << 23), "memory.high": str(1 << 26)},
            cpus=frozenset({1}),
        )
        wanted = {
            "cpu.weight": "39",
            "cpu.max": "12345 50000" if driver == "cgroupfs" else "12500 50000",
            "memory.max": str(1 << 27),
            "memory.min": str(1 << 22),
            "memory.low": str(1 << 23),
            "memory.high": str(1 << 26),
            "pids.max": "77",
            "hugetlb.2MB.max": str(4 << 20),
            "cpuset.cpus": "1",
        }
        async with group(driver) as (groups, name, folder):
            await groups.make(name, values)
            assert {file: value(folder, file) for file in wanted} == wanted
            if driver == "systemd":
                subprocess.run(["systemctl", "daemon-reload"], check=True)
            # Nobody puts back what was set, or takes back a controller.
            await groups.write(name, CgroupValues(shares=2048))
            assert {file: value(folder, file) for file in wanted} == wanted | {"cpu.weight": "79"}
            assert groups.files.exists(name)
            await groups.write(name, CgroupValues(quota=-1, pids=-1))
            assert value(folder, "cpu.max") == "max 100000"
            assert value(folder, "pids.max") == "max"

    async def test_cgroup_driver_remove_kills_processes_inside(self, driver: str) -> None:
        async with group(driver) as (groups, name, folder):
            await groups.make(name, CgroupValues())
            inner = folder / "inner"
            inner.mkdir()
            stubborn = await asyncio.create_subprocess_exec("sh", "-c", "trap '' TERM; sleep 600 & wait")
            (inner / "cgroup.procs").write_text(str(stubborn.pid))
            await groups.remove(name)
            assert not folder.exists()
            assert await stubborn.wait() != 0

    async def test_pod_cgroups_limit_below_usage_applied_after_memory_is_freed(
        self, driver: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lowering what all pods may have kills none of them; it comes into force when there is room."""
        monkeypatch.setattr(node_cgroups, "RETRY_SECONDS", 0.0)
        root = f"pyk{secrets.token_hex(4)}"

        def pods(memory: str) -> PodCgroups:
            settings = KubeletConfiguration(cgroup_root=root, cgroup_driver=driver)
            return PodCgroups(settings, FeatureGates(), detect_cgroups(), amounts(cpu="2", memory=memory))

        groups = CgroupDriver(detect_cgroups(), driver)
        path = f"{root}/kubepods" if driver == "cgroupfs" else f"{root}.slice/{root}-kubepods.slice"
        one = pod_of({})
        try:
            before = pods("512Mi")
            await before.setup()
            parent = await before.ensure(one)
            folder = next((ROOT / path).rglob(f"*{parent.rpartition('/')[2]}"))
            eater = await asyncio.create_subprocess_exec(
                *("python3", "-c", EATER, str(64 << 20)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert eater.stdin is not None
            assert eater.stdout is not None
            # Only what a process takes after it joined counts as the cgroup's.
            (folder / "cgroup.procs").write_text(str(eater.pid))
            eater.stdin.write(b"\n")
            assert await eater.stdout.readline() == b"full\n"
            after = pods("32Mi")
            await after.setup()
            assert value(ROOT / path, "memory.max") == str(512 << 20)
            assert eater.pid in members(folder)
            with pytest.raises(CgroupWriteError) as refused:
                await groups.write((root, "kubepods"), CgroupValues(memory=32 << 20))
            assert refused.value.errno == errno.EBUSY
            await after.remove(one.uid)
            assert await eater.wait() == -9
            await after.update_qos([])
            assert value(ROOT / path, "memory.max") == str(32 << 20)
        finally:
            await groups.remove((root,))
        assert not list(ROOT.glob(f"{root}*"))


async def test_systemd_calls_leave_no_open_descriptors() -> None:
    """A connection for each task is one that is closed after each task."""
    manager = Systemd()
    await manager.version()
    before = len([*Path("/proc/self/fd").iterdir()])
    unit = f"pyk{secrets.token_hex(4)}.slice"
    await manager.start(unit, [])
    await manager.stop(unit)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
