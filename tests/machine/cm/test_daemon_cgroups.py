"""Processes are moved to where the configuration wants them, in every hierarchy."""

import asyncio
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from pykubelet.cm.cgroups import node_cgroups as daemon_cgroups
from pykubelet.cm.cgroups.driver import CgroupFiles
from pykubelet.cm.cgroups.node_cgroups import cgroup_of, join, root_cgroup_processes
from pykubelet.cm.cgroups.values import CgroupValues, parse_path
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cgroups import needs_v1, process_in, root

__all__ = ["root"]

pytestmark = [pytest.mark.machine, needs_v1]


def test_join_moves_process_in_every_hierarchy(root: str) -> None:
    found = detect_cgroups()
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            join(found, f"{root}/daemons", [process.pid])
            for controller in found.mounts:
                members = (found.path(controller, f"{root}/daemons") / "cgroup.procs").read_text()
                assert members.split() == [str(process.pid)], controller
            assert cgroup_of(found, process.pid) == f"{root}/daemons"
            join(found, f"{root}/daemons", [process.pid])
        finally:
            process.kill()
    assert cgroup_of(found, process.pid) is None
    # Nobody is left to be moved, and nothing is made for nobody.
    join(found, f"{root}/none", [process.pid])
    assert not found.path("cpu", f"{root}/none").exists()


def test_root_cgroup_processes_excludes_init_and_kernel_threads(root: str) -> None:
    found = detect_cgroups()
    CgroupFiles(found).make(parse_path(root), CgroupValues())
    with process_in(root) as process:
        assert root_cgroup_processes(found, root) == {process.pid}
        join(found, f"{root}/system", root_cgroup_processes(found, root))
        assert root_cgroup_processes(found, root) == set()
        assert cgroup_of(found, process.pid) == f"{root}/system"
    # The first process stays, and so do the kernel's own, of which the second is the parent.
    assert not root_cgroup_processes(found) & {1, 2}


@pytest.mark.skipif(
    not Path("/proc/2/comm").exists() or Path("/proc/2/comm").read_text() != "kthreadd\n",
    reason="the parent of the kernel's threads is out of sight",
)
def test_join_unmovable_process_moves_others_and_raises(root: str) -> None:
    found = detect_cgroups()
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            with pytest.raises(OSError, match="cannot move process 2 to "):
                join(found, f"{root}/daemons", [2, process.pid])
            for controller in found.mounts:
                members = (found.path(controller, f"{root}/daemons") / "cgroup.procs").read_text()
                assert members.split() == [str(process.pid)], controller
        finally:
            process.kill()


async def test_keep_daemons_one_cgroup_fails_continues_with_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there is trouble with one of them."""
    found, asked = detect_cgroups(), list[str]()

    def nobody(cgroups: object, path: str, pids: Iterable[int]) -> None:
        asked.append(path)
        if path == "/agent":
            raise OSError("no such place")

    monkeypatch.setattr(daemon_cgroups, "join", nobody)
    keeping = asyncio.create_task(daemon_cgroups.keep_daemons(found, agent="/agent", system="/system"))
    async with asyncio.timeout(30):
        while len(asked) < 2:
            await asyncio.sleep(0)
    assert sorted(asked) == ["/agent", "/system"]
    assert not keeping.done()
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
