"""Depth-first walks over directory trees that untrusted processes filled, and may still change.

Each directory is opened from its open parent by a single name, and no symbolic link is followed. The depth
of a tree is limited neither by Python's stack nor by PATH_MAX nor by the number of open files: only the
topmost and the deepest directories of the path are open, and those between are opened again through `..`,
which must lead to the same inode as on the way down.

`walk_tree` visits every entry once. All of this blocks and belongs into a thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

MAX_TOP, MAX_DEEP = 16, 16
"""Directories at the top and at the end of the path that are open; each takes two file descriptors."""
MAX_PENDING = 100_000
"""Names of subdirectories that a walk retains of directories that are not open."""

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of opening a directory that another process has removed, or replaced by something else."""

_OPENAT2 = 437
"""Number of the system call on every architecture."""
_NO_XDEV = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class TreeChangedError(OSError):
    """Raised when another process has moved a directory of the path while a walk was below it."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_on_same_mount(parent: int, name: str, flags: int) -> int:
    """Open an entry of an open directory unless it is a mount point.

    Raises OSError: EXDEV for a mount point; ENOSYS or EPERM where the kernel or a seccomp filter does not
    offer openat2.
    """
    how = _OpenHow(flags, 0, _NO_XDEV)
    opened: int = _LIBC.syscall(_OPENAT2, parent, os.fsencode(name), ctypes.byref(how), ctypes.sizeof(how))
    if opened < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return opened


def mount_id(opened: int) -> str:
    """Return the id of the mount that an open file is on, which also tells bind mounts apart."""
    lines = Path(f"/proc/self/fdinfo/{opened}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))


class OpenDirectory:
    """An open directory, and what is left of its entries: of one that was closed in between, only names."""

    __slots__ = ("entries", "name", "opened", "passes", "pending")

    def __init__(self, opened: int, name: str | None, pending: list[str] | None = None) -> None:
        """Own the descriptor, which is closed also when this fails. Raises OSError."""
        self.opened = opened
        self.name = name
        """Name in the parent directory; None after a reopening."""
        self.pending = pending
        self.passes = 1
        """How often the entries were read from the start."""
        try:
            self.entries = os.scandir(opened)
        except BaseException:
            os.close(opened)
            raise

    def rewind(self) -> None:
        """Read the entries again from the start."""
        self.passes += 1
        self.entries.close()
        self.entries = os.scandir(self.opened)

    def close(self) -> None:
        """Release the file descriptors."""
        self.entries.close()
        os.close(self.opened)


class DirectoryStack:
    """The path from the top of a tree to its current directory, with a bounded number of open files.

    `drain` is called for a directory before it is closed with its entries partly read, and returns the names
    that its reopening must yield; None to read all entries again.
    """

    def __init__(self, drain: Callable[[OpenDirectory], list[str] | None]) -> None:
        self._drain = drain
        self._top: list[OpenDirectory] = []
        self._devices, self._inodes = array("Q"), array("Q")
        self._pending: list[list[str] | None] = []
        """Of the closed directories, between those in `_top` and those in `_deep`."""
        self._deep: deque[OpenDirectory] = deque()

    def __bool__(self) -> bool:
        return bool(self._top)

    @property
    def current(self) -> OpenDirectory:
        """The deepest directory."""
        return self._deep[-1] if self._deep else self._top[-1]

    def push(self, directory: OpenDirectory) -> None:
        """Enter a subdirectory of the current directory."""
        if len(self._top) < MAX_TOP:
            self._top.append(directory)
            return
        self._deep.append(directory)
        if len(self._deep) > MAX_DEEP:
            closing = self._deep[0]
            pending = self._drain(closing)
            facts = os.fstat(closing.opened)
            self._devices.append(facts.st_dev)
            self._inodes.append(facts.st_ino)
            self._pending.append(pending)
            self._deep.popleft().close()

    def parent(self) -> OpenDirectory | None:
        """Return the directory above the current one, opened again if necessary; None at the top.

        Raises TreeChangedError, and OSError.
        """
        if len(self._deep) > 1:
            return self._deep[-2]
        if self._deep:
            if self._inodes:
                self._deep.appendleft(self._reopened(self._deep[0]))
                return self._deep[0]
            return self._top[-1]
        return self._top[-2] if len(self._top) > 1 else None

    def pop(self) -> None:
        """Leave the current directory for its parent."""
        self.parent()
        (self._deep or self._top).pop().close()

    def close(self) -> None:
        """Release all file descriptors."""
        for directory in (*self._top, *self._deep):
            directory.close()

    def _reopened(self, child: OpenDirectory) -> OpenDirectory:
        opened = os.open("..", OPEN_DIRECTORY, dir_fd=child.opened)
        facts = os.fstat(opened)
        if (facts.st_dev, facts.st_ino) != (self._devices.pop(), self._inodes.pop()):
            os.close(opened)
            raise TreeChangedError(errno.ESTALE, "another process moved a directory")
        return OpenDirectory(opened, None, self._pending.pop())


class Visitor(Protocol):
    """The work of a walk."""

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Handle an entry of an open directory; return whether it is a directory to enter."""
        ...

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory; None to pass over one that was removed or replaced."""
        ...

    def leave(self, opened: int) -> None:
        """Handle an open directory whose entries were all handled."""
        ...


def open_subdirectory(name: str, parent: int) -> int | None:
    """Open a subdirectory; None when another process has removed or replaced it. Raises OSError."""
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    except OSError as err:
        if err.errno in REPLACED:
            return None
        raise


def walk_tree(top: int, visitor: Visitor) -> None:
    """Walk the tree below an open directory, which is closed at the end.

    Raises what the visitor raises, TreeChangedError, and OSError when directories are nested so deeply and
    have so many subdirectories that their names would take too much memory. Blocks.
    """
    _Walk(visitor).run(top)


class _Walk:
    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor
        self._left = MAX_PENDING
        self._stack = DirectoryStack(self._drain)

    def run(self, top: int) -> None:
        try:
            self._stack.push(OpenDirectory(top, None))
            while self._stack:
                directory = self._stack.current
                name = self._next(directory)
                if name is None:
                    self._visitor.leave(directory.opened)
                    self._stack.pop()
                elif (opened := self._visitor.enter(name, directory.opened)) is not None:
                    self._stack.push(OpenDirectory(opened, name))
        finally:
            self._stack.close()

    def _next(self, directory: OpenDirectory) -> str | None:
        """Return the name of the next subdirectory, after the files before it were handled."""
        if directory.pending is not None:
            if not directory.pending:
                return None
            self._left += 1
            return directory.pending.pop()
        for entry in directory.entries:
            if self._visitor.entry(entry, directory.opened):
                return entry.name
        return None

    def _drain(self, directory: OpenDirectory) -> list[str]:
        if directory.pending is not None:
            return directory.pending
        names = []
        for entry in directory.entries:
            if self._visitor.entry(entry, directory.opened):
                if not self._left:
                    raise OSError(
                        errno.ELOOP, f"deeply nested directories have more than {MAX_PENDING} subdirectories"
                    )
                self._left -= 1
                names.append(entry.name)
        return names
