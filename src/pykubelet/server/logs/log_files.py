"""Parser and reader of CRI container log files: tail, read to the end, follow across rotations.

A runtime writes one entry per line, with a tag F (full) or P (partial):

    2026-01-02T03:04:05.123456789Z stdout F a whole line
    2026-01-02T03:04:05.123456790Z stderr P the beginning of a long one, continued in the next stderr entry

The parser is pure: bytes in, entries out. A damaged entry (full disk, killed runtime) is skipped.
`LineWriter.texts` has two equivalent paths. If all output of both streams is requested and every line is
full, the runtime's columns are removed from many lines at a time with a regular expression; otherwise each
entry is parsed, which is ten times slower and is therefore done in small pieces.

A followed log may be rotated, also several times between two reads: the file is renamed and a new one is
created with its name. The old file is read until the runtime has closed it, then each following one
(`log_chain`), so that no line is lost or duplicated. A file truncated in place is read again from its start.

Only regular files are opened: a container that mounts the log directory could create a FIFO or a device
there. `LogFile` blocks on disk I/O, so the server calls it in threads (`follow_blocks`, `present_blocks`,
`seek_last_lines`), one block at a time, so that neither a large file nor a slow disk stops the event loop or
occupies a thread for long.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, Literal, TypeVar, cast

from pykubelet.kuberuntime.log_rotation.directory import is_written
from pykubelet.linux.inotify import Inotify, Mask
from pykubelet.server.logs.log_chain import GzipLog, OpenedLog, open_active, open_older, open_successor
from pykubelet.util.tasks import finish_in_thread, wait_seconds

Stream = Literal["stdout", "stderr"]
_BOTH: tuple[Stream, ...] = ("stdout", "stderr")

# Timestamps are matched by shape: checking each digit would take longer than the rest of the parser.
_SHAPE = rb"....-..-..T..:..:..[-+.:0-9Z]{1,16}+"
_ENTRY = re.compile(
    rb"(?P<stamp>" + _SHAPE + rb") (?P<stream>stdout|stderr) (?P<tags>[^ ]*) (?P<text>(?s:.*))"
)

# The columns before the text of a full entry; the same with the preceding line break; and several of these
# with the texts in between, because the cost per match is significant for a million lines.
_PREFIX = re.compile(_SHAPE + rb" std(?:out|err) F ")
_NEXT_PREFIX = re.compile(rb"\n" + _PREFIX.pattern)
_PREFIXES_PER_MATCH = 8
_PREFIXES = re.compile(rb"(.*+)".join([_NEXT_PREFIX.pattern] * _PREFIXES_PER_MATCH))
_STAMP = re.compile(r"(?P<seconds>.{19})(?:\.(?P<fraction>[0-9]+))?(?P<zone>.*)", re.ASCII)
_NANOS = 1_000_000_000

# Maximum bytes of lines that are parsed entry by entry in one piece.
_SMALL_BATCH_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry: a line of a container's output, or a part of one."""

    stamp: str
    """Timestamp as written by the runtime."""
    stream: Stream
    text: bytes
    """Output without a trailing line break."""
    partial: bool
    """Whether the line continues in the next entry of the same stream."""

    @property
    def nanoseconds(self) -> int:
        """Timestamp in nanoseconds since the Unix epoch; 0 if invalid."""
        match = _STAMP.fullmatch(self.stamp)
        assert match is not None
        zone = "+00:00" if match["zone"] == "Z" else match["zone"]
        try:
            moment = datetime.fromisoformat(match["seconds"] + zone)
        except ValueError:
            return 0
        if moment.tzinfo is None:
            return 0
        seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        return int(seconds) * _NANOS + int((match["fraction"] or "0").ljust(9, "0"))

    @property
    def fixed_stamp(self) -> str:
        """Timestamp with nine fractional digits, so that lines align."""
        match = _STAMP.fullmatch(self.stamp)
        assert match is not None
        return f"{match['seconds']}.{(match['fraction'] or '').ljust(9, '0')}{match['zone']}"


def parse_entry(line: bytes) -> LogEntry | None:
    """Parse one line of a log file; return None if it is not an entry."""
    match = _ENTRY.fullmatch(line.removesuffix(b"\n"))
    if match is None:
        return None
    # Future tags follow the first one, separated by colons.
    partial = match["tags"].partition(b":")[0] == b"P"
    stream: Stream = "stdout" if match["stream"] == b"stdout" else "stderr"
    return LogEntry(match["stamp"].decode("latin-1"), stream, match["text"], partial)


def parse_entries(lines: bytes) -> Iterator[LogEntry]:
    """Yield the entries of several lines; lines that are not entries are skipped."""
    return (entry for line in lines.split(b"\n") if line and (entry := parse_entry(line)) is not None)


def last_lines(backwards: Iterable[bytes], count: int) -> list[LogEntry]:
    """Return the entries of the last `count` lines, in file order.

    `backwards` yields the lines of the file, last one first; no more than needed are consumed. An
    unfinished line counts as one.
    """
    selected: list[LogEntry] = []
    # Per stream: whether preceding partial entries belong to a selected line.
    is_selected: dict[Stream, bool] = {}
    lines = 0
    for line in backwards if count > 0 else ():
        if (entry := parse_entry(line)) is None:
            continue
        ends_a_line = not entry.partial or entry.stream not in is_selected
        if ends_a_line:
            is_selected[entry.stream] = lines < count
            lines += is_selected[entry.stream]
        if is_selected[entry.stream]:
            selected.append(entry)
        elif lines == count and not any(is_selected.values()):
            break
    return selected[::-1]


class LineWriter:
    """Formatter of entries: joins partial entries, drops lines before `since`, prepends timestamps.

    `since` is in nanoseconds since the Unix epoch. Whether a line is shown is decided by its first entry, per
    stream.
    """

    def __init__(self, *, timestamps: bool = False, since: int | None = None) -> None:
        self._timestamps = timestamps
        self._since = since
        self._unfinished: dict[Stream, bool] = {}

    def write(self, entries: Iterable[LogEntry]) -> Iterator[tuple[Stream, bytes]]:
        """Yield the output bytes and their stream, in order."""
        for entry in entries:
            is_continued = entry.stream in self._unfinished
            shown = self._unfinished.get(entry.stream) if is_continued else self._is_new(entry)
            if entry.partial:
                self._unfinished[entry.stream] = bool(shown)
            else:
                self._unfinished.pop(entry.stream, None)
            if shown:
                prefix = (
                    f"{entry.fixed_stamp} ".encode("latin-1")
                    if self._timestamps and not is_continued
                    else b""
                )
                yield entry.stream, prefix + entry.text + (b"" if entry.partial else b"\n")

    def texts(self, lines: bytes, streams: Container[Stream] = _BOTH) -> Iterator[bytes]:
        """Yield the output of many lines of a log file for the selected streams.

        Each piece takes little time to compute, so that the caller can run other tasks in between.
        """
        is_unfiltered = (
            not self._timestamps and self._since is None and all(stream in streams for stream in _BOTH)
        )
        if is_unfiltered and (text := _full_entry_texts(lines)) is not None:
            yield text
            return
        middle = lines.find(b"\n", len(lines) // 2) + 1
        if len(lines) > _SMALL_BATCH_BYTES and 0 < middle < len(lines):
            yield from self.texts(lines[:middle], streams)
            yield from self.texts(lines[middle:], streams)
        else:
            entries = self.write(parse_entries(lines))
            yield b"".join(text for stream, text in entries if stream in streams)

    def _is_new(self, entry: LogEntry) -> bool:
        return self._since is None or entry.nanoseconds >= self._since


def _full_entry_texts(lines: bytes) -> bytes | None:
    """Return the texts of lines that are all full entries, of both streams; None if one is not."""
    prefix = _PREFIX.match(lines)
    if prefix is None or not lines.endswith(b"\n"):
        return None
    texts: list[bytes] = _PREFIXES.split(lines)
    last = _NEXT_PREFIX.split(texts.pop())
    # A line that is not a full entry remains in the text between two matches, with its line break.
    between = b"".join((*texts[::_PREFIXES_PER_MATCH], *last))
    if between.find(b"\n") < len(between) - 1:
        return None
    texts += last
    texts[0] = texts[0][prefix.end() :]
    return b"\n".join(texts)


_BLOCK = 256 * 1024
_SPOOLED_BYTES = 32 * 1024 * 1024
"""Bytes of a decompressed file that are kept in memory instead of a temporary file."""

# A runtime writes entries of at most 16 KiB; more bytes without a line break are damage.
_LONGEST_LINE = 1024 * 1024
_TICK_SECONDS = 1.0
_CHANGES = Mask.MODIFY | Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE

# inotify reports each write; this delay batches the writes of a busy container.
_BATCH_DELAY_SECONDS = 0.02
_ROTATION_GRACE_SECONDS = 0.1
"""Seconds for the runtime to close a rotated file where the kernel does not tell."""
_DRAIN_SECONDS = 5.0
"""Maximum seconds to wait until a rotated file is not open for writing."""
_Item = TypeVar("_Item")
MayGrow = Callable[[], Awaitable[bool]]
"""Returns whether a log may still grow; called about once a second while nothing is written."""


class LogFile:
    """An open log file and its read position."""

    def __init__(self, path: Path, opened: OpenedLog | None = None) -> None:
        """Open the file being written, or own a rotated file of the log.

        Raises OSError, also if it is not a regular file.
        """
        self.path = path
        self._opened = opened or open_active(path)
        self._rest = b""
        self.missing_lines = 0
        """Number of lines that `seek_last` did not find in this file."""

    @property
    def _file(self) -> BinaryIO:
        return self._opened.file

    @property
    def stem(self) -> str | None:
        """Identification of a file that was rotated when it was opened, None for the file being written."""
        return self._opened.stem

    def older(self, since: int | None = None) -> list[LogFile]:
        """Open the rotated files before this one, oldest first, as `open_older`. Raises OSError."""
        return [LogFile(self.path, opened) for opened in open_older(self.path, self._opened, since)]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def skip_to_last(self, count: int, older: Sequence[LogFile] = ()) -> list[LogEntry]:
        """Return the last `count` lines and set the read position after them.

        If this file has fewer lines, the others are those of `older` files, oldest first.
        """
        size = self._file.seek(0, os.SEEK_END)
        lines = _backwards(self._file, size)
        unfinished = next(lines, b"")
        earlier = chain.from_iterable(file.backwards() for file in reversed(older))
        entries = last_lines(chain(lines, earlier), count)
        self._file.seek(size - len(unfinished))
        return entries

    def backwards(self) -> Iterator[bytes]:
        """Yield the lines of a file that is not written any more, last one first."""
        if not isinstance(self._file, GzipLog):
            yield from _backwards(self._file, self._file.seek(0, os.SEEK_END))
            return
        with SpooledTemporaryFile(_SPOOLED_BYTES) as content:
            while block := self._file.read(_BLOCK):
                content.write(block)
            yield from _backwards(cast(BinaryIO, content), content.tell())

    def seek_last(self, count: int) -> None:
        """Seek to the start of the last `count` entries; an unfinished one counts.

        Memory use does not depend on the number of lines.
        """
        for _ in self.iter_seek_last(count):
            pass

    def iter_seek_last(self, count: int) -> Iterator[None]:
        """Perform `seek_last` as an iterator, one block of the file per step."""
        if isinstance(self._file, GzipLog):
            yield from self._seek_last_compressed(self._file, count)
            return
        end = self._file.seek(0, os.SEEK_END)
        self.missing_lines = max(count, 0)
        if count <= 0 or end == 0:
            return
        # The final byte is skipped: the line break of the last line does not separate two lines.
        remaining, end_offset = count, end - 1
        while end_offset > 0:
            start = max(0, end_offset - _BLOCK)
            self._file.seek(start)
            block = self._file.read(end_offset - start)
            breaks = block.count(b"\n")
            if breaks < remaining:
                remaining, end_offset = remaining - breaks, start
                yield
                continue
            position = len(block)
            for _ in range(remaining):
                position = block.rindex(b"\n", 0, position)
            self._file.seek(start + position + 1)
            self.missing_lines = 0
            return
        self._file.seek(0)
        self.missing_lines = remaining - 1

    def _seek_last_compressed(self, file: GzipLog, count: int) -> Iterator[None]:
        """Count the lines, then skip those before the last `count`: only forward reading is possible."""
        total, last = 0, b"\n"
        while block := file.read(_BLOCK):
            total, last = total + block.count(b"\n"), block[-1:]
            yield
        total += last != b"\n"
        self.missing_lines = max(count - total, 0)
        skip = max(total - max(count, 0), 0)
        file.rewind()
        while skip > 0 and (block := file.read(_BLOCK)):
            breaks = block.count(b"\n")
            if breaks < skip:
                skip -= breaks
                yield
                continue
            position = -1
            for _ in range(skip):
                position = block.index(b"\n", position + 1)
            self._rest = block[position + 1 :]
            return

    @property
    def size(self) -> int | None:
        """Current size of the file in bytes; None if it is not known, of a compressed file."""
        return None if isinstance(self._file, GzipLog) else os.fstat(self._file.fileno()).st_size

    def blocks(self, up_to: int | None = None) -> Iterator[bytes]:
        """Yield batches of complete lines from the read position to the current end of the file.

        Each step reads one block and yields b"" for a block without a line break. No block is started at or
        after offset `up_to`, for a file that grows as fast as it is read.
        """
        while (up_to is None or self._file.tell() < up_to) and (block := self._file.read(_BLOCK)):
            end = block.rfind(b"\n") + 1
            if not end:
                self._rest = self._rest + block if len(self._rest) < _LONGEST_LINE else b""
                # Lets the caller stop: a sparse file may have terabytes without a line break.
                yield b""
                continue
            complete = b"".join((self._rest, memoryview(block)[:end]))
            self._rest = block[end:]
            yield complete

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries from the read position to the current end; may be called again later."""
        for block in self.blocks():
            yield from parse_entries(block)

    def take_rest(self) -> bytes:
        """Return the bytes after the last line break, for a file that is no longer written to."""
        rest, self._rest = self._rest, b""
        return rest

    def rest(self) -> Iterator[LogEntry]:
        """Yield the entry after the last line break, as `take_rest`."""
        yield from parse_entries(self.take_rest())

    def is_replaced(self) -> bool:
        """Return whether another file of the log may follow: this one was rotated, removed or truncated."""
        if self.stem is not None:
            return True
        opened = os.fstat(self._file.fileno())
        try:
            current = self.path.stat()
        except OSError:
            return False
        return not os.path.samestat(opened, current) or opened.st_size < self._file.tell()

    def is_written(self) -> bool | None:
        """Return whether another process has the file open for writing; None if that is not known."""
        return is_written(self._file.fileno())

    def advance(self) -> bytes | None:
        """Continue with the following file of the log, or at the start of this one if it was truncated.

        Return the bytes after the last line break of the old file; None if no other file can be opened.
        """
        rest = self._rest
        with suppress(OSError):
            if self._is_truncated():
                self._file.seek(0)
            else:
                successor = open_successor(self.path, self._opened)
                if successor is None:
                    return None
                self._file.close()
                self._opened = successor
            self._rest = b""
            return rest
        return None

    def _is_truncated(self) -> bool:
        return self.stem is None and os.fstat(self._file.fileno()).st_size < self._file.tell()


async def follow(log: LogFile, may_grow: MayGrow) -> AsyncIterator[list[LogEntry]]:
    """Yield entries as they are written, until `may_grow` returns False. Raises like `follow_blocks`."""
    async with aclosing(follow_blocks(log, may_grow)) as blocks:
        async for block in blocks:
            yield list(parse_entries(block))


async def follow_blocks(
    log: LogFile, may_grow: MayGrow, on_file: Callable[[str | None], None] = lambda stem: None
) -> AsyncGenerator[bytes, None]:
    """Yield batches of complete lines as they are written, until `may_grow` returns False.

    The last line of a completed log may lack its line break. `on_file` is called with `LogFile.stem` when
    another file of the log is read. Raises OSError if the directory cannot be watched, and whatever
    `may_grow` raises.
    """
    clock = asyncio.get_running_loop().time
    with Inotify() as changes:
        changes.watch(log.path.parent, _CHANGES)
        quiet_since, last, drain_until = clock(), False, None
        while True:
            async for block in _in_thread(log.blocks()):
                quiet_since = clock()
                yield block
            if await finish_in_thread(log.is_replaced):
                # The runtime opens the new file before it has written its buffers to the old one.
                now, is_written = clock(), await finish_in_thread(log.is_written)
                if drain_until is None:
                    drain_until = now + (_ROTATION_GRACE_SECONDS if is_written is None else _DRAIN_SECONDS)
                if is_written is not False and now < drain_until:
                    await asyncio.sleep(_BATCH_DELAY_SECONDS)
                    continue
                async for block in _in_thread(log.blocks()):
                    yield block
                if (rest := await finish_in_thread(log.advance)) is not None:
                    yield rest
                    on_file(log.stem)
                    drain_until = None
                    continue
            if last:
                yield log.take_rest()
                return
            await _wait_for_change(changes)
            if clock() - quiet_since >= _TICK_SECONDS / 2:
                quiet_since, last = clock(), not await may_grow()


async def present_blocks(log: LogFile) -> AsyncGenerator[bytes, None]:
    """Yield batches of complete lines up to the log's current end, then the bytes after the last line."""
    async for block in _in_thread(log.blocks(up_to=log.size)):
        yield block
    yield log.take_rest()


async def seek_last_of(logs: Sequence[LogFile], count: int) -> int:
    """Seek to the last `count` lines of several files, oldest first; return the index of the first to read.

    Earlier files contain none of these lines.
    """
    for index in reversed(range(len(logs))):
        await seek_last_lines(logs[index], count)
        count = logs[index].missing_lines
        if not count:
            return index
    return 0


async def seek_last_lines(log: LogFile, count: int) -> None:
    """Run `LogFile.seek_last` in a thread; cancellation takes effect after the current block."""
    async for _ in _in_thread(log.iter_seek_last(count)):
        pass


async def _in_thread(items: Iterator[_Item]) -> AsyncIterator[_Item]:
    """Yield the items of a blocking iterator, advancing it in a thread."""
    done = object()
    # On cancellation this waits for the current step, because the caller closes the file next.
    while (item := await finish_in_thread(lambda: next(items, done))) is not done:
        yield cast(_Item, item)


async def _wait_for_change(changes: Inotify) -> None:
    """Wait until the directory changes, at most until the next tick.

    The ticks of all logs coincide: one wake-up per second for all costs much less than one for each.
    """
    now = asyncio.get_running_loop().time()
    next_tick = (now // _TICK_SECONDS + 1) * _TICK_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_seconds(next_tick - now)):
            await anext(changes)
        await asyncio.sleep(_BATCH_DELAY_SECONDS)


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield a file's lines, last one first, starting with the bytes after the last line break."""
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        if len(rest) > _LONGEST_LINE:
            rest = b""
        first, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        rest, end = first, start
    yield rest
