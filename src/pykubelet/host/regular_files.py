"""Opening and reading of files whose path a container can influence.

A container that mounts a host directory can put a FIFO, a device node or a symbolic link where the kubelet
expects a plain file. Opening a FIFO blocks until another process writes to it, opening a device can have
side effects (a watchdog starts to count), and reading either has no end. These functions therefore check
the type of the file before they open it for reading, on a descriptor, so that the file cannot be exchanged
in between. All of them block on the disk: call them in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: str | Path, *, follow_symlink: bool = False) -> int:
    """Open a regular file for reading and return its descriptor.

    `follow_symlink`: whether the last component of the path may be a symbolic link. Raises OSError, with
    EINVAL if the path is anything else than a regular file.
    """
    named = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow_symlink else os.O_NOFOLLOW))
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
