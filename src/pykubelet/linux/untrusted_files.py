"""Walking, removing and reading files that untrusted processes created and may still change.

Directories are opened from their open parent by a single name, and no symbolic link is followed: whatever a
process renames or replaces concurrently, only entries of the tree's own directories are visited or unlinked.
The depth of a tree is limited neither by Python's stack nor by PATH_MAX nor by the number of open files: only
the topmost and the deepest directories of the current path are open, and those between are opened again
through `..`, which must lead to the same inode as on the way down. The kernel (`RESOLVE_NO_XDEV`) keeps a
removal from entering another mount, including bind mounts.

`walk_tree` visits every entry once. `remove_entry` removes a tree; after a failure or an interruption it can
be repeated, and the tree is smaller then.

A container that mounts a host directory can create a FIFO, a device node or a symbolic link where the kubelet
expects a regular file. Opening a FIFO blocks until another process writes to it, opening a device can have
side effects (a watchdog starts), and reading either does not end. `open_regular` and `read_tail` therefore
check the file type on a descriptor before they open the file for reading, so that it cannot be replaced in
between.

All functions block on the disk: call them in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

MAX_TOP, MAX_DEEP = 16, 16
"""Maximum of open directories at the top and at the end of the path; each takes two file descriptors."""
MAX_PENDING = 100_000
"""Maximum of subdirectory names that a walk retains of closed directories."""
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of opening a directory that another process has removed or replaced."""
_OPENAT2 = 437
"""Number of the system call, equal on all architectures."""
_NO_XDEV, _NO_MAGIC_LINKS, _IN_ROOT = 0x01, 0x02, 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)


class TooManyEntries(Exception):
    """Raised when a directory has more entries, or more levels, than its reader handles."""


class TreeChangedError(OSError):
    """Raised when another process has moved a directory of the current path during a walk."""


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


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path as a process with the open directory `root` as its root directory would.

    Symbolic links, absolute ones and `..` included, lead nowhere outside. Raises OSError.
    """
    how = _OpenHow(flags, mode, _IN_ROOT | _NO_MAGIC_LINKS)
    opened: int = _LIBC.syscall(_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if opened < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return opened


def mount_id(opened: int) -> str:
    """Return the id of the mount that an open file is on, which also distinguishes bind mounts."""
    lines = Path(f"/proc/self/fdinfo/{opened}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))


class OpenDirectory:
    """An open directory and its remaining entries; `pending` has their names after a reopening, or None."""

    __slots__ = ("entries", "name", "opened", "passes", "pending")

    def __init__(self, opened: int, name: str | None, pending: list[str] | None = None) -> None:
        """Own the descriptor, which is closed also if this fails. Raises OSError."""
        self.opened = opened
        self.name = name
        """Name in the parent directory; None after a reopening."""
        self.pending = pending
        self.passes = 1
        """Number of passes over the entries."""
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

    `drain` is called for a directory before it is closed with unread entries, and returns the names that
    remain after its reopening; None to read all entries again.
    """

    def __init__(self, drain: Callable[[OpenDirectory], list[str] | None]) -> None:
        self._drain = drain
        self._top: list[OpenDirectory] = []
        self._devices, self._inodes = array("Q"), array("Q")
        self._pending: list[list[str] | None] = []
        """Remaining names of the closed directories, between those in `_top` and those in `_deep`."""
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
        """Return the parent of the current directory, reopened if necessary; None at the top.

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
    """Callbacks of a walk."""

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Handle an entry of an open directory; return whether it is a directory to enter."""
        ...

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory; None to skip one that was removed or replaced."""
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
    """Walk the tree below an open directory, and close that directory at the end.

    Raises what the visitor raises, TreeChangedError, and OSError when more than MAX_PENDING subdirectory
    names would have to be retained. Blocks.
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


MAX_PASSES = 100
"""Maximum of passes over a directory that is being filled, and of attempts at a tree that is being moved."""


def remove_entry(parent: int, name: str) -> None:
    """Remove a file, a symbolic link or a directory with all its contents, by its name in an open directory.

    A missing entry is not an error. Raises OSError; EBUSY at the first mount point, which is not entered.
    Blocks.
    """
    for _ in range(MAX_PASSES):
        if _unlink(parent, name):
            return
        with suppress(TreeChangedError):
            _Removal(parent).run(name)
    raise OSError(errno.ENOTEMPTY, "another process keeps changing the directory", name)


class _Removal:
    """One attempt to remove a directory."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._stack = DirectoryStack(lambda directory: None)

    def run(self, name: str) -> None:
        try:
            self._enter(self._parent, name)
            while self._stack:
                directory = self._stack.current
                entry = next(directory.entries, None)
                if entry is None:
                    self._leave(directory)
                elif entry.is_dir(follow_symlinks=False) or not _unlink(directory.opened, entry.name):
                    self._enter(directory.opened, entry.name)
        finally:
            self._stack.close()

    def _enter(self, parent: int, name: str) -> None:
        """Open a directory, unless it is empty, which removes it, or was replaced."""
        if _rmdir(parent, name) != "not empty":
            return
        try:
            opened = _open_directory(parent, name)
        except OSError as err:
            if err.errno not in REPLACED:
                raise
            return  # the next pass over the parent handles its replacement
        self._stack.push(OpenDirectory(opened, name))

    def _leave(self, directory: OpenDirectory) -> None:
        """Remove the directory whose entries were all handled, or begin another pass over it."""
        above = self._stack.parent()
        parent = above.opened if above is not None else self._parent
        # A directory without a known name is empty and removed by the pass over its parent.
        name = directory.name
        if (
            name is None
            or _rmdir(parent, name) != "not empty"
            or not _is_same(parent, name, directory.opened)
        ):
            self._stack.pop()
        elif directory.passes < MAX_PASSES:
            directory.rewind()
        else:
            raise OSError(errno.ENOTEMPTY, "another process keeps creating files", name)


def _open_directory(parent: int, name: str) -> int:
    """Open a directory on the same mount as its parent. Raises OSError, EBUSY for a mount point."""
    try:
        return open_on_same_mount(parent, name, OPEN_DIRECTORY)
    except OSError as err:
        if err.errno == errno.EXDEV:
            raise _mounted(name) from err
        if err.errno not in (errno.ENOSYS, errno.EPERM, errno.EAGAIN):
            raise
    opened = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    if mount_id(opened) != mount_id(parent):
        os.close(opened)
        raise _mounted(name)
    return opened


def _is_same(parent: int, name: str, opened: int) -> bool:
    """Return whether a name still refers to an open directory, and not to one that has replaced it."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(opened))


def _mounted(name: str) -> OSError:
    return OSError(errno.EBUSY, "something is mounted here", name)


def _unlink(parent: int, name: str) -> bool:
    """Unlink an entry that is not a directory; return whether the name is free. Raises OSError."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise _mounted(name) from err
        raise
    return True


def _rmdir(parent: int, name: str) -> Literal["removed", "not empty", "replaced"]:
    """Remove a directory if it is empty; "replaced" if the name is not a directory. Raises OSError."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return "removed"
    except NotADirectoryError:
        return "replaced"
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return "not empty"
        if err.errno == errno.EBUSY:
            raise _mounted(name) from err
        raise
    return "removed"


_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: str | Path, *, follow_symlink: bool = False, dir_fd: int | None = None) -> int:
    """Open a regular file for reading and return its descriptor.

    `follow_symlink`: whether the last component of the path may be a symbolic link. `dir_fd`: the open
    directory that a relative path starts at. Raises OSError, with EINVAL if the path is anything else than a
    regular file.
    """
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow_symlink else os.O_NOFOLLOW)
    named = os.open(path, flags, dir_fd=dir_fd)
    try:
        mode = os.fstat(named).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        # O_NONBLOCK: another process may hold a lease on the file, and open() would wait for its end.
        return os.open(f"/proc/self/fd/{named}", _OPEN)
    finally:
        os.close(named)


def read_tail(path: str | Path, limit: int, *, follow_symlink: bool = False) -> tuple[bytes, bool]:
    """Return the last `limit` bytes of a regular file, and whether there are bytes before them.

    Raises OSError as `open_regular` does.
    """
    descriptor = open_regular(path, follow_symlink=follow_symlink)
    try:
        start = max(0, os.fstat(descriptor).st_size - limit)
        return os.pread(descriptor, limit, start), start > 0
    finally:
        os.close(descriptor)
