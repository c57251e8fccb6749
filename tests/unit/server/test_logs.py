"""Containers' log files: their lines as a table and as properties, their growth and rotation for real."""

import asyncio
import os
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pykubelet.server.logs import log_files
from pykubelet.server.logs.log_chain import OpenedLog
from pykubelet.server.logs.log_files import (
    LineWriter,
    LogEntry,
    LogFile,
    Stream,
    follow,
    last_lines,
    parse_entry,
    present_blocks,
    seek_last_lines,
)
from pykubelet.util.tasks import in_own_thread

STAMP = "2026-01-02T03:04:05.123456789Z"


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (f"{STAMP} stdout F hello\n", LogEntry(STAMP, "stdout", b"hello", False)),
        (f"{STAMP} stderr P half", LogEntry(STAMP, "stderr", b"half", True)),
        (f"{STAMP} stdout F \n", LogEntry(STAMP, "stdout", b"", False)),
        (f"{STAMP} stdout F  two  spaces \n", LogEntry(STAMP, "stdout", b" two  spaces ", False)),
        (f"{STAMP} stdout P:later:tags x\n", LogEntry(STAMP, "stdout", b"x", True)),
        (f"{STAMP} stdout F a\rb\x85c\n", LogEntry(STAMP, "stdout", "a\rb\x85c".encode(), False)),
        (
            "2026-01-02T05:04:05+02:00 stdout F x\n",
            LogEntry("2026-01-02T05:04:05+02:00", "stdout", b"x", False),
        ),
        ("", None),
        ("\n", None),
        (f"{STAMP} stdin F x\n", None),
        (f"{STAMP} stdout F\n", None),
        ("yesterday stdout F x\n", None),
        ("\0\0\0\0\n", None),
        (f'{{"log":"x","stream":"stdout","time":"{STAMP}"}}\n', None),
    ],
)
def test_parse_entry_line_returns_entry_or_none(line: str, entry: LogEntry | None) -> None:
    assert parse_entry(line.encode()) == entry


@pytest.mark.parametrize(
    ("stamp", "nanoseconds", "fixed"),
    [
        (STAMP, 1767323045_123456789, STAMP),
        ("2026-01-02T03:04:05Z", 1767323045_000000000, "2026-01-02T03:04:05.000000000Z"),
        ("2026-01-02T05:04:05.5+02:00", 1767323045_500000000, "2026-01-02T05:04:05.500000000+02:00"),
        ("2026-13-99T03:04:05Z", 0, "2026-13-99T03:04:05.000000000Z"),
    ],
)
def test_log_entry_stamp_returns_nanoseconds_and_fixed_stamp(
    stamp: str, nanoseconds: int, fixed: str
) -> None:
    entry = parse_entry(f"{stamp} stdout F x".encode())
    assert entry is not None
    assert (entry.nanoseconds, entry.fixed_stamp) == (nanoseconds, fixed)


streams: st.SearchStrategy[Stream] = st.sampled_from(["stdout", "stderr"])
texts = st.binary(max_size=12).map(lambda text: text.replace(b"\n", b""))
logs = st.lists(st.builds(LogEntry, st.just(STAMP), streams, texts, st.booleans()), max_size=30)


def written(entry: LogEntry) -> bytes:
    tag = "P" if entry.partial else "F"
    return f"{entry.stamp} {entry.stream} {tag} ".encode() + entry.text + b"\n"


def said(entries: Iterable[LogEntry], stream: Stream) -> bytes:
    return b"".join(text for to, text in LineWriter().write(entries) if to == stream)


@given(logs)
def test_parse_entry_written_entries_roundtrip(entries: list[LogEntry]) -> None:
    assert [parse_entry(written(entry)) for entry in entries] == entries


@given(st.binary(max_size=200))
def test_parse_entry_any_bytes_returns_entry_or_none(line: bytes) -> None:
    entry = parse_entry(line)
    assert entry is None or parse_entry(written(entry)) == entry


@given(logs)
def test_line_writer_partial_entries_joined_per_stream(entries: list[LogEntry]) -> None:
    for stream in ("stdout", "stderr"):
        mine = [entry for entry in entries if entry.stream == stream]
        assert said(entries, stream) == b"".join(
            entry.text + (b"" if entry.partial else b"\n") for entry in mine
        )


# What may stand in a log file, good and bad: the one way to a text must not see it otherwise than the other.
stamps = st.sampled_from(
    [STAMP, "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.5+02:00", "2026-13-99T99:99:99.000Z", "2026-01-02"]
)
fronts = st.builds(
    "{} {} {} ".format, stamps, st.sampled_from(["stdout", "stderr", "stdin"]), st.sampled_from("FFFFP")
)
odd_texts = st.sampled_from(
    [b"", b"\r", b"x" * 20_000, f"{STAMP} stdout F ".encode(), b"F ", b"\0", b" ", b"\x85\xff"]
)
raw_lines = st.one_of(
    st.builds(lambda front, text: front.encode() + text, fronts, texts | odd_texts),
    st.sampled_from([b"", b"\r", b"damaged", b"\0" * 50, f"{STAMP} stdout F".encode(), STAMP.encode()]),
    st.builds(lambda front, cut: front.encode()[:cut], fronts, st.integers(0, 45)),
    st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"")),
)
good_lines = st.integers(1, 300).map(lambda count: f"{STAMP} stdout F some text\n".encode() * count)
files = st.tuples(
    st.lists(st.one_of(raw_lines.map(lambda line: line + b"\n"), good_lines), max_size=12), raw_lines
).map(lambda parts: b"".join(parts[0]) + parts[1])


def slowly(lines: bytes, wanted: tuple[Stream, ...] = ("stdout", "stderr"), **options: Any) -> bytes:
    """Look at each entry by itself."""
    entries = [entry for line in lines.split(b"\n") if (entry := parse_entry(line)) is not None]
    return b"".join(text for to, text in LineWriter(**options).write(entries) if to in wanted)


@given(files, st.integers(1, 5))
# A torn line and the rest of it look like one front across the line break.
@example(f"{STAMP} stdout F a\n{STAMP[:25]}\n{STAMP[25:]} stdout F b\n".encode(), 1)
def test_line_writer_texts_equals_entry_by_entry(file: bytes, portions: int) -> None:
    writer = LineWriter()
    # As they are read: whole lines, many at a time, and what stands behind the last line break.
    lines = [line + b"\n" for line in file.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    size = len(lines) // portions + 1
    blocks = [b"".join(lines[at : at + size]) for at in range(0, len(lines), size)]
    assert b"".join(text for block in blocks for text in writer.texts(block)) == slowly(file)


@given(files, st.sampled_from([("stdout",), ("stderr",), ("stdout", "stderr")]), st.booleans())
def test_line_writer_texts_any_options_pieces_bounded(
    file: bytes, wanted: tuple[Stream, ...], timestamps: bool
) -> None:
    since = 1767323045_000000000
    pieces = list(LineWriter(timestamps=timestamps, since=since).texts(file, wanted))
    assert b"".join(pieces) == slowly(file, wanted, timestamps=timestamps, since=since)
    # A line that is longer than that by itself cannot be helped.
    assert all(len(piece) < 100_000 for piece in pieces)


@given(files, st.integers(0, 12) | st.none(), st.sampled_from([1000, 256 * 1024]))
def test_log_file_blocks_any_tail_equals_content(file: bytes, tail: int | None, block: int) -> None:
    writer = LineWriter()
    with NamedTemporaryFile() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pykubelet.server.logs.log_files._BLOCK", block)
        temporary.write(file)
        temporary.flush()
        with closing(LogFile(Path(temporary.name))) as log:
            if tail is not None:
                log.seek_last(tail)
            blocks = [*log.blocks(up_to=log.size), log.take_rest()]
    lines = file.split(b"\n")
    ended = lines[-1] == b""
    first = 0 if tail is None else max(0, len(lines) - ended - tail)
    expected = slowly(b"\n".join(lines[first:])) if tail != 0 else b""
    assert b"".join(text for part in blocks for text in writer.texts(part)) == expected


def test_line_writer_texts_valid_lines_not_parsed_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def looking(line: bytes) -> LogEntry | None:
        looked_at.append(line)
        return parse_entry(line)

    monkeypatch.setattr("pykubelet.server.logs.log_files.parse_entry", looking)
    good = f"{STAMP} stderr F {'x' * 60}\n".encode() * 2000
    assert b"".join(LineWriter().texts(good)) == (b"x" * 60 + b"\n") * 2000
    assert looked_at == []
    # One damaged line is no reason to do so, except around it.
    list(LineWriter().texts(good + b"damaged\n" + good))
    assert 0 < len(looked_at) < 300


@given(st.lists(st.integers(0, 40_000), max_size=12), st.integers(0, 14), st.booleans())
def test_seek_last_returns_last_entries(lengths: list[int], count: int, ended: bool) -> None:
    lines = [f"{number} ".encode() + b"x" * length + b"\n" for number, length in enumerate(lengths)]
    text = b"".join(lines)
    with NamedTemporaryFile() as file:
        file.write(text if ended else text[:-1])
        file.flush()
        with closing(LogFile(Path(file.name))) as log:
            log.seek_last(count)
            found = b"".join(log.blocks()) + log.take_rest()
    expected = b"".join(lines[len(lines) - min(count, len(lines)) :])
    assert found == (expected if ended else expected[:-1])


def lines_of(entries: list[LogEntry]) -> list[tuple[int, tuple[int, ...]]]:
    """The lines of a log by the position where each ended, with the positions of their pieces."""
    lines: list[tuple[int, tuple[int, ...]]] = []
    pieces: dict[Stream, list[int]] = {}
    for position, entry in enumerate(entries):
        pieces.setdefault(entry.stream, []).append(position)
        if not entry.partial:
            lines.append((position, tuple(pieces.pop(entry.stream))))
    return sorted(lines + [(places[-1], tuple(places)) for places in pieces.values()])


@given(logs, st.integers(0, 12))
def test_last_lines_returns_exact_count_of_complete_lines(entries: list[LogEntry], count: int) -> None:
    expected = sorted(place for _, places in lines_of(entries)[::-1][:count] for place in places)
    assert last_lines((written(e) for e in reversed(entries)), count) == [
        entries[place] for place in expected
    ]


def test_last_lines_reads_only_needed_entries() -> None:
    taken = []

    def lines() -> Iterable[bytes]:
        for number in range(1000):
            taken.append(number)
            yield f"{STAMP} stdout F {number}\n".encode()

    assert [entry.text for entry in last_lines(lines(), 3)] == [b"2", b"1", b"0"]
    assert len(taken) == 4


def test_line_writer_timestamps_and_since_applied() -> None:
    entries = [
        LogEntry("2026-01-02T03:04:05Z", "stdout", b"old", True),
        LogEntry("2026-01-02T03:04:07Z", "stderr", b"new", True),
        LogEntry("2026-01-02T03:04:08Z", "stdout", b"er", False),
        LogEntry("2026-01-02T03:04:09Z", "stderr", b"est", False),
    ]
    writer = LineWriter(timestamps=True, since=entries[1].nanoseconds)
    assert list(writer.write(entries)) == [
        ("stderr", b"2026-01-02T03:04:07.000000000Z new"),
        ("stderr", b"est\n"),
    ]


def write(path: Path, *texts: str, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.write("".join(f"{STAMP} stdout F {text}\n" for text in texts))


def words(entries: Iterable[LogEntry]) -> list[str]:
    return [entry.text.decode() for entry in entries]


@given(logs, st.integers(0, 5), st.binary(max_size=5).map(lambda b: b.replace(b"\n", b"")))
def test_skip_to_last_then_entries_continue_at_end(
    tmp_path_factory: pytest.TempPathFactory, entries: list[LogEntry], count: int, unfinished: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "0.log"
    path.write_bytes(b"".join(map(written, entries)) + unfinished)
    log = LogFile(path)
    try:
        assert log.skip_to_last(count) == last_lines((written(e) for e in reversed(entries)), count)
        assert list(log.entries()) == []
        write(path, "more")
        # The unfinished line's bytes are part of the entry that is written behind them.
        assert len(list(log.entries())) == (0 if unfinished else 1)
    finally:
        log.close()


def test_skip_to_last_many_blocks_returns_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write(path, *(f"{number} {'x' * 100}" for number in range(3000)))
    log = LogFile(path)
    assert [word.split()[0] for word in words(log.skip_to_last(2000))] == list(map(str, range(1000, 3000)))
    log.close()
    log = LogFile(path)
    assert len(list(log.entries())) == 3000
    log.close()


class Following:
    """A log that is followed in the background."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = True

    async def goes_on(self) -> bool:
        return self.on

    async def run(self, path: Path) -> None:
        log = LogFile(path)
        try:
            async for entries in follow(log, self.goes_on):
                self.seen += words(entries)
        finally:
            log.close()

    async def until(self, *expected: str) -> None:
        async with asyncio.timeout(30):
            while self.seen != list(expected):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def followed(path: Path) -> AsyncIterator[Following]:
    following = Following()
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(following.run(path))
            yield following
            following.on = False
            await task
    except TimeoutError:
        pytest.fail(f"did not end; seen: {following.seen}")


async def test_follow_growing_log_yields_new_entries_until_end(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write(path, "one")
    async with followed(path) as following:
        await following.until("one")
        write(path, "two")
        await following.until("one", "two")
        with path.open("a") as file:
            file.write(f"{STAMP} stdout F thr")
            file.flush()
            await asyncio.sleep(0.1)
            file.write("ee\n")
        await following.until("one", "two", "three")


async def test_follow_next_attempt_writes_in_directory_still_ends(tmp_path: Path) -> None:
    write(tmp_path / "0.log", "one")
    async with followed(tmp_path / "0.log") as following:
        await following.until("one")
        following.on = False
        for _ in range(30):
            write(tmp_path / "1.log", "noise")
            await asyncio.sleep(0.05)
    assert following.seen == ["one"]


async def test_follow_rotated_log_continues_with_new_file(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write(path, "one")
    async with followed(path) as following:
        await following.until("one")
        old = path.open("a")
        path.rename(tmp_path / "0.log.20260102-030405")
        old.write(f"{STAMP} stdout F two\n")
        old.flush()
        await asyncio.sleep(0.1)
        write(path, "four")
        # The runtime's last words to the old file come when the new one is there.
        old.write(f"{STAMP} stdout F three\n")
        old.close()
        await following.until("one", "two", "three", "four")
        write(path, "five")
        await following.until("one", "two", "three", "four", "five")


async def test_follow_truncated_log_restarts_at_beginning(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write(path, "one", "two")
    async with followed(path) as following:
        await following.until("one", "two")
        write(path, "new", mode="w")
        await following.until("one", "two", "new")


async def test_follow_removed_log_ends_with_container(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write(path, "one")
    async with followed(path) as following:
        await following.until("one")
        path.unlink()
    assert following.seen == ["one"]


async def test_log_file_fifo_in_place_of_log_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    os.mkfifo(path)
    async with asyncio.timeout(10):
        with pytest.raises(OSError, match="not a regular file"):
            # In a thread that can be left: opening a FIFO waits for a writer that never comes.
            await in_own_thread(lambda: LogFile(path), name="open", cancel_timeout=0)


async def test_follow_fifo_takes_place_of_log_keeps_loop_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, renewals, real = tmp_path / "0.log", list[float](), LogFile.advance

    def advance(log: LogFile) -> bytes | None:
        renewals.append(time.monotonic())
        return real(log)

    def release() -> None:
        # A follower that blocks in open() goes on, so that this test fails instead of hanging.
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    monkeypatch.setattr(LogFile, "advance", advance)
    write(path, "one")
    async with followed(path) as following:
        await following.until("one")
        rescue = threading.Timer(5, release)
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "fifo").rename(path)
        rescue.start()
        while not renewals:
            await asyncio.sleep(0.01)
        stalled = time.monotonic() - renewals[0]
        rescue.cancel()
        write(tmp_path / "new", "two")
        (tmp_path / "new").rename(path)
        await following.until("one", "two")
    assert stalled < 4


async def test_present_blocks_read_off_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, threads = tmp_path / "0.log", set[int]()
    write(path, *(f"{number} {'x' * 100}" for number in range(9000)))
    with closing(LogFile(path)) as log:
        real = log._file

        class Watched:
            def __getattr__(self, name: str) -> Any:
                if name == "read":
                    threads.add(threading.get_ident())
                return getattr(real, name)

        monkeypatch.setattr(log, "_opened", OpenedLog(cast(BinaryIO, Watched()), None))
        await seek_last_lines(log, 8000)
        text = b"".join([block async for block in present_blocks(log)])
    assert text.count(b"\n") == 8000
    assert threads
    assert threading.get_ident() not in threads


def test_blocks_log_without_line_break_reads_one_block_per_step(tmp_path: Path) -> None:
    """Verify that a sparse file in place of a log does not occupy a thread until its end.

    Six requests for such logs had taken all threads of the agent, also after their clients were gone.
    """
    path = tmp_path / "0.log"
    path.touch()
    os.truncate(path, 64 * log_files._BLOCK)
    with closing(LogFile(path)) as log:
        assert list(log.blocks()) == [b""] * 64


def test_skip_to_last_endless_line_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    tracemalloc.start()
    try:
        with closing(LogFile(path)) as log:
            log.skip_to_last(10)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
