"""Copy of files and directories between this host and the root file system of a container.

The container is not trusted: its processes may rename, link and replace anything during the copy. Paths are
opened with the kernel's RESOLVE_IN_ROOT below the container's root directory, and everything below them by a
single name in an open directory, without following links. No program of the container runs, so images without
`tar` work, and nothing of the container is loaded into this process (CVE-2019-14271).

Only regular files, directories and symbolic links are copied. A link is copied as a link if it leads to a
path inside the copied directory; others are skipped, because they would lead to files of this host after the
copy. A regular file is copied up to the size that it had when it was opened. Files appear under their names
when they are complete; an interrupted copy leaves the complete ones.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_in_root

MAX_DEPTH = 256
"""Deepest directory below the copied one."""
_BLOCK = 1 << 20
_LOCATE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE_BITS = 0o777
"""Mode bits that are copied: no setuid, setgid and sticky bits of a container reach the host."""


class CopyError(Exception):
    """Raised when a copy cannot be made; the text has the path and the reason."""


@dataclass(slots=True)
class Copied:
    """Numbers of what was copied."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0


class Tree:
    """A directory as the root of paths: that of a container, or this host's `/`."""

    def __init__(self, root: int, owner: tuple[int, int] | None = None) -> None:
        """Initialize with an open directory; `owner` owns what is created, None leaves it to the kernel."""
        self._root = root
        self.owner = owner

    def open(self, path: str) -> int:
        """Open a file or directory for reading. Raises CopyError."""
        with _explained(path):
            found = _reopened(open_in_root(self._root, path, os.O_PATH | os.O_CLOEXEC))
        if found is None:
            raise CopyError(f"cannot copy {path}: it is neither a file nor a directory")
        return found

    def target(self, path: str, source_name: str) -> tuple[int, str]:
        """Return the open directory and the name in it that a copy is to have. Raises CopyError.

        An existing directory receives the copy under the name of the source.
        """
        directory, _, name = path.rstrip("/").rpartition("/")
        with suppress(OSError):
            return open_in_root(self._root, path or "/", OPEN_DIRECTORY & ~os.O_NOFOLLOW), source_name
        if path.endswith("/") or name in ("", ".", ".."):
            raise CopyError(f"cannot copy to {path}: there is no such directory")
        with _explained(directory or "/"):
            return open_in_root(self._root, directory or "/", OPEN_DIRECTORY & ~os.O_NOFOLLOW), name


def copy(
    source: Tree, source_path: str, target: Tree, target_path: str, warn: Callable[[str], None]
) -> Copied:
    """Copy a file or directory; `warn` receives a line for each entry that is left out. Raises CopyError."""
    name = Path(os.path.normpath(source_path)).name
    if name in ("", ".."):
        name = "root"
    copied = Copied()
    opened = source.open(source_path)
    try:
        parent, new_name = target.target(target_path, name)
        try:
            walk = _Walk(target.owner, copied, warn)
            if stat.S_ISDIR(os.fstat(opened).st_mode):
                walk.directory(opened, parent, new_name, source_path, ())
            else:
                walk.file(opened, parent, new_name, source_path)
        finally:
            os.close(parent)
    finally:
        os.close(opened)
    return copied


class _Walk:
    """One copy; the callers own the descriptors."""

    def __init__(self, owner: tuple[int, int] | None, copied: Copied, warn: Callable[[str], None]) -> None:
        self._owner = owner
        self._copied = copied
        self._warn = warn

    def file(self, opened: int, parent: int, name: str, path: str) -> None:
        """Copy an open regular file to a name in an open directory."""
        found = os.fstat(opened)
        temporary = _temporary_name()
        with _explained(path):
            _require_no_directory(parent, name)
            written = os.open(temporary, _CREATE, 0o600, dir_fd=parent)
            try:
                try:
                    self._copied.bytes += _transfer(opened, written, found.st_size)
                    if self._owner is not None:
                        os.fchown(written, *self._owner)
                    os.fchmod(written, found.st_mode & _MODE_BITS)
                    os.utime(written, ns=(found.st_atime_ns, found.st_mtime_ns))
                finally:
                    os.close(written)
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise
        self._copied.files += 1

    def directory(self, opened: int, parent: int, name: str, path: str, inside: tuple[str, ...]) -> None:
        """Copy an open directory; `inside` is its path below the copied one."""
        if len(inside) > MAX_DEPTH:
            self._skip(path, f"it is deeper than {MAX_DEPTH} directories")
            return
        with _explained(path):
            is_new = True
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                is_new = False
            created = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        try:
            with _explained(path), os.scandir(opened) as entries:
                for entry in entries:
                    self._entry(opened, created, entry.name, f"{path.rstrip('/')}/{entry.name}", inside)
                # One that existed, such as /tmp, keeps its owner and mode.
                if is_new:
                    if self._owner is not None:
                        os.fchown(created, *self._owner)
                    os.fchmod(created, os.fstat(opened).st_mode & _MODE_BITS)
        finally:
            os.close(created)

    def _entry(self, opened: int, created: int, name: str, path: str, inside: tuple[str, ...]) -> None:
        try:
            kind = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
            if stat.S_ISLNK(kind):
                self._link(os.readlink(name, dir_fd=opened), created, name, path, inside)
                return
            child = _reopened(os.open(name, _LOCATE, dir_fd=opened))
        except OSError as err:
            self._skip(path, err.strerror or str(err))  # removed or replaced since it was listed
            return
        if child is None:
            self._skip(path, "it is neither a file, a directory nor a link")
            return
        try:
            if stat.S_ISDIR(os.fstat(child).st_mode):
                self.directory(child, created, name, path, (*inside, name))
            else:
                self.file(child, created, name, path)
        finally:
            os.close(child)

    def _link(self, leads_to: str, created: int, name: str, path: str, inside: tuple[str, ...]) -> None:
        if not stays_inside(leads_to, len(inside)):
            self._skip(path, "the link leads out of the copied directory")
            return
        try:
            os.symlink(leads_to, name, dir_fd=created)
        except FileExistsError:
            self._replace_link(leads_to, created, name, path)

    def _replace_link(self, leads_to: str, created: int, name: str, path: str) -> None:
        """Replace an existing link, which is that of an earlier copy, unless it is equal."""
        try:
            if os.readlink(name, dir_fd=created) == leads_to:
                return
        except OSError:
            self._skip(path, "something of this name exists that is not a link")
            return
        temporary = _temporary_name()
        with _explained(path):
            os.symlink(leads_to, temporary, dir_fd=created)
            try:
                os.rename(temporary, name, src_dir_fd=created, dst_dir_fd=created)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=created)
                raise

    def _skip(self, path: str, reason: str) -> None:
        self._copied.skipped += 1
        self._warn(f"left out {path}: {reason}")


def _temporary_name() -> str:
    return f".pykubelet-cp.{os.urandom(8).hex()}"


def stays_inside(leads_to: str, depth: int) -> bool:
    """Return whether a link `depth` directories below the copied one never leaves it on its way."""
    if leads_to.startswith("/"):
        return False
    parts = [part for part in leads_to.split("/") if part not in ("", ".")]
    ups = parts.count("..")
    # A directory on the way may be a link itself, after which `..` leads anywhere: only leading ones.
    return parts[:ups] == [".."] * ups and ups <= depth


def _reopened(located: int) -> int | None:
    """Open what a descriptor locates for reading and close that one; None for a device, FIFO, link or socket.

    Opening a device can have side effects: the type is checked before.
    """
    try:
        kind = os.fstat(located).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            return None
        return os.open(f"/proc/self/fd/{located}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(located)


def _transfer(source: int, target: int, size: int) -> int:
    left = size
    while left > 0:
        block = os.read(source, min(_BLOCK, left))
        if not block:
            break
        view = memoryview(block)
        while view:
            view = view[os.write(target, view) :]
        left -= len(block)
    return size - left


def _require_no_directory(parent: int, name: str) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.EISDIR, "a directory of this name exists")


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        remedy = ": the container's root file system is read-only, copy into one of its volumes"
        more = remedy if err.errno == errno.EROFS else ""
        raise CopyError(f"cannot copy {path}: {err.strerror or err}{more}") from err
