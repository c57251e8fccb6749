"""Names of rotated logs, and which of them are removed and compressed: tables and properties."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.kuberuntime.log_rotation.plan import (
    SHORTEST_CHECK_SECONDS,
    TICK_SECONDS,
    LogDirectoryEntry,
    RotationPolicy,
    classify,
    find_excess,
    find_uncompressed,
    next_check_seconds,
    next_stem,
    stale_attempts,
)
from pykubelet.kuberuntime.log_rotation.readers import LogReaders

NOW = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
STAMP = "20260102-030405"


def file(suffix: str, size: int = 10, age: float = 100.0, **facts: object) -> LogDirectoryEntry:
    return LogDirectoryEntry(suffix, size, NOW - age, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("existing", "expected"),
    [
        ([], STAMP),
        (["20260102-030404"], STAMP),
        ([STAMP], f"{STAMP}_000001"),
        ([STAMP, f"{STAMP}_000001"], f"{STAMP}_000002"),
        (["20260102-040000"], "20260102-040000_000001"),  # the clock was set back
        (["20260102-040000_999999"], "20260102-040001"),
        (["99991231-235959_999999", "zzz", "1"], STAMP),
    ],
)
def test_next_stem_existing_files_sorts_after_valid_ones(existing: list[str], expected: str) -> None:
    assert next_stem(existing, NOW) == expected


def test_next_stem_repeated_rotations_sort_as_upstream_does() -> None:
    """Verify the order of the complete names, compressed or not, by which upstream sorts."""
    stems: list[str] = []
    for step in range(50):
        stems.append(next_stem(stems, NOW + step // 20))
    names = [f"0.log.{stem}{'.gz' if number % 3 else ''}" for number, stem in enumerate(stems)]
    assert sorted(names) == names


@pytest.mark.parametrize(
    ("entries", "rotated", "unused"),
    [
        ([], [], []),
        (
            [file("20260102-030300"), file("20260102-030200.gz")],
            ["20260102-030200.gz", "20260102-030300"],
            [],
        ),
        ([file("20260102-030300.tmp")], [], ["20260102-030300.tmp"]),
        ([file("20260102-030300.gz.tmp")], [], ["20260102-030300.gz.tmp"]),
        (
            [file("20260102-030300"), file("20260102-030300.gz")],
            ["20260102-030300.gz"],
            ["20260102-030300"],
        ),
        ([file("20260102-030300", inode=(1, 7))], [], ["20260102-030300"]),  # a second name of the log
        ([file("20260102-030300", is_regular=False)], [], ["20260102-030300"]),
        (
            [file("20260102-030300"), file("20260102-030300.gz", is_regular=False)],
            ["20260102-030300"],
            ["20260102-030300.gz"],
        ),
        (
            [file("20260102-030300"), file("zzz"), file("1.gz"), file("99991231-000000")],
            ["1.gz", "99991231-000000", "zzz", "20260102-030300"],
            [],
        ),
    ],
)
def test_classify_entries_sorted_by_use(
    entries: list[LogDirectoryEntry], rotated: list[str], unused: list[str]
) -> None:
    found = classify(entries, (1, 7), NOW)
    assert ([entry.suffix for entry in found.rotated], list(found.unused)) == (rotated, unused)


@pytest.mark.parametrize(
    ("sizes", "max_files", "max_bytes", "unread", "hold", "removed", "held"),
    [
        ([10, 10, 10], 3, 100, None, 0, [], 0),
        ([10, 10, 10], 2, 100, None, 0, [0], 0),
        ([10, 10, 10], 9, 20, None, 0, [0], 0),
        ([100, 10, 10], 9, 50, None, 0, [0], 0),
        ([10, 10, 500], 9, 50, None, 0, [0, 1], 0),  # the newest stays
        ([10, 10, 10, 10], 1, 100, "1", 100, [0, 1], 10),
        ([10, 10, 10, 10], 1, 100, "0", 10, [0, 2], 10),
        ([10, 10, 10, 10], 1, 100, "0", 100, [0], 20),
        ([0, 0, 1, 0], 2, 0, "0", 0, [0, 1, 2], 0),
        ([0, 0, 0, 10], 1, 100, "0", 100, [0, 1, 2], 0),  # nothing to read in empty files
    ],
)
def test_find_excess_limits_oldest_removed(
    sizes: list[int],
    max_files: int,
    max_bytes: int,
    unread: str | None,
    hold: int,
    removed: list[int],
    held: int,
) -> None:
    files = [file(str(number), size) for number, size in enumerate(sizes)]
    excess = find_excess(files, max_files, max_bytes, unread_after=unread, hold_bytes=hold)
    assert ([int(entry.suffix) for entry in excess.remove], excess.held_bytes) == (removed, held)


@given(
    st.lists(st.integers(0, 100), max_size=12),
    st.integers(1, 6),
    st.integers(0, 300),
    st.none() | st.integers(0, 12),
    st.integers(0, 300),
)
def test_find_excess_any_files_rest_within_limits(
    sizes: list[int], max_files: int, max_bytes: int, unread: int | None, hold: int
) -> None:
    files = [file(f"{number:02}", size) for number, size in enumerate(sizes)]
    after = f"{unread:02}" if unread is not None else None
    excess = find_excess(files, max_files, max_bytes, unread_after=after, hold_bytes=hold)
    rest = [entry for entry in files if entry not in excess.remove]
    assert excess.held_bytes <= hold
    assert rest[-1:] == files[-1:]
    newest = rest[-1].size if rest else 0
    assert sum(entry.size for entry in rest) <= max(max_bytes, newest) + excess.held_bytes
    if not hold or after is None:
        assert len(rest) <= max_files
        assert rest == files[len(files) - len(rest) :]


def test_find_uncompressed_all_but_newest_and_young() -> None:
    files = [file("1.gz"), file("2"), file("3", age=5), file("4")]
    assert [entry.suffix for entry in find_uncompressed(files, NOW, 10)] == ["2"]
    assert [entry.suffix for entry in find_uncompressed(files, NOW, 0)] == ["2", "3"]
    assert [entry.suffix for entry in find_uncompressed(files, NOW, 10, include_newest=True)] == ["2", "4"]


@pytest.mark.parametrize(
    ("names", "known", "expected"),
    [
        ([], [], set()),
        (["0.log", "0.log.20260102-030405.gz"], ["0.log"], set()),
        (["0.log", "1.log", "2.log"], ["2.log"], {0}),
        (["0.log", "1.log.x", "2.log", "5.log"], ["2.log"], {0, 1}),  # 5 may be starting
        (["0.log", "other", "x.log", "1.logs"], ["1.log"], set()),
    ],
)
def test_stale_attempts_lost_containers_all_but_newest(
    names: list[str], known: list[str], expected: set[int]
) -> None:
    assert stale_attempts(names, known) == expected


@pytest.mark.parametrize(
    ("size", "rate", "expected"),
    [(0, 0.0, TICK_SECONDS), (0, 50.0, TICK_SECONDS), (0, 400.0, 0.25), (200, 1e9, SHORTEST_CHECK_SECONDS)],
)
def test_next_check_seconds_expected_time_of_limit_bounded(size: int, rate: float, expected: float) -> None:
    assert next_check_seconds(size, rate, 100) == expected


def test_rotation_policy_default_bounds() -> None:
    policy = RotationPolicy(10 * 2**20, 5)
    assert (policy.max_rotated, policy.max_rotated_bytes) == (4, 50 * 2**20)
    assert RotationPolicy(40 * 1024, 3).urgent_size == 2**20


def test_log_readers_rotations_return_oldest_unread_and_share_limit() -> None:
    readers = LogReaders(limit=100)
    with readers.reading("a") as first, readers.reading("a") as second:
        assert readers.unread_after("a") is None
        readers.on_rotated("a", "1")
        assert [first.stem, second.stem] == ["1", "1"]
        second.stem = None
        readers.on_rotated("a", "2")
        stems = [reader.stem for reader in (first, second)]
        assert (stems, readers.unread_after("a")) == (["1", "2"], "1")
        readers.set_held("a", 70)
        assert (readers.available("a"), readers.available("b")) == (100, 30)
        assert readers.is_read("a")
    assert not readers.is_read("a")
    assert readers.unread_after("a") is None


def test_log_readers_reader_that_does_not_advance_releases_files() -> None:
    now = 0.0
    readers = LogReaders(clock=lambda: now)
    with readers.reading("a") as stalled, readers.reading("a") as live:
        now = 100.0  # a log that is quiet is not a client that has stalled
        readers.on_rotated("a", "1")
        assert (stalled.stem, live.stem, readers.unread_after("a")) == ("1", "1", "1")
        for number in range(2, 13):
            now += 1.0
            readers.on_rotated("a", str(number))
            live.on_file(str(number - 1) if number < 10 else "9")
            expected = "1" if now < 110 else "9"
            assert readers.unread_after("a") == expected
        now += 10.0
        assert readers.unread_after("a") is None
        stalled.on_file("9")
        assert readers.unread_after("a") == "9"


def test_log_readers_disk_pressure_nothing_retained() -> None:
    pressure = False
    readers = LogReaders(limit=100, may_hold=lambda: not pressure)
    assert readers.available("a") == 100
    pressure = True
    assert readers.available("a") == 0
