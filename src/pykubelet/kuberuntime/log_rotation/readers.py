"""Clients that follow logs, and the file that each of them reads.

A client that is slower than the rotation of a log would miss files that are removed before it has read them.
The log manager retains such files while their total on the node is within `limit`. The state is in memory:
after a restart no client is connected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

HOLD_BYTES = 256 * 1024 * 1024
"""Bytes of rotated logs on the node that are retained beyond their limits for clients."""


class LogReader:
    """One client; `stem` is that of the rotated file being read, None for the file being written."""

    __slots__ = ("stem",)

    def __init__(self) -> None:
        self.stem: str | None = None


class LogReaders:
    """All clients that follow logs, by the path of the log."""

    def __init__(self, limit: int = HOLD_BYTES) -> None:
        self._limit = limit
        self._readers: dict[str, list[LogReader]] = {}
        self._held: dict[str, int] = {}

    @contextmanager
    def reading(self, path: str) -> Iterator[LogReader]:
        """Register a client until the block is left."""
        reader = LogReader()
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
                reader.stem = stem

    def unread_after(self, path: str) -> str | None:
        """Return the stem of the oldest rotated file being read; None if no client reads one."""
        return min((reader.stem for reader in self._readers.get(path, ()) if reader.stem), default=None)

    def available(self, path: str) -> int:
        """Return the bytes that may be retained of a log, given those of the others."""
        return max(0, self._limit - sum(held for other, held in self._held.items() if other != path))

    def set_held(self, path: str, held: int) -> None:
        """Record the bytes that are retained of a log."""
        if held:
            self._held[path] = held
        else:
            self._held.pop(path, None)
