"""Readers on real cgroups: values of real processes, and removal while a reader has files open."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.stats.cgroups.files import DescriptorBudget
from pykubelet.stats.cgroups.host import ReaderHost, boot_time
from pykubelet.stats.cgroups.readers import CgroupReader, cgroup_reader_factory
from pykubelet.stats.cgroups.v2 import CgroupV2Reader
from pykubelet.stats.network import NamespaceGone, NetworkReader
from pykubelet.stats.processes import ProcessScan, read_pids
from pykubelet.stats.samples import CgroupGone
from tests.support.cgroups import needs_v1, root

pytestmark = [pytest.mark.machine, needs_v1]
__all__ = ["root"]

UNIFIED = Path("/sys/fs/cgroup/unified")
MIB = 1 << 20
CONTROLLERS = ("cpu", "cpuacct", "memory", "pids", "blkio")
_WORK = """
import socket, sys, time
sys.stdin.readline()
held = bytearray(64 << 20)
sockets = [socket.socket() for _ in range(9)]
ended = time.process_time() + 0.3
while time.process_time() < ended:
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        time.sleep(0.01)


def make_cgroup(path: str) -> list[Path]:
    """Create a cgroup in the hierarchies that readers use, and return its directories."""
    mounts = detect_cgroups().mounts
    directories = sorted({mounts[name] / path.strip("/") for name in CONTROLLERS if name in mounts})
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    return directories


def remove_cgroup(directories: list[Path]) -> None:
    for directory in directories:
        wait_until(lambda: _removed(directory))  # noqa: B023


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def worker(directories: list[Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in a cgroup that has used the processor, and holds memory and sockets."""
    command = [sys.executable, "-c", _WORK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for directory in directories:
                (directory / "cgroup.procs").write_text(str(process.pid))
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def v1_reader(path: str, *, descriptors: int = 100) -> CgroupReader:
    host = ReaderHost(budget=DescriptorBudget(descriptors), boot_time=boot_time())
    return cgroup_reader_factory(detect_cgroups(), host)(path)


@pytest.mark.parametrize("descriptors", [0, 100])
def test_read_working_process_reports_its_usage(root: str, descriptors: int) -> None:
    path = f"{root}/pod"
    directories = make_cgroup(path)
    reader = v1_reader(path, descriptors=descriptors)
    idle = reader.read_usage()
    with worker(directories):
        usage, details = reader.read()
        parent, _ = v1_reader(root).read()
        assert reader.procs_file is not None
        counts = ProcessScan().count(reader.procs_file)
    assert usage.cpu - idle.cpu > 250_000_000
    assert details.cpu_user + details.cpu_system > 250_000_000
    assert usage.rss > 64 * MIB
    assert usage.memory >= usage.working_set > 64 * MIB
    assert details.max_memory >= usage.memory - MIB
    assert usage.page_faults > 100
    assert details.kernel_memory > 0
    assert parent.rss >= 64 * MIB
    assert parent.cpu >= usage.cpu
    assert parent.page_faults == 0
    assert (details.threads, details.max_threads) == (1, 0)
    assert (counts.processes, counts.sockets) == (1, 9)
    assert counts.file_descriptors == 12
    reader.close()


def test_read_limits_changed_limits_are_reported(root: str) -> None:
    cgroups = detect_cgroups()
    make_cgroup(root)
    reader = v1_reader(root)
    assert reader.read_limits().cpu_quota == 0
    assert reader.read_limits().memory_limit > 1 << 62
    for controller, name, value in (
        ("cpu", "cpu.shares", "512"),
        ("cpu", "cpu.cfs_quota_us", "50000"),
        ("memory", "memory.limit_in_bytes", str(128 * MIB)),
        ("pids", "pids.max", "77"),
    ):
        (cgroups.path(controller, root) / name).write_text(value)
    limits = reader.read_limits()
    assert (limits.cpu_shares, limits.cpu_quota, limits.cpu_period) == (512, 50000, 100000)
    assert (limits.memory_limit, limits.max_processes) == (128 * MIB, 77)
    assert time.time() - 600 < limits.created <= time.time()
    assert reader.read()[1].max_threads == 77
    reader.close()


def test_read_throttled_process_reports_throttling(root: str) -> None:
    directories = make_cgroup(root)
    (detect_cgroups().path("cpu", root) / "cpu.cfs_quota_us").write_text("20000")
    reader = v1_reader(root)
    with worker(directories):
        _, details = reader.read()
    assert details.periods >= details.throttled_periods > 0
    assert details.throttled > 1_000_000
    reader.close()


@pytest.mark.parametrize("read", ["read", "read_usage", "read_limits"])
@pytest.mark.parametrize("descriptors", [0, 100])
def test_read_removed_cgroup_raises_gone_and_keeps_nothing_open(
    root: str, read: str, descriptors: int
) -> None:
    directories = make_cgroup(root)
    host = ReaderHost(budget=DescriptorBudget(descriptors), boot_time=boot_time())
    reader = cgroup_reader_factory(detect_cgroups(), host)(root)
    for _ in range(3):
        reader.read()
        reader.read_limits()
    assert host.budget.used == 0 if not descriptors else host.budget.used > 10
    remove_cgroup(directories)
    with pytest.raises(CgroupGone):
        getattr(reader, read)()
    assert host.budget.used == 0
    with pytest.raises(CgroupGone):
        getattr(reader, read)()


def test_read_usage_cgroup_removed_in_one_hierarchy_raises_gone(root: str) -> None:
    make_cgroup(root)
    reader = v1_reader(root)
    reader.read_usage()
    remove_cgroup([detect_cgroups().path("memory", root)])
    with pytest.raises(CgroupGone):
        reader.read_usage()


def test_read_usage_recreated_cgroup_is_read_again(root: str) -> None:
    directories = make_cgroup(root)
    reader = v1_reader(root)
    with worker(directories):
        assert reader.read_usage().cpu > 0
    remove_cgroup(directories)
    make_cgroup(root)
    assert reader.read_usage().cpu == 0
    reader.close()


def test_read_cgroups_removed_concurrently_only_raise_gone(root: str) -> None:
    """Verify that cgroups which another process creates and removes never cause another error."""
    make_cgroup(root)
    busy = make_cgroup(f"{root}/busy")
    remove_cgroup(busy)
    churn = (
        "import os, sys\nprint('ready', flush=True)\nwhile True:\n"
        "    for path in sys.argv[1:]:\n        os.mkdir(path)\n"
        "    for path in sys.argv[1:]:\n        os.rmdir(path)\n"
    )
    reader = v1_reader(f"{root}/busy")
    outcomes = {True: 0, False: 0}
    with subprocess.Popen([sys.executable, "-c", churn, *map(str, busy)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            deadline = time.monotonic() + 60
            while min(outcomes.values()) < 50 and time.monotonic() < deadline:
                try:
                    reader.read()
                    reader.read_limits()
                except CgroupGone:
                    outcomes[False] += 1
                else:
                    outcomes[True] += 1
        finally:
            process.kill()
    assert min(outcomes.values()) > 0
    reader.close()


def test_read_root_cgroup_returns_usage_of_host() -> None:
    reader = v1_reader("/")
    usage, details = reader.read()
    limits = reader.read_limits()
    assert usage.cpu > 0
    assert limits.memory_limit > usage.memory > usage.working_set > 0
    assert limits.memory_limit == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (details.threads, limits.max_processes) == (0, 0)
    reader.close()


def test_read_pids_removed_cgroup_raises_gone(root: str) -> None:
    directories = make_cgroup(root)
    path = detect_cgroups().path("cpu", root) / "cgroup.procs"
    assert read_pids(path) == []
    remove_cgroup(directories)
    with pytest.raises(CgroupGone):
        read_pids(path)


@pytest.mark.skipif(not (UNIFIED / "cgroup.procs").exists(), reason="needs a mounted cgroup v2 hierarchy")
def test_v2_reader_without_controllers_reports_processor_time_and_pressure(root: str) -> None:
    directory = UNIFIED / root.strip("/")
    directory.mkdir()
    host = ReaderHost(budget=DescriptorBudget(100), boot_time=boot_time())
    reader = CgroupV2Reader(root, UNIFIED, host)
    with worker([directory]):
        usage, details = reader.read()
        assert usage.cpu > 250_000_000
        assert details.cpu_user + details.cpu_system > 250_000_000
        assert (usage.memory, details.threads) == (0, 1)
        if (directory / "cpu.pressure").exists():
            wait_until(lambda: reader.read_usage().cpu_psi.some.total > 0)
            # Hiding the pressure files invalidates open descriptors of a cgroup that still exists.
            if (directory / "cgroup.pressure").exists():
                (directory / "cgroup.pressure").write_text("0")
                assert reader.read_usage().cpu_psi.some.total == 0
    assert not reader.read_limits().has_memory
    remove_cgroup([directory])
    with pytest.raises(CgroupGone):
        reader.read_usage()
    assert host.budget.used == 0


def test_network_reader_own_namespace_reports_its_interfaces_until_the_process_ends() -> None:
    script = (
        "ip link add eth7 type veth peer name eth8 && ip link set eth7 up && echo ready && exec sleep 300"
    )
    command = ["unshare", "--net", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            reader = NetworkReader(process.pid)
            assert [found.name for found in reader.read()] == ["eth8", "eth7"]
        finally:
            process.kill()
    with pytest.raises(NamespaceGone):
        reader.read()


def test_network_reader_reused_pid_raises_gone() -> None:
    """Verify that a reader never reads the namespace of a later process with the same pid."""
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    with subprocess.Popen(["sleep", "300"]) as first:
        reader = NetworkReader(first.pid)
        first.kill()
    for _ in range(200):
        try:
            last_pid.write_text(str(first.pid - 1))
        except OSError as err:
            pytest.skip(f"pids cannot be chosen: {err}")
        with subprocess.Popen(["sleep", "300"]) as second:
            second_pid = second.pid
            try:
                if second_pid == first.pid:
                    with pytest.raises(NamespaceGone):
                        reader.read()
                    return
            finally:
                second.kill()
    pytest.skip("other processes took the pid")


def test_process_scan_sockets_of_several_processes_are_counted(root: str) -> None:
    directories = make_cgroup(root)
    with worker(directories), worker(directories), socket.socket():
        counts = ProcessScan().count(detect_cgroups().path("cpu", root) / "cgroup.procs")
    assert (counts.processes, counts.sockets, counts.file_descriptors) == (2, 18, 24)
