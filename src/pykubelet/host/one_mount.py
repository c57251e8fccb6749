"""Whether something is mounted inside a small folder, found out without the kernel's mount table.

The table has a line for every container of the machine, and the kernel writes all of them anew for each
reader. For the few files of a pod it is cheaper to ask for each of them, and as safe: the kernel itself
refuses to step from one mount onto another.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from pykubelet.host.tree_walk import OPEN_DIRECTORY, open_on_same_mount

MOST_ENTRIES = 200
"""Beyond so many files the mount table is the quicker one to ask."""
MAX_DEPTH = 16
"""Levels of directories that are open at a time."""

_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class TooManyEntries(Exception):
    """The folder is neither small nor shallow, or the kernel is too old: ask the mount table."""


def is_mounted_inside(folder: Path) -> bool:
    """Whether anything is mounted strictly below a folder; False when it is no folder, or gone.

    Raises TooManyEntries, and OSError when it cannot be read.
    """
    try:
        opened = os.open(folder, OPEN_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        if err.errno == errno.ELOOP:
            return False
        raise
    try:
        _search(opened, MOST_ENTRIES, MAX_DEPTH)
    except _MountedError:
        return True
    finally:
        os.close(opened)
    return False


def mount_points_in(folder: Path) -> list[Path]:
    """Return the entries of a directory on which something is mounted; none when it does not exist.

    Raises TooManyEntries, and OSError when it cannot be read.
    """
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    try:
        names = sorted(os.listdir(opened))  # noqa: PTH208 - of an open directory
        if len(names) > MOST_ENTRIES:
            raise TooManyEntries
        for name in names:
            try:
                entry = _open_beside(opened, name)
            except _MountedError:
                found.append(folder / name)
            else:
                if entry is not None:
                    os.close(entry)
    finally:
        os.close(opened)
    return found


class _MountedError(Exception):
    """A mount was found."""


def _search(folder: int, left: int, depth: int) -> int:
    """Look at everything below an open folder; gives how many more entries may be looked at."""
    with os.scandir(folder) as entries:
        for listed in entries:
            left -= 1
            if left < 0 or not depth:
                raise TooManyEntries
            entry = _open_beside(folder, listed.name)
            if entry is None:
                continue
            try:
                if stat.S_ISDIR(os.fstat(entry).st_mode):
                    inner = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=entry)
                    try:
                        left = _search(inner, left, depth - 1)
                    finally:
                        os.close(inner)
            finally:
                os.close(entry)
    return left


def _open_beside(folder: int, name: str) -> int | None:
    """Open an entry of a folder if it is on the same mount; None when it is gone meanwhile."""
    try:
        return open_on_same_mount(folder, name, _NAMED)
    except OSError as err:
        match err.errno:
            case errno.ENOENT:
                return None
            case errno.EXDEV:
                raise _MountedError from err
            case errno.ENOSYS | errno.EPERM | errno.EAGAIN:
                raise TooManyEntries from err
        raise
