"""Reading a container's log file: from its end, to its end, and on while it grows.

A log that is followed may be rotated: the file is renamed and a new one takes its name. What was
written to the old one until then is read first, so no line is lost or read twice. A file that was cut
short in place is read from its beginning again.

Only regular files are opened: a container that mounts the log directory could put a FIFO or a device there.
`LogFile` blocks on the disk, so the server calls it in threads (`follow_blocks`, `present_blocks`,
`seek_last_lines`), one block at a time, so that neither a large file nor a slow disk stops the event loop or
occupies a thread for long.

What a container's log file says, line by line.

A runtime writes what a container says as entries, one to a line of the file:

    2026-01-02T03:04:05.123456789Z stdout F a whole line
    2026-01-02T03:04:05.123456790Z stderr P the beginning of a long one, continued in the next stderr entry

Pure: bytes in, entries out. A damaged entry (a disk that was full, a runtime that was killed) is skipped;
the ones after it still count.

There are two ways to a text, and they give the same. Mostly a client wants all of a log whose lines are all
whole: then the runtime's columns are cut out of many lines at once. In all other cases each entry is looked
at, a few at a time, because that takes ten times as long.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, cast

from pykubelet.linux.inotify import Inotify, Mask
from pykubelet.linux.untrusted_files import open_regular
from pykubelet.util.tasks import finish_in_thread, wait_seconds

Stream = Literal["stdout", "stderr"]
_BOTH: tuple[Stream, ...] = ("stdout", "stderr")

# A time is known by its shape: looking at each digit would take longer than everything else here.
_SHAPE = rb"....-..-..T..:..:..[-+.:0-9Z]{1,16}+"
_ENTRY = re.compile(
    rb"(?P<stamp>" + _SHAPE + rb") (?P<stream>stdout|stderr) (?P<tags>[^ ]*) (?P<text>(?s:.*))"
)

# The front of a whole line's entry; with the line break before it; and several of them with the texts in
# between, because what each find costs by itself counts when there are a million.
_FRONT = re.compile(_SHAPE + rb" std(?:out|err) F ")
_NEXT_FRONT = re.compile(rb"\n" + _FRONT.pattern)
_AT_ONCE = 8
_FRONTS = re.compile(rb"(.*+)".join([_NEXT_FRONT.pattern] * _AT_ONCE))
_STAMP = re.compile(r"(?P<seconds>.{19})(?:\.(?P<fraction>[0-9]+))?(?P<zone>.*)", re.ASCII)
_NANOS = 1_000_000_000

# Bytes of lines that are looked at one by one at a time.
_FEW = 16 * 1024


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry: a line that a container wrote, or a piece of one."""

    stamp: str
    """When it was written, as the runtime wrote it down."""
    stream: Stream
    text: bytes
    """Without a line break at its end."""
    partial: bool
    """Whether the line goes on in the next entry of the same stream."""

    @property
    def nanoseconds(self) -> int:
        """When it was written, since the epoch; 0 for a time that does not exist."""
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
        """The time with nine digits of the second, so that lines align."""
        match = _STAMP.fullmatch(self.stamp)
        assert match is not None
        return f"{match['seconds']}.{(match['fraction'] or '').ljust(9, '0')}{match['zone']}"


def parse_entry(line: bytes) -> LogEntry | None:
    """Read one line of a log file; None when it is no entry."""
    match = _ENTRY.fullmatch(line.removesuffix(b"\n"))
    if match is None:
        return None
    # Tags that are still to be invented follow the first one after colons.
    partial = match["tags"].partition(b":")[0] == b"P"
    stream: Stream = "stdout" if match["stream"] == b"stdout" else "stderr"
    return LogEntry(match["stamp"].decode("latin-1"), stream, match["text"], partial)


def parse_entries(lines: bytes) -> Iterator[LogEntry]:
    """Read several lines; what is no entry is left out."""
    return (entry for line in lines.split(b"\n") if line and (entry := parse_entry(line)) is not None)


def last_lines(backwards: Iterable[bytes], count: int) -> list[LogEntry]:
    """Take entries from the end of a log until they make `count` whole lines; give them in their order.

    `backwards` are the lines of the file, the last one first; no more of them are taken than needed.
    A line that is still being written counts as one.
    """
    chosen: list[LogEntry] = []
    # For each stream: whether the pieces that come before belong to a line that was chosen.
    wanted: dict[Stream, bool] = {}
    lines = 0
    for line in backwards if count > 0 else ():
        if (entry := parse_entry(line)) is None:
            continue
        ends_a_line = not entry.partial or entry.stream not in wanted
        if ends_a_line:
            wanted[entry.stream] = lines < count
            lines += wanted[entry.stream]
        if wanted[entry.stream]:
            chosen.append(entry)
        elif lines == count and not any(wanted.values()):
            break
    return chosen[::-1]


class LineWriter:
    """Turns entries into what goes to each stream: pieces joined, old lines left out, times in front.

    Whether a line is shown is decided at its beginning, for each stream by itself.
    """

    def __init__(self, *, timestamps: bool = False, since: int | None = None) -> None:
        self._timestamps = timestamps
        self._since = since
        self._unfinished: dict[Stream, bool] = {}

    def write(self, entries: Iterable[LogEntry]) -> Iterator[tuple[Stream, bytes]]:
        """Give the bytes for each stream, in order; `since` is in nanoseconds since the epoch."""
        for entry in entries:
            begun = entry.stream in self._unfinished
            shown = self._unfinished.get(entry.stream) if begun else self._is_new(entry)
            if entry.partial:
                self._unfinished[entry.stream] = bool(shown)
            else:
                self._unfinished.pop(entry.stream, None)
            if shown:
                front = f"{entry.fixed_stamp} ".encode("latin-1") if self._timestamps and not begun else b""
                yield entry.stream, front + entry.text + (b"" if entry.partial else b"\n")

    def texts(self, lines: bytes, streams: Container[Stream] = _BOTH) -> Iterator[bytes]:
        """Give what many lines of a log file say, of the streams that are wanted.

        In pieces, none of which takes long to make; whoever has others waiting lets them go in between.
        """
        everything = not self._timestamps and self._since is None and all(one in streams for one in _BOTH)
        if everything and (text := _whole_lines(lines)) is not None:
            yield text
            return
        middle = lines.find(b"\n", len(lines) // 2) + 1
        if len(lines) > _FEW and 0 < middle < len(lines):
            yield from self.texts(lines[:middle], streams)
            yield from self.texts(lines[middle:], streams)
        else:
            entries = self.write(parse_entries(lines))
            yield b"".join(text for stream, text in entries if stream in streams)

    def _is_new(self, entry: LogEntry) -> bool:
        return self._since is None or entry.nanoseconds >= self._since


def _whole_lines(lines: bytes) -> bytes | None:
    """Give the texts of lines that are all whole, of whichever stream; None when one is not."""
    front = _FRONT.match(lines)
    if front is None or not lines.endswith(b"\n"):
        return None
    texts: list[bytes] = _FRONTS.split(lines)
    last = _NEXT_FRONT.split(texts.pop())
    # A line without a proper front is still part of the text between two finds, with its line break.
    between = b"".join((*texts[::_AT_ONCE], *last))
    if between.find(b"\n") < len(between) - 1:
        return None
    texts += last
    texts[0] = texts[0][front.end() :]
    return b"\n".join(texts)


_BLOCK = 256 * 1024

# A runtime writes entries of 16 KiB at most; what has no line break for so long is damage.
_LONGEST_LINE = 1024 * 1024
_TICK_SECONDS = 1.0
_CHANGES = Mask.MODIFY | Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE

# The kernel tells of each write; a busy container is read in gulps, not in sips.
_GULP_SECONDS = 0.02
_LETTING_GO_SECONDS = 0.1
_Item = TypeVar("_Item")
GoesOn = Callable[[], Awaitable[bool]]
"""Says whether a log may still grow; asked about once a second while nothing new comes."""


class LogFile:
    """An open log file, and how far it was read."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises OSError, also when it is not a regular file."""
        self.path = path
        self._file: BinaryIO = _open(path)
        self._rest = b""

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def skip_to_last(self, count: int) -> list[LogEntry]:
        """Give the last `count` lines, and read on behind them."""
        size = self._file.seek(0, os.SEEK_END)
        lines = _backwards(self._file, size)
        unfinished = next(lines, b"")
        entries = last_lines(lines, count)
        self._file.seek(size - len(unfinished))
        return entries

    def seek_last(self, count: int) -> None:
        """Read on at the beginning of the last `count` entries; one that is being written counts, too.

        Takes no more memory for many lines than for few.
        """
        for _ in self.seeking_last(count):
            pass

    def seeking_last(self, count: int) -> Iterator[None]:
        """Do what `seek_last` does, one block of the file per step."""
        end = self._file.seek(0, os.SEEK_END)
        if count <= 0 or end == 0:
            return
        # What ends the last line ends no line before it.
        wanted, place = count, end - 1
        while place > 0:
            start = max(0, place - _BLOCK)
            self._file.seek(start)
            block = self._file.read(place - start)
            breaks = block.count(b"\n")
            if breaks < wanted:
                wanted, place = wanted - breaks, start
                yield
                continue
            position = len(block)
            for _ in range(wanted):
                position = block.rindex(b"\n", 0, position)
            self._file.seek(start + position + 1)
            return
        self._file.seek(0)

    @property
    def size(self) -> int:
        """How long the file is now, in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def blocks(self, up_to: int | None = None) -> Iterator[bytes]:
        """Yield whole lines, some at a time, from here to the end of the file as it is now.

        Each step reads one block, and yields nothing of one without a line break. Nothing is begun behind
        `up_to`, for a file that grows as fast as it is read.
        """
        while (up_to is None or self._file.tell() < up_to) and (block := self._file.read(_BLOCK)):
            end = block.rfind(b"\n") + 1
            if not end:
                self._rest = self._rest + block if len(self._rest) < _LONGEST_LINE else b""
                # The caller may stop here: a sparse file has terabytes without a line break.
                yield b""
                continue
            whole = b"".join((self._rest, memoryview(block)[:end]))
            self._rest = block[end:]
            yield whole

    def entries(self) -> Iterator[LogEntry]:
        """Give the entries from here to the end of the file, as it is now; may be called again later."""
        for block in self.blocks():
            yield from parse_entries(block)

    def take_rest(self) -> bytes:
        """Give what stands behind the last line break; for a file that nobody writes to any more."""
        rest, self._rest = self._rest, b""
        return rest

    def rest(self) -> Iterator[LogEntry]:
        """Give the entry behind the last line break, as `take_rest`."""
        yield from parse_entries(self.take_rest())

    def is_replaced(self) -> bool:
        """Whether another file has taken this one's name, or this one was cut short."""
        mine = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except OSError:
            return False
        return not os.path.samestat(mine, there) or mine.st_size < self._file.tell()

    def renew(self) -> None:
        """Read on at the beginning of the file that has the name now; what is unread of this one is left."""
        with suppress(OSError):
            successor = _open(self.path)
            self._file.close()
            self._file, self._rest = successor, b""


async def follow(log: LogFile, goes_on: GoesOn) -> AsyncIterator[list[LogEntry]]:
    """Give entries as they come, until the log does not go on; raises what `follow_blocks` raises."""
    async with aclosing(follow_blocks(log, goes_on)) as blocks:
        async for block in blocks:
            yield list(parse_entries(block))


async def follow_blocks(log: LogFile, goes_on: GoesOn) -> AsyncGenerator[bytes, None]:
    """Give whole lines as they come, some at a time, until the log does not go on.

    The last line of a log that nobody writes to any more may lack its line break. Raises OSError when the
    folder cannot be watched, and whatever `goes_on` raises.
    """
    clock = asyncio.get_running_loop().time
    with Inotify() as changes:
        changes.watch(log.path.parent, _CHANGES)
        quiet_since, last = clock(), False
        while True:
            async for block in _in_thread(log.blocks()):
                quiet_since = clock()
                yield block
            if await finish_in_thread(log.is_replaced):
                # The runtime opens the new file before it lets go of the old one.
                await asyncio.sleep(_LETTING_GO_SECONDS)
                async for block in _in_thread(log.blocks()):
                    yield block
                yield log.take_rest()
                await finish_in_thread(log.renew)
            elif last:
                yield log.take_rest()
                return
            else:
                await _change(changes)
                if clock() - quiet_since >= _TICK_SECONDS / 2:
                    quiet_since, last = clock(), not await goes_on()


async def present_blocks(log: LogFile) -> AsyncGenerator[bytes, None]:
    """Yield whole lines, some at a time, up to the present end of the log, and what follows the last one."""
    async for block in _in_thread(log.blocks(up_to=log.size)):
        yield block
    yield log.take_rest()


async def seek_last_lines(log: LogFile, count: int) -> None:
    """Call `LogFile.seek_last` off the event loop; cancelling ends it after one block."""
    async for _ in _in_thread(log.seeking_last(count)):
        pass


async def _in_thread(items: Iterator[_Item]) -> AsyncIterator[_Item]:
    """Yield the items of a blocking iterator, each of them taken in a thread."""
    done = object()
    # Cancelled, it waits for the step in progress: the caller is about to close the file.
    while (item := await finish_in_thread(lambda: next(items, done))) is not done:
        yield cast(_Item, item)


async def _change(changes: Inotify) -> None:
    """Wait until something happens in the folder, but not beyond the next tick.

    The ticks of all logs fall together: to wake up once a second for all costs much less than for each.
    """
    now = asyncio.get_running_loop().time()
    next_tick = (now // _TICK_SECONDS + 1) * _TICK_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_seconds(next_tick - now)):
            await anext(changes)
        await asyncio.sleep(_GULP_SECONDS)


def _open(path: Path) -> BinaryIO:
    # Some runtimes keep their logs elsewhere and put a symbolic link here.
    return os.fdopen(open_regular(path, follow_symlink=True), "rb", buffering=0)


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Give a file's lines, the last one first; the very first is what follows the last line break."""
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
