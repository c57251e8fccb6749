"""Atomic replacement of files: readers see the old content or the new, also after a crash."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(
    path: Path,
    content: bytes,
    mode: int = 0o600,
    *,
    temporary: Path | None = None,
    durable: bool = True,
    sync_directory: bool = False,
) -> None:
    """Replace a file by one with this content and mode. Raises OSError, after which the old file is intact.

    The content is written to `temporary` first, by default a hidden file with a unique name in the same
    directory; a crash can leave it behind. `durable` calls fsync before the replacement, `sync_directory`
    after it, so that the new name survives a power failure as well.
    """
    if temporary is None:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
    else:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_directory:
        fsync_directory(path.parent)


def write_if_changed(path: Path, content: bytes, mode: int = 0o600) -> bool:
    """Ensure that a file has this content; return whether it was written. Raises OSError.

    A file that has the content already is not written, so that a start succeeds on a full disk.
    """
    try:
        if path.read_bytes() == content:
            return False
    except FileNotFoundError:
        pass
    write_atomically(path, content, mode)
    return True


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created, within the context. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
