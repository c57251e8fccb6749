"""The kernel's notification of memory usage on cgroup v2, with a cgroup of the test as that of all pods."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pykubelet.eviction.memory_notifier import MemoryNotifier
from pykubelet.eviction.observations import NodeMeasurements
from pykubelet.linux import cgroupfs
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.eviction import MI, threshold
from tests.vm.guest.node import SLOW

pytestmark = pytest.mark.timeout(SLOW + 60)
LIMIT = 8 * MI
_DISKS = "/dev/ram1 /dev/ram2 /dev/ram3"
"""Disks in memory of 48 MB, whose page cache belongs to the cgroup that reads them; /tmp is a tmpfs."""
POLICY = threshold("allocatableMemory.available", "4Mi")


@pytest.fixture
def pods() -> Iterator[tuple[str, Path]]:
    """A cgroup with a memory limit; its name and its directory."""
    name = f"pyk-test-{secrets.token_hex(4)}"
    directory = detect_cgroups().path("memory", f"/{name}")
    (directory.parent / "cgroup.subtree_control").write_text("+memory")
    directory.mkdir()
    try:
        (directory / "memory.max").write_text(str(LIMIT))
        yield f"/{name}", directory
    finally:
        for tree in cgroupfs.find_trees(name):
            assert asyncio.run(_remove(tree)), f"{tree} stays"


async def _remove(tree: Path) -> bool:
    await cgroupfs.kill_members(tree)
    return await cgroupfs.remove(tree)


@contextlib.asynccontextmanager
async def hog(directory: Path) -> AsyncIterator[None]:
    """Processes in the cgroup whose page cache exceeds its limit all the time."""
    loop = f"while :; do cat {_DISKS} > /dev/null; done"
    # The page cache of a block device that no process has open is dropped.
    opened = "exec 3< /dev/ram1 4< /dev/ram2 5< /dev/ram3"
    script = f"echo $$ > {directory}/cgroup.procs; {opened}; for i in 1 2 3; do ({loop}) & done; wait"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def watched_files() -> set[str]:
    """Return the names of the memory files that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(descriptor.readlink().name)
    return {name for name in found if name.startswith("memory.")}


@pytest.mark.parametrize("watched", ["memory.pressure", "memory.events"])
async def test_notifier_hog_in_pods_cgroup_notifies(pods: tuple[str, Path], watched: str) -> None:
    """Verify that a PSI trigger fires, and where the pressure file cannot be used, memory.events."""
    name, directory = pods
    if watched == "memory.events":
        (directory / "cgroup.pressure").write_text("0")
        assert not (directory / "memory.pressure").exists()
    notified = asyncio.Event()
    notifier = MemoryNotifier(detect_cgroups(), name, notified.set)
    try:
        notifier.update([POLICY], NodeMeasurements())
        assert watched_files() == {watched}
        assert not notified.is_set()
        for _ in range(2):
            notified.clear()
            async with hog(directory), asyncio.timeout(SLOW):
                await notified.wait()
    finally:
        notifier.close()
    assert watched_files() == set()
