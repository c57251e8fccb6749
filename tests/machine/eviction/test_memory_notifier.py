"""Notification by the kernel, with cgroups of the test on the host."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pykubelet.eviction.memory_notifier import MemoryNotifier, usage_at_threshold
from pykubelet.eviction.observations import NodeMeasurements
from pykubelet.linux.cgroupfs import CgroupMode, Cgroups, detect_cgroups
from pykubelet.linux.mounts import read_mounts
from tests.support.cgroups import needs_v1, root
from tests.support.eviction import GI, MI, cgroup, threshold

__all__ = ["root"]
LIMIT = "64Mi"
POLICY = threshold("allocatableMemory.available", "32Mi")
HOG = "import sys, time; b = bytearray(int(sys.argv[1])); b[::4096] = b'x' * len(b[::4096]); time.sleep(600)"


@pytest.fixture
def pods(root: str) -> tuple[Cgroups, str, Path]:
    """A memory cgroup of 64 MiB as that of all pods."""
    cgroups = detect_cgroups()
    directory = cgroups.path("memory", root)
    directory.mkdir()
    (directory / "memory.limit_in_bytes").write_text(LIMIT.removesuffix("i"))
    return cgroups, root, directory


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.asynccontextmanager
async def using(directory: Path, size: int) -> AsyncIterator[None]:
    """Use memory in a cgroup."""
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f'echo $$ > {directory}/cgroup.procs && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        HOG,
        str(size),
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def reading(directory: Path, file: Path) -> AsyncIterator[None]:
    """Read a file again and again in a cgroup, with four processes."""
    loop = f"while :; do cat {file} > /dev/null; done"
    script = f"echo $$ > {directory}/cgroup.procs; for i in 1 2 3 4; do ({loop}) & done; wait"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@needs_v1
@pytest.mark.machine
async def test_notifier_usage_crosses_threshold_notifies(pods: tuple[Cgroups, str, Path]) -> None:
    cgroups, name, directory = pods
    notified = asyncio.Event()
    notifier = MemoryNotifier(cgroups, name, notified.set)
    before = open_files()
    try:
        notifier.update([POLICY], NodeMeasurements(pods=cgroup(LIMIT, LIMIT, inactive_file="0")))
        async with using(directory, 8 * MI), asyncio.timeout(20):
            # Well below half of the limit: no notification until the second process comes.
            while int((directory / "memory.usage_in_bytes").read_text()) < 8 * MI:
                await asyncio.sleep(0.02)
            assert not notified.is_set()
            async with using(directory, 40 * MI):
                await notified.wait()
        # A new registration replaces the old one.
        notifier.update([POLICY], NodeMeasurements(pods=cgroup("40Mi", LIMIT)))
        notifier.update([POLICY], NodeMeasurements(pods=cgroup("50Mi", LIMIT)))
    finally:
        notifier.close()
    assert open_files() <= before


@needs_v1
@pytest.mark.machine
async def test_notifier_missing_cgroup_is_logged_and_recovers(root: str) -> None:
    cgroups, calls = detect_cgroups(), list[None]()
    notifier = MemoryNotifier(cgroups, f"{root}/none", lambda: calls.append(None))
    before = open_files()
    for _ in range(3):
        notifier.update([POLICY], NodeMeasurements(pods=cgroup(LIMIT, LIMIT, inactive_file="0")))
    assert open_files() == before
    notifier.close()
    assert calls == []


@pytest.fixture
def unified() -> Iterator[tuple[Cgroups, str, Path]]:
    """A cgroup of our own on the host's v2 hierarchy, with or without controllers."""
    trees = [mount.point for mount in read_mounts() if mount.kind == "cgroup2"]
    if os.geteuid() != 0 or not trees or not Path("/proc/pressure/memory").exists():
        pytest.skip("needs root, a cgroup2 mount and PSI")
    name = f"pyk-test-{secrets.token_hex(4)}"
    directory = trees[0] / name
    directory.mkdir()
    try:
        cgroups = replace(detect_cgroups(), mode=CgroupMode.V2, mounts={"memory": trees[0]})
        yield cgroups, f"/{name}", directory
    finally:
        with contextlib.suppress(FileNotFoundError):
            directory.rmdir()


@pytest.mark.machine
async def test_notifier_v2_cgroup_removed_ends_watch_and_update_replaces_it(
    unified: tuple[Cgroups, str, Path],
) -> None:
    """Verify that the PSI trigger of a removed cgroup, which is readable for ever, is closed."""
    cgroups, name, directory = unified
    calls = list[None]()
    notifier = MemoryNotifier(cgroups, name, lambda: calls.append(None))
    before = open_files()
    try:
        notifier.update([POLICY], NodeMeasurements())
        watching = open_files()
        assert watching > before
        directory.rmdir()
        async with asyncio.timeout(20):
            while open_files() > before:
                await asyncio.sleep(0.01)
        notifier.update([POLICY], NodeMeasurements())
        directory.mkdir()
        notifier.update([POLICY], NodeMeasurements())
        assert open_files() == watching
        # One that comes back before the loop runs again is replaced as well.
        (known,) = notifier._watches.values()
        directory.rmdir()
        directory.mkdir()
        notifier.update([POLICY], NodeMeasurements())
        assert (known.is_closed, open_files()) == (True, watching)
    finally:
        notifier.close()
    assert (open_files(), calls) == (before, [])


def test_usage_at_threshold_includes_page_cache() -> None:
    record = cgroup("1Gi", "4Gi", active_file="1Gi")
    assert usage_at_threshold(threshold("memory.available", "1Gi"), record) == 3 * GI + 100 * MI
    with_cache = threshold("memory.availableWithCache", "1Gi")
    assert usage_at_threshold(with_cache, record) == 4 * GI + 100 * MI
    assert usage_at_threshold(with_cache, None) is None


@needs_v1
@pytest.mark.machine
@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="needs PSI")
async def test_notifier_v2_pressure_stalls_notify(pods: tuple[Cgroups, str, Path], tmp_path: Path) -> None:
    """Verify that a PSI trigger of the host notifies, with a process whose page cache is too small."""
    directory, notified = pods[2], asyncio.Event()
    (directory / "memory.limit_in_bytes").write_text("8M")
    file = tmp_path / "file"
    with file.open("wb") as written:
        written.write(os.urandom(64 * MI))
        os.fsync(written.fileno())
        # Otherwise the page cache belongs to this process.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    notifier = MemoryNotifier(replace(pods[0], mode=CgroupMode.V2), pods[1], notified.set)
    before = open_files()
    notifier.update([threshold("memory.available", "1")], NodeMeasurements())
    assert open_files() > before
    try:
        async with reading(directory, file), asyncio.timeout(60):
            await notified.wait()
    finally:
        notifier.close()
