"""Measurement of file systems: sizes, counters, time limits and concurrent callers."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pykubelet.stats.storage import filesystems
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.stats.storage.mounted_filesystems import MAX_FILESYSTEMS
from pykubelet.util.tasks import TaskScope
from tests.support.threads import forbid_threads
from tests.unit.stats.test_mounted_filesystems import HOST, line

DISKSTATS = """\
   7       0 loop0 1 2 3 4 5 6 7 8 9 10 11
 254       0 vda 952365 70654 23755538 4953900 6557290 3116513 147634048 4561448 3 1640616 10497482 2 6
 253       0 dm-0 21 22 23 24 25 26 27 28 29 30 31
   8      16 sdb short
"""


class Host:
    """A made-up /proc and /sys, with a statvfs that counts its calls and can hang."""

    def __init__(self, directory: Path, tasks: TaskScope) -> None:
        self.tasks = tasks
        self.proc, self.sys = directory / "proc", directory / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.sys / "dev/block").mkdir(parents=True)
        (self.proc / "diskstats").write_text(DISKSTATS)
        self.calls: list[bytes] = []
        self.hanging: set[bytes] = set()
        self.release = threading.Event()

    def mount(self, text: bytes) -> None:
        (self.proc / "self/mountinfo").write_bytes(text)

    def link(self, number: str, target: str) -> None:
        (self.sys / "dev/block" / number).symlink_to(f"../../devices/pci0/{target}")

    def statvfs(self, point: bytes) -> os.statvfs_result:
        self.calls.append(point)
        if point in self.hanging:
            self.release.wait(60)
        if point == b"/gone":
            raise FileNotFoundError(point)
        return os.statvfs_result((4096, 1024, 100, 60, 50, 40, 30, 20, 0, 255))

    def filesystems(self) -> Filesystems:
        return Filesystems(
            Path("/var/lib/kubelet"), self.tasks, proc=self.proc, sys=self.sys, statvfs=self.statvfs
        )


@pytest.fixture
async def host(tmp_path: Path, tasks: TaskScope) -> AsyncIterator[Host]:
    made = Host(tmp_path, tasks)
    made.mount(HOST)
    yield made
    made.release.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_refresh_reports_sizes_and_counters(host: Host) -> None:
    found = host.filesystems()
    assert found.all() == ()
    await found.refresh(0)
    shm, vda, _ = found.all()
    assert (vda.device, vda.major, vda.minor) == ("/dev/vda", 254, 0)
    assert (vda.capacity, vda.used, vda.available) == (102400, 40960, 51200)
    assert (vda.inodes, vda.inodes_free, vda.inodes_used) == (40, 30, 10)
    assert (vda.io.reads, vda.io.sectors_read, vda.io.read_ms) == (952365, 23755538, 4953900)
    assert (vda.io.in_progress, vda.io.io_ms, vda.io.weighted_io_ms) == (3, 1640616, 10497482)
    assert shm.io.reads == 0
    assert abs(vda.time - time.time()) < 20


async def test_refresh_counters_found_by_number_for_mapped_device(host: Host) -> None:
    host.mount(line("/", "xfs", "/dev/mapper/vg-root", "253:0") + line("/b", "xfs", "/dev/sdb", "8:16"))
    found = host.filesystems()
    await found.refresh(0)
    assert [(usage.device, usage.io.reads) for usage in found.all()] == [
        ("/dev/mapper/vg-root", 21),
        ("/dev/sdb", 0),
    ]


async def test_refresh_without_diskstats_counters_are_zero(host: Host) -> None:
    (host.proc / "diskstats").unlink()
    found = host.filesystems()
    await found.refresh(0)
    assert [usage.io.reads for usage in found.all()] == [0, 0, 0]


async def test_refresh_fresh_result_is_not_measured_again(host: Host) -> None:
    found = host.filesystems()
    await found.refresh(0)
    await found.refresh(60)
    assert len(host.calls) == 3
    await found.refresh(0)
    assert len(host.calls) == 6


async def test_refresh_concurrent_callers_share_one_measurement(host: Host) -> None:
    found = host.filesystems()
    host.hanging = {b"/"}
    callers = [asyncio.create_task(found.refresh(0)) for _ in range(20)]
    await until(lambda: b"/" in host.calls)
    callers[0].cancel()
    host.release.set()
    await asyncio.gather(*callers[1:])
    assert len(host.calls) == 3
    assert [usage.device for usage in found.all()] == ["/dev/shm", "/dev/vda", "/sys/fs/cgroup"]


async def test_refresh_unmounted_filesystem_disappears(host: Host) -> None:
    found = host.filesystems()
    host.mount(HOST + line("/gone"))
    await found.refresh(0)
    assert "/gone" not in [usage.device for usage in found.all()]
    host.mount(line("/", "ext4", "/dev/vda", "254:0"))
    await found.refresh(0)
    assert [usage.device for usage in found.all()] == ["/dev/vda"]


async def test_refresh_mount_table_missing_returns_nothing(host: Host) -> None:
    (host.proc / "self/mountinfo").unlink()
    found = host.filesystems()
    await found.refresh(0)
    assert found.all() == ()
    host.mount(HOST)
    await found.refresh(0)
    assert len(found.all()) == 3


async def test_refresh_hanging_server_omitted_and_not_called_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "STATVFS_TIMEOUT_SECONDS", 1.0)
    host.mount(HOST + line("/a", "nfs4", "dead:/a", "0:61") + line("/b", "nfs", "alive:/b", "0:62"))
    host.hanging = {b"/a"}
    found = host.filesystems()
    for _ in range(5):
        await found.refresh(0)
        expected = ["/dev/shm", "/dev/vda", "/sys/fs/cgroup", "alive:/b"]
        assert [usage.device for usage in found.all()] == expected
    assert host.calls.count(b"/a") == 1
    assert host.calls.count(b"/b") == 5
    host.release.set()
    await until(lambda: b"/a" not in found._in_progress)
    await found.refresh(0)
    assert found.all()[3].device == "dead:/a"


async def test_refresh_hanging_local_filesystem_others_measured_next_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "LOCAL_TIMEOUT_SECONDS", 1.0)
    host.hanging = {b"/dev/shm"}
    found = host.filesystems()
    await found.refresh(0)
    assert found.all() == ()
    await found.refresh(0)
    assert [usage.device for usage in found.all()] == ["/dev/vda", "/sys/fs/cgroup"]
    assert host.calls.count(b"/dev/shm") == 1


async def test_refresh_many_hanging_servers_bounded_threads(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "STATVFS_TIMEOUT_SECONDS", 1.0)
    points = [f"/nfs/{number}" for number in range(100)]
    host.mount(HOST + b"".join(line(point, "nfs4", f"s:{point}") for point in points))
    host.hanging = {point.encode() for point in points}
    found = host.filesystems()
    for _ in range(3):
        await found.refresh(0)
    assert len(found.all()) == 3
    assert sum(point in host.hanging for point in host.calls) == filesystems.MAX_HANGING


async def test_refresh_twenty_thousand_mounts_does_not_block_loop(host: Host) -> None:
    host.mount(HOST + b"".join(line(f"/mnt/{number}") for number in range(20_000)))
    found = host.filesystems()
    task = asyncio.create_task(found.refresh(0))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(found.all()) == MAX_FILESYSTEMS
    assert turns >= 5  # the parsing thread sleeps 20 times


async def test_of_directory_real_directory_returns_its_filesystem(tmp_path: Path, tasks: TaskScope) -> None:
    found = Filesystems(Path("/var/lib/kubelet"), tasks)
    usage = await found.of_directory(tmp_path)
    assert usage is not None
    device = tmp_path.stat().st_dev
    sizes = os.statvfs(tmp_path)
    assert usage.capacity == sizes.f_blocks * sizes.f_frsize
    if (usage.major, usage.minor) != (0, 0):
        assert (usage.major, usage.minor) == (os.major(device), os.minor(device))
    assert usage in found.all() or usage.device


async def test_of_directory_type_unknown_to_cadvisor_is_measured(tasks: TaskScope) -> None:
    usage = await Filesystems(Path("/var/lib/kubelet"), tasks).of_directory(Path("/proc/self"))
    assert usage is not None
    assert usage.device == "proc"


async def test_of_directory_missing_directory_returns_none(tmp_path: Path, tasks: TaskScope) -> None:
    assert await Filesystems(Path("/var/lib/kubelet"), tasks).of_directory(tmp_path / "missing") is None


async def test_of_directory_hanging_returns_none_without_second_call(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "STATVFS_TIMEOUT_SECONDS", 1.0)
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    host.mount(line("/a", "nfs4", "dead:/a", number))
    host.hanging = {b"/a"}
    found = host.filesystems()
    assert await found.of_directory(tmp_path) is None
    assert await asyncio.gather(*(found.of_directory(tmp_path) for _ in range(5))) == [None] * 5
    assert host.calls.count(b"/a") == 2  # of refresh, and of the first search
    host.release.set()
    await until(lambda: not found._in_progress)
    await until(lambda: all(task.done() for task, _ in found._lookups.values()))
    usage = await found.of_directory(tmp_path, max_age=0)
    assert usage is not None
    assert usage.device == "dead:/a"


async def test_device_name_disk_partition_loop_and_unknown(host: Host) -> None:
    host.link("254:0", "block/vda")
    host.link("253:0", "virtual/block/dm-0")
    host.link("8:1", "block/sda/sda1")
    host.link("7:0", "virtual/block/loop0")
    host.mount(HOST + line("/m", "xfs", "/dev/mapper/vg", "253:0") + line("/s", "ext4", "/dev/sda1", "8:1"))
    found = host.filesystems()
    await found.refresh(0)
    assert found.device_name(254, 0) == "/dev/vda"
    assert found.device_name(253, 0) == "/dev/dm-0"
    assert found.device_name(253, 0, filesystems_first=True) == "/dev/mapper/vg"
    assert found.device_name(8, 1) == "/dev/sda1"
    assert found.device_name(7, 0) == ""
    assert found.device_name(9, 9) == ""


async def test_refresh_on_this_host_reports_root_filesystem_each_time(tasks: TaskScope) -> None:
    found, device = Filesystems(Path("/var/lib/kubelet"), tasks), Path("/").stat().st_dev
    for _ in range(3):  # the table is read the first time, and when it has changed
        await found.refresh(0)
        assert (os.major(device), os.minor(device)) in [(usage.major, usage.minor) for usage in found.all()]


async def test_filesystems_scope_left_while_server_hangs_callers_return(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "STATVFS_TIMEOUT_SECONDS", 600.0)
    device = tmp_path.stat().st_dev
    host.mount(line("/a", "nfs4", "dead:/a", f"{os.major(device)}:{os.minor(device)}"))
    found = host.filesystems()
    await found.refresh(600)
    host.hanging = {b"/a"}
    found._usages = ()
    async with TaskScope() as scope:
        found._tasks = scope
        search = asyncio.create_task(found.of_directory(tmp_path, max_age=600))
        await until(lambda: host.calls.count(b"/a") == 2)
    async with asyncio.timeout(20):
        assert await search is None


async def test_filesystems_measurement_fails_error_reaches_callers_only(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    found = host.filesystems()
    monkeypatch.setattr(found, "_measure_all", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            await found.refresh(0)


@pytest.mark.parametrize("max_age", [0.0, 10.0])
async def test_of_directory_without_further_threads_returns_none_and_recovers(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_age: float
) -> None:
    found = host.filesystems()
    with monkeypatch.context() as patch:
        forbid_threads(patch)
        assert await found.of_directory(tmp_path, max_age) is None
    # A failed task would have ended the scope and with it all other tasks.
    await host.tasks.start(found.refresh(0), name="refresh")
    assert found.all()
