"""Operations on the log files of one container directory, `<pod logs>/<pod>/<container>`.

A pod with a hostPath volume can change anything in that directory at any time. The directory is opened
component by component without following symbolic links, and every operation names a single entry of the open
directory: nothing outside is read, renamed or removed. Only regular files are opened, and never a FIFO or a
device.

Each operation leaves a state that `plan.classify` understands, wherever the process is killed: a rename is
atomic, and a compressed or trimmed file is complete in a `.tmp` file before it takes its name. All functions
block on the disk: call them in threads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from pykubelet.kuberuntime.log_rotation.plan import COMPRESSED, TEMPORARY, LogDirectoryEntry
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_regular, remove_entry

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_REPLACE = 1
_BLOCK = 256 * 1024
_MAX_ENTRIES = 10_000
"""Maximum of a log's files that are listed together; the others are listed when these are removed."""
_LEVEL = 1
"""Compression level of zlib: half the processor time of level 6 for files that are 10 % larger."""
_GZIP = 16 + zlib.MAX_WBITS
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileChangedError(OSError):
    """Raised when a file was written or replaced while it was read; it is left as it is."""


class CompressionStopped(Exception):
    """Raised when the caller has requested the end of a compression."""


def is_written(opened: int) -> bool | None:
    """Return whether another descriptor is open for writing on the file; None if that cannot be determined.

    The kernel grants a read lease only on a file that is not open for writing; it is released immediately.
    """
    try:
        # If a process opens the file in between, the signal is this one, which is ignored by default.
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as err:
        return True if err.errno in (errno.EAGAIN, errno.EBUSY) else None
    with suppress(OSError):
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


class LogDirectory:
    """An open container log directory, as a context manager."""

    def __init__(self, root: Path, directory: Path) -> None:
        """Open `directory`, which is below `root`.

        Raises OSError, also if a component below `root` is a symbolic link, and ValueError if the directory
        is not below `root`.
        """
        parts = directory.relative_to(root).parts
        if not parts or ".." in parts:
            raise ValueError(f"{directory} is not below {root}")
        opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            parent = opened
            try:
                opened = os.open(part, OPEN_DIRECTORY, dir_fd=parent)
            finally:
                os.close(parent)
        self._opened = opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._opened)

    def names(self) -> Iterable[str]:
        """Yield the names of all entries."""
        with os.scandir(self._opened) as entries:
            for entry in entries:
                yield entry.name

    def inode(self, name: str) -> tuple[int, int] | None:
        """Return device and inode number of an entry; None if it does not exist."""
        found = self._stat(name)
        return (found.st_dev, found.st_ino) if found is not None else None

    def size(self, name: str) -> int | None:
        """Return the size of a regular file; None for any other entry, or without one."""
        found = self._stat(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def scan(self, log_name: str) -> list[LogDirectoryEntry]:
        """Return the entries that belong to a log, without the log itself."""
        prefix, entries = f"{log_name}.", []
        with os.scandir(self._opened) as found:
            for entry in found:
                if not entry.name.startswith(prefix):
                    continue
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    entries.append(
                        LogDirectoryEntry(
                            suffix=entry.name.removeprefix(prefix),
                            size=facts.st_size,
                            modified=facts.st_mtime,
                            inode=(facts.st_dev, facts.st_ino),
                            is_regular=stat.S_ISREG(facts.st_mode),
                        )
                    )
                if len(entries) >= _MAX_ENTRIES:
                    break
        return entries

    def open(self, name: str) -> int:
        """Open a regular file for reading and return its descriptor. Raises OSError as `open_regular`."""
        return open_regular(name, dir_fd=self._opened)

    def remove(self, name: str) -> None:
        """Remove an entry of any type. Raises OSError; a missing entry is not an error."""
        remove_entry(self._opened, name)

    def rename(self, name: str, target: str) -> None:
        """Rename an entry. Raises FileExistsError if the target exists, and OSError."""
        rename = getattr(_LIBC, "renameat2", None)
        if rename is not None:
            source, destination = os.fsencode(name), os.fsencode(target)
            if not rename(self._opened, source, self._opened, destination, _NO_REPLACE):
                return
            number = ctypes.get_errno()
            if number not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(number, os.strerror(number), name, None, target)
        # File systems without RENAME_NOREPLACE; `classify` recognizes a second name of the log.
        os.link(name, target, src_dir_fd=self._opened, dst_dir_fd=self._opened, follow_symlinks=False)
        os.unlink(name, dir_fd=self._opened)

    def compress(self, name: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Replace a rotated file by its compressed form, `<name>.gz`, with the same modification time.

        Raises CompressionStopped, FileChangedError, and OSError; the file is unchanged then.
        """
        source = self.open(name)
        try:
            facts = os.fstat(source)
            if is_written(source):
                raise FileChangedError(errno.EBUSY, "the file is open for writing", name)
            with _Temporary(self._opened, f"{name}{TEMPORARY}", facts) as temporary:
                compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
                read = 0
                # A file that another process keeps appending to would never end.
                while read <= facts.st_size and (block := os.read(source, _BLOCK)):
                    if is_stopped():
                        raise CompressionStopped
                    read += len(block)
                    temporary.write(compressor.compress(block))
                temporary.write(compressor.flush())
                self._check_unchanged(name, facts, read)
                temporary.complete(f"{name}{COMPRESSED}")
        finally:
            os.close(source)
        self.remove(name)

    def trim(self, name: str, max_bytes: int) -> None:
        """Reduce a file that is no longer written to its last complete lines within `max_bytes`.

        Raises FileChangedError, and OSError; the file is unchanged then.
        """
        source = self.open(name)
        try:
            facts = os.fstat(source)
            if is_written(source):
                raise FileChangedError(errno.EBUSY, "the file is open for writing", name)
            start = _line_start(source, facts.st_size - max_bytes)
            with _Temporary(self._opened, f"{name}{TEMPORARY}", facts) as temporary:
                position = start
                while position < facts.st_size and (block := os.pread(source, _BLOCK, position)):
                    position += len(block)
                    temporary.write(block)
                self._check_unchanged(name, facts, position)
                temporary.complete(name)
        finally:
            os.close(source)

    def _check_unchanged(self, name: str, facts: os.stat_result, read: int) -> None:
        current = self._stat(name)
        if current is None or not os.path.samestat(current, facts) or current.st_size != read:
            raise FileChangedError(errno.ESTALE, "the file changed while it was read", name)

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._opened, follow_symlinks=False)
        except FileNotFoundError:
            return None


class _Temporary:
    """A new file that takes its final name when it is complete, and is removed otherwise."""

    def __init__(self, directory: int, name: str, like: os.stat_result) -> None:
        self._directory = directory
        self._name: str | None = name
        self._like = like
        remove_entry(directory, name)
        self._opened = os.open(name, _CREATE, stat.S_IMODE(like.st_mode) & 0o777, dir_fd=directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._opened)
        if self._name is not None:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self._directory)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._opened, rest) :]

    def complete(self, name: str) -> None:
        """Rename the file, replacing another one; its data is on the disk before that."""
        assert self._name is not None
        os.fdatasync(self._opened)
        # `--since` skips files that were last written before.
        os.utime(self._opened, ns=(self._like.st_atime_ns, self._like.st_mtime_ns))
        os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._name = None


def _line_start(opened: int, offset: int) -> int:
    """Return the offset of the first line that starts at or after `offset`; `offset` if no line does soon."""
    if offset <= 0:
        return 0
    # The byte before may end a line.
    position = os.pread(opened, _BLOCK, offset - 1).find(b"\n")
    return offset + position if position >= 0 else offset
