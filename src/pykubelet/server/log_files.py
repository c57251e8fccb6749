"""Reading a container's log file: from its end, to its end, and on while it grows.

A log that is followed may be rotated: the file is renamed and a new one takes its name. What was
written to the old one until then is read first, so no line is lost or read twice. A file that was cut
short in place is read from its beginning again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pykubelet.host.inotify import Inotify, Mask
from pykubelet.server.log_lines import LogEntry, last_lines, parse_entry

_BLOCK = 64 * 1024
_TICK_SECONDS = 1.0
_CHANGES = Mask.MODIFY | Mask.CREATE | Mask.MOVED_FROM | Mask.MOVED_TO | Mask.DELETE
# The kernel tells of each write; a busy container is read in gulps, not in sips.
_GULP_SECONDS = 0.02
_LETTING_GO_SECONDS = 0.1

GoesOn = Callable[[], Awaitable[bool]]
"""Says whether a log may still grow; asked about once a second while nothing new comes."""


class LogFile:
    """An open log file, and how far it was read."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises OSError."""
        self.path = path
        self._file: BinaryIO = path.open("rb", buffering=0)
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

    def entries(self) -> Iterator[LogEntry]:
        """Give the entries from here to the end of the file, as it is now; may be called again later."""
        while block := self._file.read(_BLOCK):
            *lines, self._rest = (self._rest + block).split(b"\n")
            yield from _parsed(lines)

    def rest(self) -> Iterator[LogEntry]:
        """Give what stands behind the last line break; for a file that nobody writes to any more."""
        rest, self._rest = self._rest, b""
        yield from _parsed([rest])

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
            successor = self.path.open("rb", buffering=0)
            self._file.close()
            self._file, self._rest = successor, b""


async def follow(log: LogFile, goes_on: GoesOn) -> AsyncIterator[list[LogEntry]]:
    """Give entries as they come, until the log does not go on.

    Raises OSError when the folder cannot be watched, and whatever `goes_on` raises.
    """
    clock = asyncio.get_running_loop().time
    with Inotify() as changes:
        changes.watch(log.path.parent, _CHANGES)
        quiet_since, last = clock(), False
        while True:
            if entries := list(log.entries()):
                quiet_since = clock()
                yield entries
            if log.is_replaced():
                # The runtime opens the new file before it lets go of the old one.
                await asyncio.sleep(_LETTING_GO_SECONDS)
                yield [*log.entries(), *log.rest()]
                log.renew()
            elif last:
                yield list(log.rest())
                return
            else:
                await _change(changes)
                if clock() - quiet_since >= _TICK_SECONDS:
                    quiet_since, last = clock(), not await goes_on()


async def _change(changes: Inotify) -> None:
    """Wait until something happens in the folder, but no longer than a tick."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_TICK_SECONDS):
            await anext(changes)
        await asyncio.sleep(_GULP_SECONDS)


def _parsed(lines: Iterable[bytes]) -> Iterator[LogEntry]:
    return (entry for line in lines if (entry := parse_entry(line)) is not None)


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Give a file's lines, the last one first; the very first is what follows the last line break."""
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        first, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        rest, end = first, start
    yield rest
