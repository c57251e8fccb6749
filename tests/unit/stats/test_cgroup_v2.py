"""Reader of cgroups v2, on directory trees."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from pykubelet.stats.cgroups.readers import CgroupReader, cgroup_reader_factory
from pykubelet.stats.cgroups.v2 import parse_psi
from pykubelet.stats.samples import (
    NO_PSI,
    CgroupError,
    CgroupGone,
    Details,
    DeviceIo,
    HugePages,
    Psi,
    PsiLine,
)
from tests.support.cgroup_trees import V2_FILES, reader_host, v2_tree

PATH = "/kubepods/pod1"
NO_MEMORY: dict[str, str | None] = dict.fromkeys(name for name in V2_FILES if name.startswith("memory."))


def reader(
    tmp_path: Path, changes: Mapping[str, str | None] = {}, *, path: str = PATH, descriptors: int = 100
) -> CgroupReader:
    cgroups = v2_tree(tmp_path, changes, cgroup=path.strip("/"))
    return cgroup_reader_factory(cgroups, reader_host(tmp_path, descriptors=descriptors))(path)


def test_read_usage_returns_processor_time_memory_and_pressure(tmp_path: Path) -> None:
    usage = reader(tmp_path).read_usage()
    assert (usage.cpu, usage.memory, usage.working_set) == (123456000, 131072, 101072)
    assert (usage.rss, usage.cache, usage.mapped_file, usage.swap) == (81920, 40960, 10240, 5120)
    assert (usage.active_file, usage.inactive_file) == (2000, 30000)
    assert (usage.page_faults, usage.major_page_faults) == (71, 3)
    some = PsiLine(avg10=1.5, avg60=0.25, avg300=0.05, total=4242)
    assert usage.cpu_psi == Psi(some=some, full=PsiLine(total=17))
    assert (usage.memory_psi, usage.io_psi) == (NO_PSI, NO_PSI)


def test_read_usage_unchanged_pressure_is_parsed_once(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    first = tested.read_usage().cpu_psi
    assert tested.read_usage().cpu_psi is first
    (tmp_path / "v2" / PATH.strip("/") / "cpu.pressure").write_text("some avg10=2.00 total=1\n")
    assert tested.read_usage().cpu_psi == Psi(some=PsiLine(avg10=2.0, total=1))


def test_refresh_idle_cgroup_has_new_pressure_and_io(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    first, details = tested.read()
    files = tmp_path / "v2" / PATH.strip("/")
    (files / "memory.stat").unlink()
    (files / "cpu.pressure").write_text("some avg10=2.00 total=1\n")
    (files / "io.stat").write_text("254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n")
    idle = tested.read_usage()
    assert (idle.memory, idle.inactive_file) == (first.memory, first.inactive_file)
    assert idle.cpu_psi == Psi(some=PsiLine(avg10=2.0, total=1))
    refreshed = tested.refresh(details)
    assert [(io.major, io.bytes["Write"]) for io in refreshed.io] == [(254, 2)]
    assert (refreshed.threads, refreshed.max_memory) == (details.threads, details.max_memory)


@pytest.mark.parametrize("data", [b"some avg10\n", b"some avg10=x\n", b"some total=1.5\n", b"\n\n"])
def test_parse_psi_malformed_line_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_psi(data)


def test_read_returns_details(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    expected = Details(
        cpu_user=100000000,
        cpu_system=23456000,
        periods=10,
        throttled_periods=4,
        throttled=5000,
        burst_periods=2,
        burst=7000,
        max_memory=262144,
        threads=12,
        max_threads=100,
        io=(
            DeviceIo(
                major=254,
                minor=0,
                bytes={"Read": 12288, "Write": 16384},
                operations={"Read": 3, "Write": 4},
            ),
        ),
        huge_pages=(HugePages(size="2MB", usage=2097152, max_usage=0, failures=3),),
    )
    assert [tested.read()[1] for _ in range(3)] == [expected] * 3


def test_read_io_cost_counters_are_in_cost_table(tmp_path: Path) -> None:
    line = "254:0 rbytes=1 cost.usage=7 cost.wait=8 cost.indebt=9 cost.indelay=10\n"
    device = reader(tmp_path, {"io.stat": line}).read()[1].io[0]
    assert device.cost == {"usage": 7, "wait": 8, "indebt": 9, "indelay": 10}


def test_read_malformed_device_lines_are_ignored(tmp_path: Path) -> None:
    lines = "\n\n(unknown) rbytes=1\n8:0 rbytes=x\n8:1:2 rbytes=1\n8:3 rbytes=1 junk\n\xff\n"
    assert reader(tmp_path, {"io.stat": lines}).read()[1].io == (
        DeviceIo(major=8, minor=3, bytes={"Read": 1}),
    )


def test_read_large_device_table_is_bounded(tmp_path: Path) -> None:
    lines = "".join(f"{n}:0 rbytes=1\n" for n in range(20_000))
    assert 3000 < len(reader(tmp_path, {"io.stat": lines}).read()[1].io) < 10_000


def test_read_without_memory_controller_has_no_memory(tmp_path: Path) -> None:
    usage, details = reader(tmp_path, NO_MEMORY).read()
    assert (usage.cpu, usage.memory, usage.working_set, usage.swap, details.max_memory) == (
        123456000,
        0,
        0,
        0,
        0,
    )


def test_read_without_pids_controller_counts_processes(tmp_path: Path) -> None:
    _, details = reader(tmp_path, {"pids.current": None, "pids.max": None}).read()
    assert (details.threads, details.max_threads) == (3, 0)


def test_read_unlimited_pids_has_no_max_threads(tmp_path: Path) -> None:
    assert reader(tmp_path, {"pids.max": "max\n"}).read()[1].max_threads == 0


def test_read_root_derives_memory_from_stat_and_swap_from_meminfo(tmp_path: Path) -> None:
    names = ("memory.current", "memory.swap.current", "pids.current", "memory.max", "cpu.max", "cpu.weight")
    absent: dict[str, str | None] = dict.fromkeys((*names, "pids.max"))
    tested = reader(tmp_path, absent, path="/")
    usage, details = tested.read()
    assert (usage.memory, usage.working_set, usage.swap) == (122880, 92880, 300 * 1024)
    assert (details.threads, details.max_memory) == (3, 0)
    limits = tested.read_limits()
    assert (limits.memory_limit, limits.memory_swap_limit, limits.has_memory) == (1024000, 409600, True)
    assert (limits.cpu_shares, limits.cpu_period, limits.cpu_quota, limits.max_processes) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cpu.stat", "usage_usec many\n"),
        ("cpu.stat", "usage_usec\n"),
        ("memory.current", "\n"),
        ("cpu.pressure", "some avg10=lots\n"),
        ("memory.stat", "anon 1\n" * 100_000),
    ],
)
def test_read_usage_malformed_content_raises_error_with_path(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(CgroupError, match=name):
        reader(tmp_path, {name: content}).read_usage()


@pytest.mark.parametrize("read", ["read", "read_usage", "read_limits"])
def test_read_removed_cgroup_raises_gone(tmp_path: Path, read: str) -> None:
    tested = reader(tmp_path, descriptors=0)
    shutil.rmtree(tmp_path / "v2" / "kubepods")
    with pytest.raises(CgroupGone):
        getattr(tested, read)()


@pytest.mark.parametrize(
    ("weight", "shares"), [("1", 2), ("100", 2597), ("10000", 262144), ("0", 0), ("x", 0)]
)
def test_read_limits_weight_is_converted_to_shares(tmp_path: Path, weight: str, shares: int) -> None:
    assert reader(tmp_path, {"cpu.weight": weight}).read_limits().cpu_shares == shares


def test_read_limits_returns_limits(tmp_path: Path) -> None:
    tested = reader(tmp_path)
    limits = tested.read_limits()
    assert (limits.cpu_quota, limits.cpu_period, limits.max_processes) == (20000, 100000, 100)
    assert (limits.memory_limit, limits.memory_reservation) == (134217728, 4096)
    assert (limits.memory_swap_limit, limits.has_cpu, limits.has_memory) == (2**64 - 1, True, True)
    assert tested.read_limits() == limits


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", (0, 100000)), ("max\n", (0, 0)), ("", (0, 0)), ("7 8 9\n", (7, 0))],
)
def test_read_limits_cpu_max_is_parsed(tmp_path: Path, text: str, expected: tuple[int, int]) -> None:
    limits = reader(tmp_path, {"cpu.max": text}).read_limits()
    assert (limits.cpu_quota, limits.cpu_period) == expected


def test_read_limits_without_memory_controller_has_no_memory(tmp_path: Path) -> None:
    limits = reader(tmp_path, NO_MEMORY).read_limits()
    assert (limits.has_memory, limits.memory_limit) == (False, 0)
