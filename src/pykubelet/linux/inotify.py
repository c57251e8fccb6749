"""Changes of files, as the kernel tells them, as an async iterator.

    with Inotify() as changes:
        changes.watch("/etc/kubernetes/manifests", Mask.CREATE | Mask.MOVED_TO)
        async for event in changes:
            ...

One task iterates. The descriptor lives as long as the `with` block, whatever ends it, and a
kernel queue that ran over arrives as an event of its own (`event.overflowed`): from then on the
only truth is to read the folder again.
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
    """What to hear of, and what was heard (see inotify(7))."""

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
    """One change."""

    watch: int
    """What `Inotify.watch` returned; -1 when the queue ran over."""
    mask: Mask
    cookie: int
    """The same for the two halves of a rename."""
    name: str
    """The file inside a watched folder; "" for the watched thing itself."""

    @property
    def overflowed(self) -> bool:
        """Whether events were lost, so that everything must be read again."""
        return Mask.Q_OVERFLOW in self.mask


class Inotify:
    """An inotify instance; iterate over it from one task."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify")
        self._pending: deque[Event] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def watch(self, path: str | Path, mask: Mask) -> int:
        """Start to hear of a file or folder, or change what is heard of it; gives the watch's number.

        Raises OSError naming the path: it is not there, not readable, or there are no watches left.
        """
        number: int = self._libc.inotify_add_watch(self._open_fd(), os.fsencode(path), ctypes.c_uint32(mask))
        if number < 0:
            raise _error(str(path))
        return number

    def unwatch(self, watch: int) -> None:
        """Stop to hear of something; a watch that the kernel already took away is fine."""
        if self._libc.inotify_rm_watch(self._open_fd(), watch) < 0 and ctypes.get_errno() != errno.EINVAL:
            raise _error(f"watch {watch}")

    def close(self) -> None:
        """Give the descriptor back; an iteration under way ends."""
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

        At most about as many as the kernel queues, so that a flood of new ones does not keep it reading.
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
    """Split what the kernel gives at one read."""
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
