"""Descriptors, parsing and host facts of cgroup readers."""

import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.stats.cgroups.files import CgroupFile, DescriptorBudget, StatParser, to_limit
from pykubelet.stats.cgroups.host import boot_time, huge_page_sizes
from pykubelet.stats.samples import CgroupError
from tests.support.cgroup_trees import open_descriptors

FILE = CgroupFile("/nowhere", "memory.stat", DescriptorBudget(0))


def test_descriptor_budget_default_is_fraction_of_process_limit() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < DescriptorBudget().limit <= soft // 4


def test_descriptor_budget_low_priority_has_half() -> None:
    budget = DescriptorBudget(4)
    assert [budget.acquire(low_priority=True) for _ in range(3)] == [True, True, False]
    assert [budget.acquire(low_priority=False) for _ in range(3)] == [True, True, False]
    budget.release()
    assert budget.acquire(low_priority=False)


def test_cgroup_file_unreadable_raises_error_that_names_path(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(CgroupError, match="file: Is a directory"):
        CgroupFile(str(tmp_path), "file", DescriptorBudget(5)).read()


def test_cgroup_file_growing_beyond_buffer_is_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n")
    file = CgroupFile(str(tmp_path), "file", DescriptorBudget(5), low_priority=False)
    assert file.number() == 1
    path.write_bytes(b"x" * 5000)
    assert file.read() == b"x" * 5000
    file.close()


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-5, 2**64), max_size=8), st.randoms())
def test_stat_parser_any_order_and_subset_returns_values(values: dict[str, int], rng: object) -> None:
    parser = StatParser("c", "a", "missing", "h")
    for _ in range(3):
        keys = list(values)
        rng.shuffle(keys)  # type: ignore[attr-defined]
        data = "".join(f"{key} {values[key]}\n" for key in keys).encode()
        expected = [max(values.get(key, 0), 0) for key in ("c", "a", "missing", "h")]
        assert parser.parse(FILE, data) == expected


@given(st.binary(max_size=200))
def test_stat_parser_garbage_raises_only_cgroup_error(data: bytes) -> None:
    parser = StatParser("a", "b")
    with suppress(CgroupError):
        assert len(parser.parse(FILE, data)) == 2


def test_stat_parser_many_layouts_are_bounded() -> None:
    parser = StatParser("a", "b")
    for count in range(100):
        assert parser.parse(FILE, b"x 1\n" * count + b"b 2\na 1\n") == [1, 2]
    assert len(parser._layouts) <= StatParser._MAX_LAYOUTS


@pytest.mark.parametrize(
    ("text", "expected"), [("max", 2**64 - 1), ("12", 12), ("-1", 0), ("", 0), ("1 2", 0), ("\u00b2", 0)]
)
def test_to_limit_returns_number_or_zero(text: str, expected: int) -> None:
    assert to_limit(text) == expected


def test_huge_page_sizes_are_named_as_in_cgroup_files(tmp_path: Path) -> None:
    for name in ("hugepages-1048576kB", "hugepages-2048kB", "hugepages-64kB", "hugepages-xkB", "other"):
        (tmp_path / name).mkdir()
    assert huge_page_sizes(tmp_path) == ("64KB", "2MB", "1GB")


def test_huge_page_sizes_without_support_are_empty(tmp_path: Path) -> None:
    assert huge_page_sizes(tmp_path / "absent") == ()


def test_boot_time_is_whole_minute_before_now() -> None:
    booted = boot_time()
    assert booted % 60 == 0
    assert 0 <= time.time() - booted - float(Path("/proc/uptime").read_text().split()[0]) < 62


def test_cgroup_file_reads_leave_no_descriptor_open(tmp_path: Path) -> None:
    before = open_descriptors()
    file = CgroupFile(str(tmp_path), "absent", DescriptorBudget(5))
    assert [file.read(), file.number(), file.limit()] == [None, None, 0]
    assert open_descriptors() == before


def test_cgroup_file_created_later_is_found_after_some_reads(tmp_path: Path) -> None:
    file = CgroupFile(str(tmp_path), "late", DescriptorBudget(0))
    assert file.number() is None
    (tmp_path / "late").write_text("7\n")
    assert [file.number() for _ in range(12)] == [None] * 10 + [7, 7]
