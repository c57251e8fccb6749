"""Reader of cgroups v1, on directory trees."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from pykubelet.stats.cgroups.host import REUSE_SECONDS
from pykubelet.stats.cgroups.readers import CgroupReader, cgroup_reader_factory
from pykubelet.stats.samples import CgroupError, CgroupGone, Details, DeviceIo, HugePages, Limits
from tests.support.cgroup_trees import BOOT, V1_MEMORY_STAT, open_descriptors, reader_host, v1_tree

PATH = "/kubepods/pod1"


def reader(
    tmp_path: Path, changes: Mapping[str, str | None] = {}, *, path: str = PATH, descriptors: int = 100
) -> CgroupReader:
    cgroups = v1_tree(tmp_path, changes)
    return cgroup_reader_factory(cgroups, reader_host(tmp_path, descriptors=descriptors))(path)


def directory(tmp_path: Path, controller: str) -> Path:
    return tmp_path / "v1" / controller / PATH.strip("/")


def test_read_usage_hierarchical_cgroup_has_hierarchical_memory_and_own_faults(tmp_path: Path) -> None:
    usage = reader(tmp_path).read_usage()
    assert (usage.cpu, usage.memory, usage.working_set) == (123456789, 131072, 101072)
    assert (usage.rss, usage.cache, usage.mapped_file, usage.swap) == (81920, 40960, 10240, 5120)
    assert (usage.active_file, usage.inactive_file) == (2000, 30000)
    assert (usage.page_faults, usage.major_page_faults) == (71, 3)


def test_read_usage_flat_accounting_has_own_memory_and_hierarchical_lru(tmp_path: Path) -> None:
    usage = reader(tmp_path, {"memory/memory.use_hierarchy": "0\n"}).read_usage()
    assert (usage.rss, usage.cache, usage.mapped_file, usage.swap) == (8192, 4096, 1024, 512)
    assert (usage.active_file, usage.working_set) == (2000, 101072)


def test_read_usage_more_inactive_than_charged_has_empty_working_set(tmp_path: Path) -> None:
    assert reader(tmp_path, {"memory/memory.usage_in_bytes": "29999\n"}).read_usage().working_set == 0


def test_read_usage_negative_counter_is_zero(tmp_path: Path) -> None:
    stat = V1_MEMORY_STAT.replace("total_rss 81920", "total_rss -4096")
    assert reader(tmp_path, {"memory/memory.stat": stat}).read_usage().rss == 0


def test_read_usage_idle_cgroup_memory_statistics_reused_for_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tested = reader(tmp_path)
    first = tested.read_usage()
    changed = V1_MEMORY_STAT.replace("total_inactive_file 30000", "total_inactive_file 20000")
    assert changed != V1_MEMORY_STAT
    (directory(tmp_path, "memory") / "memory.stat").write_text(changed)
    now[0] += REUSE_SECONDS - 1
    assert tested.read_usage() == msgspec.structs.replace(first, time=now[0])
    assert tested.read_usage(fresh=True).inactive_file == 20000
    (directory(tmp_path, "memory") / "memory.stat").write_text(V1_MEMORY_STAT)
    assert tested.read_usage().inactive_file == 20000
    (directory(tmp_path, "memory") / "memory.stat").write_text(changed)
    now[0] += REUSE_SECONDS
    assert tested.read_usage().inactive_file == 20000
    (directory(tmp_path, "memory") / "memory.stat").write_text(V1_MEMORY_STAT)
    (directory(tmp_path, "memory") / "memory.usage_in_bytes").write_text("131073\n")
    assert tested.read_usage().inactive_file == 30000


@pytest.mark.parametrize("descriptors", [0, 2, 100])
def test_read_usage_changed_files_returns_new_values(tmp_path: Path, descriptors: int) -> None:
    tested = reader(tmp_path, descriptors=descriptors)
    tested.read_usage()
    (directory(tmp_path, "cpuacct") / "cpuacct.usage").write_text("987654321\n")
    changed = V1_MEMORY_STAT.replace("total_rss 81920", "total_rss 81921\nnew_key 7")
    (directory(tmp_path, "memory") / "memory.stat").write_text(changed)
    usage = tested.read_usage()
    assert (usage.cpu, usage.rss, usage.cache, usage.inactive_file) == (987654321, 81921, 40960, 30000)


def test_read_all_files_returns_details(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    usage, details = tested.read()
    assert usage.cpu == 123456789
    assert details == Details(
        cpu_user=1_500_000_000,
        cpu_system=250_000_000,
        periods=10,
        throttled_periods=4,
        throttled=5000,
        max_memory=262144,
        memory_failures=9,
        kernel_memory=16384,
        threads=12,
        max_threads=0,
        io=(
            DeviceIo(
                major=254,
                minor=0,
                bytes={"Read": 12288, "Write": 16384, "Total": 28672},
                operations={"Read": 3, "Write": 4, "Total": 7},
            ),
        ),
        huge_pages=(HugePages(size="2MB", usage=2097152, max_usage=4194304, failures=1),),
    )
    assert [tested.read()[1], tested.read()[1]] == [details, details]


def test_read_reserved_huge_pages_are_preferred(tmp_path: Path) -> None:
    reserved = {
        f"hugetlb/hugetlb.2MB.rsvd.{name}": "77\n"
        for name in ("usage_in_bytes", "max_usage_in_bytes", "failcnt")
    }
    _, details = reader(tmp_path, reserved).read()
    assert details.huge_pages == (HugePages(size="2MB", usage=77, max_usage=77, failures=77),)


def test_read_bfq_counters_are_preferred(tmp_path: Path) -> None:
    bfq = {
        "blkio/blkio.bfq.io_serviced_recursive": "8:0 Read 1\nTotal 1\n",
        "blkio/blkio.bfq.io_service_bytes_recursive": "8:0 Read 512\nTotal 512\n",
    }
    _, details = reader(tmp_path, bfq).read()
    assert details.io == (DeviceIo(major=8, minor=0, bytes={"Read": 512}, operations={"Read": 1}),)


def test_read_bfq_without_devices_falls_back_to_throttling_counters(tmp_path: Path) -> None:
    bfq = {
        "blkio/blkio.bfq.io_serviced_recursive": "Total 0\n",
        "blkio/blkio.bfq.io_service_bytes_recursive": "Total 0\n",
    }
    _, details = reader(tmp_path, bfq).read()
    assert [device.major for device in details.io] == [254]


def test_read_cfq_counters_fill_all_tables(tmp_path: Path) -> None:
    names = ("sectors", "io_service_time", "io_merged", "io_queued", "io_serviced", "io_service_bytes")
    cfq: dict[str, str | None] = {f"blkio/blkio.{name}_recursive": "8:0 Read 5\nTotal 5\n" for name in names}
    cfq["blkio/blkio.sectors_recursive"] = "8:0 6\n"
    _, details = reader(tmp_path, cfq).read()
    five = {"Read": 5}
    assert details.io == (
        DeviceIo(
            major=8,
            minor=0,
            bytes=five,
            operations=five,
            merged=five,
            queued=five,
            service_time=five,
            sectors={"Count": 6},
        ),
    )


def test_read_malformed_device_lines_are_ignored(tmp_path: Path) -> None:
    lines = "\n8:0\nx:y Read 1\n8:0 Read z\n8:0 Read 2 3 4\n9:1 Write 5\n\xff\nTotal 0\n"
    io = {"blkio/blkio.throttle.io_serviced_recursive": lines}
    _, details = reader(tmp_path, io).read()
    assert details.io[0] == DeviceIo(major=9, minor=1, operations={"Write": 5})


def test_read_large_device_table_is_bounded(tmp_path: Path) -> None:
    lines = "".join(f"{n}:0 Read 1\n" for n in range(20_000))
    _, details = reader(tmp_path, {"blkio/blkio.throttle.io_serviced_recursive": lines}).read()
    assert 3000 < len(details.io) < 10_000


def test_read_missing_controllers_are_zeros(tmp_path: Path) -> None:
    cgroups = v1_tree(tmp_path)
    for name in ("pids", "blkio", "hugetlb", "memory"):
        del cgroups.mounts[name]
    usage, details = cgroup_reader_factory(cgroups, reader_host(tmp_path))(PATH).read()
    assert (usage.cpu, usage.memory, usage.rss) == (123456789, 0, 0)
    assert (details.periods, details.threads, details.io, details.huge_pages) == (10, 0, (), ())


def test_read_missing_files_are_zeros(tmp_path: Path) -> None:
    missing = dict.fromkeys(
        ("memory/memory.kmem.usage_in_bytes", "memory/memory.stat", "cpu/cpu.stat", "pids/pids.max")
    )
    usage, details = reader(tmp_path, missing).read()
    assert (usage.memory, usage.working_set, usage.rss) == (131072, 131072, 0)
    assert (details.kernel_memory, details.periods, details.max_threads) == (0, 0, 0)


def test_read_usage_hierarchy_without_the_cgroup_counts_as_zeros(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    shutil.rmtree(directory(tmp_path, "memory"))
    assert tested.read_usage().memory == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cpuacct/cpuacct.usage", "many\n"),
        ("cpuacct/cpuacct.usage", ""),
        ("memory/memory.usage_in_bytes", "1 2\n"),
        ("memory/memory.stat", "total_rss\ntotal_cache 1\n"),
        ("memory/memory.stat", V1_MEMORY_STAT.replace("81920", "lots")),
        ("memory/memory.stat", "\x00" * 300_000),
    ],
)
def test_read_usage_malformed_content_raises_error_with_path(tmp_path: Path, name: str, content: str) -> None:
    tested = reader(tmp_path, {name: content})
    with pytest.raises(CgroupError, match=name.partition("/")[2]) as caught:
        tested.read_usage()
    assert not isinstance(caught.value, CgroupGone)
    assert len(str(caught.value)) < 500


def test_read_usage_error_is_followed_by_success_after_repair(tmp_path: Path) -> None:
    tested = reader(tmp_path, {"cpuacct/cpuacct.usage": "many\n"})
    with pytest.raises(CgroupError):
        tested.read_usage()
    (directory(tmp_path, "cpuacct") / "cpuacct.usage").write_text("5\n")
    assert tested.read_usage().cpu == 5


def test_read_usage_absent_cgroup_raises_gone(tmp_path: Path) -> None:
    with pytest.raises(CgroupGone):
        reader(tmp_path, path="/kubepods/absent").read_usage()


@pytest.mark.parametrize("removed", ["memory", "cpuacct"])
def test_read_usage_directory_removed_after_read_raises_gone(tmp_path: Path, removed: str) -> None:
    tested = reader(tmp_path, descriptors=0)
    tested.read_usage()
    shutil.rmtree(directory(tmp_path, removed))
    with pytest.raises(CgroupGone):
        tested.read_usage()


def test_read_limits_returns_limits(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    os.utime(directory(tmp_path, "memory"), (BOOT + 60, BOOT + 60))
    limits = tested.read_limits()
    assert limits == Limits(
        created=BOOT + 60,
        cpu_shares=204,
        cpu_period=100000,
        cpu_quota=20000,
        memory_limit=134217728,
        memory_swap_limit=268435456,
        memory_reservation=9223372036854771712,
        max_processes=2**64 - 1,
    )
    assert tested.read_limits() == limits


def test_read_limits_no_quota_is_zero(tmp_path: Path) -> None:
    assert reader(tmp_path, {"cpu/cpu.cfs_quota_us": "-1\n"}).read_limits().cpu_quota == 0


def test_read_limits_older_than_boot_is_boot_time(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    os.utime(directory(tmp_path, "cpu"), (5, 5))
    assert tested.read_limits().created == BOOT


def test_read_limits_without_controllers_reports_absence(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    shutil.rmtree(directory(tmp_path, "cpu"))
    shutil.rmtree(directory(tmp_path, "memory"))
    limits = tested.read_limits()
    assert (limits.has_cpu, limits.has_memory, limits.cpu_shares, limits.memory_limit) == (False, False, 0, 0)


def test_read_limits_removed_cgroup_raises_gone(tmp_path: Path) -> None:
    with pytest.raises(CgroupGone):
        reader(tmp_path, path="/kubepods/absent").read_limits()


def test_read_limits_of_root_are_memory_and_swap_of_host(tmp_path: Path) -> None:
    limits = reader(tmp_path, path="/").read_limits()
    assert (limits.memory_limit, limits.memory_swap_limit) == (1000 * 1024, 400 * 1024)
    assert (limits.max_processes, limits.has_memory) == (0, True)


def test_read_root_has_no_threads(tmp_path: Path) -> None:
    assert reader(tmp_path, path="/").read()[1].threads == 0


def test_close_releases_descriptors_and_later_read_reopens(tmp_path: Path) -> None:
    host = reader_host(tmp_path)
    tested = cgroup_reader_factory(v1_tree(tmp_path), host)(PATH)
    before = open_descriptors()
    for _ in range(3):
        tested.read()
        tested.read_limits()
    assert host.budget.used == open_descriptors() - before > 10
    tested.close()
    assert (host.budget.used, open_descriptors()) == (0, before)
    assert tested.read_usage().cpu == 123456789
    tested.close()


def test_readers_exceeding_budget_keep_no_more_descriptors(tmp_path: Path) -> None:
    host = reader_host(tmp_path, descriptors=10)
    factory = cgroup_reader_factory(v1_tree(tmp_path), host)
    readers = [factory(PATH) for _ in range(20)]
    for _ in range(3):
        for tested in readers:
            assert tested.read()[1].threads == 12
    assert host.budget.used == 10
    for tested in readers:
        tested.close()
    assert host.budget.used == 0


def test_read_details_once_keeps_only_usage_files_open(tmp_path: Path) -> None:
    host = reader_host(tmp_path)
    tested = cgroup_reader_factory(v1_tree(tmp_path), host)(PATH)
    tested.read()
    assert host.budget.used == 3
    tested.close()
