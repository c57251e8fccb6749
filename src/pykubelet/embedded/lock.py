"""One at a time: an agent or a `down` holds its data directory with a lock on a file in it.

The kernel gives the lock back when the holder ends in whatever way, so there is no stale lock. The
file says who holds it, for the error message and for `down`, which has to stop an agent.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pykubelet.embedded.errors import AlreadyRunning, DirectoryError
from pykubelet.embedded.instance import Instance


@contextmanager
def hold(instance: Instance) -> Iterator[None]:
    """Hold the data directory, which must exist, until the block ends.

    Raises AlreadyRunning, with the holder's pid, when someone else holds it.
    """
    fd = _lock(instance)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def holder(instance: Instance) -> int | None:
    """Give the pid of the process that holds the data directory; None when nobody does.

    0 stands for a holder that has not yet said who it is.
    """
    try:
        fd = os.open(instance.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(fd) or 0
    finally:
        os.close(fd)
    return None


def _lock(instance: Instance) -> int:
    while True:
        try:
            fd = os.open(instance.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as err:
            raise DirectoryError(f"{instance.lock} cannot be opened: {err.strerror}") from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(fd)
            os.close(fd)
            who = f" with pid {pid}" if pid else ""
            raise AlreadyRunning(
                f"pykubelet is already running{who} on {instance.data_dir}: "
                "stop that one first, or choose another --data-dir",
                pid,
            ) from None
        # A `down` may have deleted the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(instance.lock)):
                return fd
        os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
