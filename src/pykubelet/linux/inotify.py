"""inotify as an async iterator.

    with Inotify() as changes:
        changes.watch("/etc/kubernetes/manifests", Mask.CREATE | Mask.MOVED_TO)
        async for event in changes:
            ...

One task iterates. The descriptor is closed at the end of the `with` block, also after an exception or a
cancellation. An overflow of the kernel's queue arrives as an event (`event.overflowed`): events were lost,
and the caller must list the directory again.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

_HEADER = struct.Struct("iIII")
_BUFFER = 64 * 1024
_QUEUE = 16384  # fs.inotify.max_queued_events, by default
_HINTS = {
    errno.EMFILE: "no inotify instances or open files left: raise the sysctl fs.inotify.max_user_instances",
    errno.ENOSPC: "no inotify watches left: raise the sysctl fs.inotify.max_user_watches",
}


class Mask(IntFlag):
    """Event types to watch, and of an event (see inotify(7))."""

    ACCESS = 0x1
    MODIFY = 0x2
    ATTRIB = 0x4
    CLOSE_WRITE = 0x8
    CLOSE_NOWRITE = 0x10
    OPEN = 0x20
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    UNMOUNT = 0x2000
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    ONLYDIR = 0x01000000
    DONT_FOLLOW = 0x02000000
    EXCL_UNLINK = 0x04000000
    MASK_ADD = 0x20000000
    ISDIR = 0x40000000
    ONESHOT = 0x80000000


@dataclass(frozen=True, slots=True)
class Event:
    """An inotify event."""

    watch: int
    """Watch descriptor that `Inotify.watch` returned; -1 for a queue overflow."""
    mask: Mask
    cookie: int
    """Equal for the MOVED_FROM and MOVED_TO events of one rename."""
    name: str
    """Name of the file in a watched directory; "" for the watched file or directory itself."""

    @property
    def overflowed(self) -> bool:
        """Whether events were lost, so that the caller must list everything again."""
        return Mask.Q_OVERFLOW in self.mask


class Inotify:
    """An inotify instance; one task at a time may iterate over it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify")
        self._pending: deque[Event] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def watch(self, path: str | Path, mask: Mask) -> int:
        """Add or modify the watch of a file or directory; return the watch descriptor.

        Raises OSError with the path if it does not exist, is not readable, or no watches are left.
        """
        number: int = self._libc.inotify_add_watch(self._open_fd(), os.fsencode(path), ctypes.c_uint32(mask))
        if number < 0:
            raise _error(str(path))
        return number

    def unwatch(self, watch: int) -> None:
        """Remove a watch; one that the kernel has already removed is ignored. Raises OSError."""
        if self._libc.inotify_rm_watch(self._open_fd(), watch) < 0 and ctypes.get_errno() != errno.EINVAL:
            raise _error(f"watch {watch}")

    def close(self) -> None:
        """Close the descriptor; an iteration in progress ends."""
        if self._fd >= 0:
            if self._waiting is not None:
                self._waiting.get_loop().remove_reader(self._fd)
                _wake(self._waiting)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Inotify:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Inotify:
        return self

    def read_queued(self) -> list[Event]:
        """Return the events that happened up to now and were not returned yet, without waiting.

        Returns at most about as many as the kernel queues, so that it ends despite a flood of new events.
        """
        while self._fd >= 0 and len(self._pending) < _QUEUE:
            try:
                self._pending.extend(parse_events(os.read(self._fd, _BUFFER)))
            except BlockingIOError:
                break
        queued = list(self._pending)
        self._pending.clear()
        return queued

    async def __anext__(self) -> Event:
        while not self._pending:
            if self._fd < 0:
                raise StopAsyncIteration
            try:
                self._pending.extend(parse_events(os.read(self._fd, _BUFFER)))
            except BlockingIOError:
                await self._readable()
        return self._pending.popleft()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        loop.add_reader(self._fd, _wake, self._waiting)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if self._fd >= 0:
                loop.remove_reader(self._fd)

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, "this inotify instance is closed")
        return int(self._fd)


def parse_events(data: bytes) -> list[Event]:
    """Parse the data of one read from an inotify descriptor."""
    events, position = [], 0
    while position + _HEADER.size <= len(data):
        watch, mask, cookie, length = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        name = os.fsdecode(data[position : position + length].rstrip(b"\0"))
        events.append(Event(watch, Mask(mask), cookie, name))
        position += length
    return events


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, _HINTS.get(number, os.strerror(number)), what)
