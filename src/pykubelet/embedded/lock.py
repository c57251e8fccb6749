"""One at a time: an agent or a `down` holds its data directory with a lock on a file in it.

The kernel gives the lock back when the holder ends in whatever way, so there is no stale lock. The
file says who holds it, for the error message and for `down`, which has to stop an agent.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pykubelet.embedded.errors import AlreadyRunning, DirectoryError
from pykubelet.embedded.instance import Instance


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a data directory, as far as it has said so."""

    pid: int | None
    purpose: str


@contextmanager
def hold(instance: Instance, purpose: str) -> Iterator[None]:
    """Hold the data directory, which must exist, until the block ends; the purpose is `up` or `down`.

    Raises AlreadyRunning, with the holder's pid, when someone else holds it.
    """
    fd = _lock(instance)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {purpose}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def holder(instance: Instance) -> Holder | None:
    """Give the process that holds the data directory; None when nobody does."""
    try:
        fd = os.open(instance.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(fd)
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
            found = _read(fd)
            os.close(fd)
            raise AlreadyRunning(_refusal(instance, found), found.pid) from None
        # A `down` may have deleted the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), instance.lock.stat()):
                return fd
        os.close(fd)


def _refusal(instance: Instance, found: Holder) -> str:
    who = f" with pid {found.pid}" if found.pid else ""
    if found.purpose == "down":
        return f"{instance.data_dir} is being removed{who}: wait until that is done"
    return (
        f"pykubelet is already running{who} on {instance.data_dir}: "
        "stop that one first, or choose another --data-dir"
    )


def _read(fd: int) -> Holder:
    """Read who holds the lock; whoever has just taken it may not have written that yet."""
    words = os.pread(fd, 64, 0).split()
    if len(words) == 2 and words[0].isdigit():
        return Holder(int(words[0]), words[1].decode(errors="replace"))
    return Holder(None, "")
