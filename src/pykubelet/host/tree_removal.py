"""Removal of directory trees that untrusted processes filled, and may still change.

Every step is taken from an open directory by a single name, and no symbolic link is followed: whatever a
process renames or replaces concurrently, only entries of the tree's own directories are unlinked. The kernel
itself (`RESOLVE_NO_XDEV`) keeps the removal from entering another mount, bind mounts included.

The removal is iterative, and neither the depth of the tree nor PATH_MAX matters (`tree_walk.py`). It blocks
its thread. When it fails or is interrupted it can be repeated: what is left is a smaller tree.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Literal

from pykubelet.host.tree_walk import (
    OPEN_DIRECTORY,
    REPLACED,
    DirectoryStack,
    OpenDirectory,
    TreeChangedError,
    mount_id,
    open_on_same_mount,
)

MAX_PASSES = 100
"""Passes over a directory that a process keeps filling, and attempts for a tree that it keeps moving."""


def remove_entry(parent: int, name: str) -> None:
    """Remove a file, a symbolic link or a directory with everything in it, by its name in an open directory.

    A missing entry is fine. Raises OSError; EBUSY at the first mount point, which is not entered. Blocks.
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
        """Open a directory, unless it is empty, which removes it, or is replaced by something else."""
        if _rmdir(parent, name) != "not empty":
            return
        try:
            opened = _open_directory(parent, name)
        except OSError as err:
            if err.errno not in REPLACED:
                raise
            return  # the next pass over the parent finds what has replaced it
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
    """Return whether a name still is that of an open directory, and not of one that has replaced it."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(opened))


def _mounted(name: str) -> OSError:
    return OSError(errno.EBUSY, "something is mounted here", name)


def _unlink(parent: int, name: str) -> bool:
    """Unlink what is not a directory; return whether the name is free. Raises OSError."""
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
