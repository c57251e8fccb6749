"""`--lock-file`: at most one kubelet per host, and the handover to the next one.

The lock is an exclusive flock from `acquire` to `release`; the kernel releases it when the process ends. A
second kubelet waits for it. With `--exit-on-lock-contention` the first one notices by inotify that another
process opened the file, and exits: a bootstrap kubelet hands the node over this way.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from pykubelet.linux import HostError
from pykubelet.linux.inotify import Inotify, Mask
from pykubelet.logs import get_logger

log = get_logger(__name__)

# Seconds between attempts. A blocking flock in a thread could not be cancelled; polling is one system call.
_RETRY_SECONDS = 0.2


class LockFileError(HostError):
    """Raised when the lock file cannot be opened, locked or watched."""


class LockFile:
    """An exclusive lock on a file, from `acquire` to `release`; also an async context manager.

    With `watched`, any process that opens the file after `acquire` is noticed.
    """

    def __init__(self, path: str | Path, *, watched: bool = False) -> None:
        self.path = Path(path)
        self._watched = watched
        self._resources = ExitStack()
        self._fd = -1
        self._changes: Inotify | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd >= 0

    async def acquire(self) -> None:
        """Acquire the lock, waiting while another process holds it.

        Raises LockFileError if the file cannot be opened or watched. After a failure or a cancellation the
        lock is not held.
        """
        if self.held:
            return
        with ExitStack() as until_failure:
            fd = self._open()
            until_failure.callback(os.close, fd)
            await self._lock(fd)
            if self._watched:
                self._changes = until_failure.enter_context(self._watch())
            self._resources = until_failure.pop_all()
        self._fd = fd

    async def wait_for_contention(self) -> str:
        """Wait until another process opens the file (`opened`) or deletes it (`deleted`).

        Returns `released` if the lock is released first. Requires `watched` and a held lock.
        """
        if self._changes is None:
            raise RuntimeError("wait_for_contention needs LockFile(..., watched=True) and acquire() first")
        async for event in self._changes:
            if Mask.OPEN in event.mask or event.overflowed:
                return "opened"
            # Unlinking an open file yields IN_ATTRIB, not IN_DELETE_SELF; the link count is 0 then.
            if Mask.DELETE_SELF in event.mask or not os.fstat(self._fd).st_nlink:
                return "deleted"
        return "released"

    def release(self) -> None:
        """Release the lock; the file stays, since other processes may wait on it."""
        self._fd, self._changes = -1, None
        self._resources.close()

    async def __aenter__(self) -> LockFile:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise LockFileError(_explain(self.path, err)) from err

    async def _lock(self, fd: int) -> None:
        waiting = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not waiting:
                    log.info("Waiting for lock file held by another process", path=str(self.path))
                    waiting = True
                await asyncio.sleep(_RETRY_SECONDS)
            except OSError as err:
                raise LockFileError(_explain(self.path, err)) from err

    def _watch(self) -> Inotify:
        changes = None
        try:
            changes = Inotify()
            changes.watch(self.path, Mask.OPEN | Mask.DELETE_SELF | Mask.ATTRIB)
        except OSError as err:
            if changes is not None:
                changes.close()
            raise LockFileError(f"unable to watch the lock file {self.path}: {err.strerror}") from err
        return changes


def _explain(path: Path, err: OSError) -> str:
    match err.errno:
        case errno.ENOENT:
            reason = f"the folder {path.parent} does not exist: create it, or give another --lock-file"
        case errno.EISDIR:
            reason = "it is a folder: give the path of a file"
        case errno.ENOTDIR:
            reason = f"{path.parent} is not a folder: give another --lock-file"
        case errno.EACCES | errno.EPERM:
            reason = "no permission: run as root, or give a --lock-file that you may write"
        case errno.EROFS:
            reason = "the filesystem is read-only: give another --lock-file"
        case _:
            reason = err.strerror or str(err)
    return f"unable to acquire file lock on {str(path)!r}: {reason}"
