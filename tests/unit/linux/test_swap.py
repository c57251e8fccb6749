from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.kernel import SwapArea, parse_swaps, swap_areas, swap_problem

HEADINGS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


@pytest.mark.parametrize(
    ("lines", "areas"),
    [
        ("", []),
        ("\n", []),
        (
            "/dev/sda2                               partition\t2097148\t\t1024\t\t-2\n",
            [SwapArea("/dev/sda2", "partition", 2097148, 1024, -2)],
        ),
        (
            "/dev/zram0 partition 4 0 100\n/swap\\040file file 1048576 0 -3\n",
            [SwapArea("/dev/zram0", "partition", 4, 0, 100), SwapArea("/swap file", "file", 1048576, 0, -3)],
        ),
        ("what is this\n", [SwapArea("what is this", "unknown", 0, 0, 0)]),
    ],
)
def test_parse_swaps_returns_areas(lines: str, areas: list[SwapArea]) -> None:
    assert parse_swaps(HEADINGS + lines) == areas


def test_parse_swaps_empty_text_returns_no_areas() -> None:
    assert parse_swaps("") == []


@given(st.text())
def test_parse_swaps_any_line_after_header_is_area(text: str) -> None:
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(parse_swaps("\n".join(["Filename", *lines]))) == len(lines)


def test_swap_problem_is_one_line_with_areas_and_remedy() -> None:
    assert swap_problem([]) is None
    problem = swap_problem(
        [SwapArea("/dev/sda2", "partition", 2097152, 1536, -2), SwapArea("/s", "file", 4, 0, -3)]
    )
    assert problem is not None
    assert "\n" not in problem
    assert "/dev/sda2 (partition, 2 GiB, 1.5 MiB used); /s (file, 4 KiB, 0 KiB used)" in problem
    assert "swapoff" in problem
    assert "--fail-swap-on=false" in problem


def test_swap_areas_missing_file_returns_no_areas(tmp_path: Path) -> None:
    assert swap_areas(tmp_path / "none") == []
    (tmp_path / "swaps").write_text(HEADINGS + "/dev/sdb file 8 0 -1\n")
    assert [area.path for area in swap_areas(tmp_path / "swaps")] == ["/dev/sdb"]
    with pytest.raises(IsADirectoryError):
        swap_areas(tmp_path)


def test_swap_areas_on_host_sum_equals_swap_total() -> None:
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("SwapTotal")
    )
    assert sum(area.size_kib for area in swap_areas()) == int(total.split()[1])
