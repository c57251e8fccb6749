"""Clients that follow logs, and the file that each of them reads.

A client that is slower than the rotation of a log would miss files that are removed before it has read them.
The log manager retains such files while their total on the node is within `limit`, for clients that read: the
files count as usage of the pod, which a client that has stopped reading must not get evicted. The state is in
memory: after a restart no client is connected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HOLD_BYTES = 256 * 1024 * 1024
"""Bytes of rotated logs on the node that are retained beyond their limits for clients."""

STALL_SECONDS = 10.0
"""Seconds in which a client must finish a rotated file; files are not retained for one that does not."""


class LogReader:
    """One client; `stem` is that of the rotated file being read, None for the file being written."""

    __slots__ = ("_clock", "advanced_at", "stem")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stem: str | None = None
        self.advanced_at = clock()
        """Time since which that file is being read, or since which it has been rotated."""

    def on_file(self, stem: str | None) -> None:
        """Record the file that is read from now on."""
        self.stem = stem
        self.advanced_at = self._clock()


class LogReaders:
    """All clients that follow logs, by the path of the log."""

    def __init__(
        self,
        limit: int = HOLD_BYTES,
        *,
        may_hold: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize; nothing is retained while `may_hold` returns False."""
        self._limit = limit
        self._may_hold = may_hold
        self._clock = clock
        self._readers: dict[str, list[LogReader]] = {}
        self._held: dict[str, int] = {}

    @contextmanager
    def reading(self, path: str) -> Iterator[LogReader]:
        """Register a client until the block is left."""
        reader = LogReader(self._clock)
        self._readers.setdefault(path, []).append(reader)
        try:
            yield reader
        finally:
            self._readers[path].remove(reader)
            if not self._readers[path]:
                del self._readers[path]

    def is_read(self, path: str) -> bool:
        """Return whether a client follows the log."""
        return path in self._readers

    def on_rotated(self, path: str, stem: str) -> None:
        """Record the new name of the file that was written until now."""
        for reader in self._readers.get(path, ()):
            if reader.stem is None:
                reader.on_file(stem)

    def unread_after(self, path: str) -> str | None:
        """Return the stem of the oldest rotated file that a client reads and has not stalled at, or None."""
        oldest = self._clock() - STALL_SECONDS
        reading = (reader for reader in self._readers.get(path, ()) if reader.advanced_at > oldest)
        return min((reader.stem for reader in reading if reader.stem), default=None)

    def available(self, path: str) -> int:
        """Return the bytes that may be retained of a log, given those of the others."""
        if not self._may_hold():
            return 0
        return max(0, self._limit - sum(held for other, held in self._held.items() if other != path))

    def set_held(self, path: str, held: int) -> None:
        """Record the bytes that are retained of a log."""
        if held:
            self._held[path] = held
        else:
            self._held.pop(path, None)
