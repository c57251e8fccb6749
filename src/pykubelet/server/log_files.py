"""Reading a container's log file: from its end, to its end, and on while it grows.

A log that is followed may be rotated: the file is renamed and a new one takes its name. What was
written to the old one until then is read first, so no line is lost or read twice. A file that was cut
short in place is read from its beginning again.

Only regular files are opened: a container that mounts the log directory could put a FIFO or a device there.
`LogFile` blocks on the disk, so the server calls it in threads (`follow_blocks`, `present_blocks`,
`seek_last_lines`), one block at a time, so that neither a large file nor a slow disk stops the event loop or
occupies a thread for long.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from pykubelet.host.inotify import Inotify, Mask
from pykubelet.host.regular_files import open_regular
from pykubelet.server.log_lines import LogEntry, last_lines, parse_entries
from pykubelet.tasks import finish_in_thread, wait_seconds

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
