"""The files of one container log in order: the rotated ones, oldest first, then the one being written.

`log_files` reads them. A log can be rotated, compressed and shortened while it is read, so the order is
derived from open files: /proc/self/fd has the current name of a file that was renamed, or the last one of a
file that was removed. Files are opened by a single name in their directory and must be regular: no symbolic
link of a pod leads to another file.

Compressed files are untrusted: at most MAX_UNCOMPRESSED bytes of each are decompressed, in small blocks, and
a damaged one ends where the damage begins. All functions block on the disk: call them in threads.
"""

from __future__ import annotations

import io
import os
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from pykubelet.kuberuntime.log_rotation.directory import LogDirectory
from pykubelet.kuberuntime.log_rotation.plan import (
    COMPRESSED,
    LogDirectoryEntry,
    classify,
    newest_allowed,
    sort_key,
)
from pykubelet.linux.untrusted_files import open_regular

MAX_UNCOMPRESSED = 1024 * 1024 * 1024
"""Bytes of one compressed file that are read."""
MAX_OLDER_FILES = 100
_COMPRESSED_BLOCK = 64 * 1024
_GZIP = 16 + zlib.MAX_WBITS
_TRIES = 10
_CLOCK_SLACK_SECONDS = 2.0
"""Seconds by which the time of a file may be before the time stamp of its last line."""
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """An open file of a log; `stem` identifies a rotated one and is None for the file being written."""

    file: BinaryIO
    stem: str | None


class GzipLog(io.RawIOBase):
    """A compressed file, read forward as its content, bounded."""

    def __init__(self, opened: int, limit: int = MAX_UNCOMPRESSED) -> None:
        """Own the descriptor."""
        self._opened = opened
        self._limit = limit
        self._is_over = False
        self.rewind()

    def rewind(self) -> None:
        """Read from the start again."""
        os.lseek(self._opened, 0, os.SEEK_SET)
        self._decompressor = zlib.decompressobj(_GZIP)
        self._input = b""
        self._position = 0
        self._is_over = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the compressed file."""
        return self._opened

    def tell(self) -> int:
        """Return the number of decompressed bytes that were read."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` decompressed bytes; b"" at the end, at damage, and at the limit."""
        size = min(size, self._limit - self._position)
        while not self._is_over and size > 0:
            if not self._input:
                self._input = os.read(self._opened, _COMPRESSED_BLOCK)
                if not self._input:
                    break
            try:
                data = self._decompressor.decompress(self._input, size)
            except zlib.error:
                break
            self._input = self._decompressor.unconsumed_tail
            if self._decompressor.eof:
                # Another member may follow.
                self._input = self._decompressor.unused_data
                self._decompressor = zlib.decompressobj(_GZIP)
            if data:
                self._position += len(data)
                return data
        self._is_over = True
        return b""

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            os.close(self._opened)
        super().close()


def open_active(path: Path) -> OpenedLog:
    """Open the file being written. Raises OSError, also if it is not a regular file."""
    # Some runtimes store logs elsewhere and create a symbolic link here.
    return OpenedLog(os.fdopen(open_regular(path, follow_symlink=True), "rb", buffering=0), None)


def open_older(path: Path, opened: OpenedLog, since: int | None = None) -> list[OpenedLog]:
    """Open the rotated files before `opened`, oldest first; without those last written before `since`.

    `since` is in nanoseconds since the Unix epoch. Files that are removed concurrently are left out; at most
    the newest MAX_OLDER_FILES are opened. Raises OSError.
    """
    with ExitStack() as stack, _directory(path) as directory:
        older, newest = _rotated(directory, path.name), newest_allowed(time.time())
        # The file was still being written after the listing, or the name tells which of them are older.
        if (current := _stem(path, opened, older)) is not None:
            older = [entry for entry in older if sort_key(entry.stem, newest) < sort_key(current, newest)]
        if since is not None:
            older = [entry for entry in older if entry.modified + _CLOCK_SLACK_SECONDS >= since / 1e9]
        found = []
        for entry in older[-MAX_OLDER_FILES:]:
            log = _open_rotated(directory, path.name, entry)
            if log is not None:
                stack.callback(log.file.close)
                found.append(log)
        stack.pop_all()
    return found


def open_newest_rotated(path: Path) -> OpenedLog | None:
    """Open the newest rotated file, for a log whose file being written does not exist. Raises OSError."""
    with _directory(path) as directory:
        for entry in reversed(_rotated(directory, path.name)):
            log = _open_rotated(directory, path.name, entry)
            if log is not None:
                return log
    return None


def open_successor(path: Path, opened: OpenedLog) -> OpenedLog | None:
    """Open the file that follows `opened`; None if there is no such file, or not yet. Raises OSError."""
    for _ in range(_TRIES):
        with _directory(path) as directory:
            following = _following(directory, path, opened)
            if following:
                successor = _open_rotated(directory, path.name, following[0])
                if successor is not None:
                    return successor
                continue  # removed in between
            try:
                successor = open_active(path)
            except FileNotFoundError:
                return None
            facts = os.fstat(successor.file.fileno())
            # The file that was opened is the next one unless it is the same, or others came in between.
            skipped = [
                entry
                for entry in _following(directory, path, opened)
                if entry.inode != (facts.st_dev, facts.st_ino)
            ]
            if not skipped and not os.path.samestat(facts, os.fstat(opened.file.fileno())):
                return successor
            successor.file.close()
            if not skipped:
                return None
    return None


def _following(directory: LogDirectory, path: Path, opened: OpenedLog) -> list[LogDirectoryEntry]:
    """Return the rotated files after `opened`, oldest first."""
    rotated = _rotated(directory, path.name)
    current = _stem(path, opened, rotated)
    if current is None:
        return []
    newest = newest_allowed(time.time())
    return [entry for entry in rotated if sort_key(entry.stem, newest) > sort_key(current, newest)]


def _stem(path: Path, opened: OpenedLog, rotated: list[LogDirectoryEntry]) -> str | None:
    """Return the stem of an open file if it has been rotated, also if it was removed since."""
    if opened.stem is not None:
        return opened.stem
    facts = os.fstat(opened.file.fileno())
    for entry in rotated:
        if entry.inode == (facts.st_dev, facts.st_ino):
            return entry.stem
    name = Path(f"/proc/self/fd/{opened.file.fileno()}").readlink().name.removesuffix(_DELETED)
    suffix = name.removeprefix(f"{path.name}.")
    return suffix if suffix != name else None


def _directory(path: Path) -> LogDirectory:
    # <pod logs>/<pod>/<container>/<attempt>.log
    return LogDirectory(path.parents[min(2, len(path.parents) - 1)], path.parent)


def _rotated(directory: LogDirectory, name: str) -> list[LogDirectoryEntry]:
    return list(classify(directory.scan(name), directory.inode(name), time.time()).rotated)


def _open_rotated(directory: LogDirectory, name: str, entry: LogDirectoryEntry) -> OpenedLog | None:
    """Open a rotated file, also if it has been compressed since it was listed; None if it was removed."""
    for suffix in dict.fromkeys((entry.suffix, f"{entry.stem}{COMPRESSED}")):
        with suppress(FileNotFoundError):
            opened = directory.open(f"{name}.{suffix}")
            if suffix.endswith(COMPRESSED):
                return OpenedLog(cast(BinaryIO, GzipLog(opened)), entry.stem)
            return OpenedLog(os.fdopen(opened, "rb", buffering=0), entry.stem)
    return None
