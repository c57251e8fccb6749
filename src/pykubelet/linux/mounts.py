"""Mount table, mounting and unmounting, removal of trees without mounts, and mount propagation.

Mounts are read from `/proc/self/mountinfo`, the only table with every bind mount and every stacked mount. The
unmount order is computed by a pure function (`plan_unmounts`).

The table has lines for every container of the host, and the kernel generates all of them for each reader. For
the few files of a pod, `is_mounted_inside` opens each of them instead, which is cheaper and as safe: the
kernel itself (`RESOLVE_NO_XDEV`) does not cross from one mount to another.

A volume with `mountPropagation` shares its mounts between node and container, which the runtime rejects
unless the kubelet's root directory is on a shared mount. On most hosts it is. On others `share_mounts`
bind-mounts the directory onto itself and makes it shared, as upstream does, so that an upstream kubelet that
takes over the node later finds it in place. It must run before anything is mounted below, because the bind
mount would hide that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, TooManyEntries, open_on_same_mount, remove_entry

MAX_ENTRIES = 200
"""Number of entries above which reading the mount table is faster."""
MAX_DEPTH = 16
"""Directory levels that are open at a time."""
_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def is_mounted_inside(directory: Path) -> bool:
    """Return whether anything is mounted strictly below a directory; False if the directory does not exist.

    Raises TooManyEntries if reading the mount table is faster, or the kernel is too old for anything else;
    OSError if the directory cannot be read.
    """
    try:
        opened = os.open(directory, OPEN_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        if err.errno == errno.ELOOP:
            return False
        raise
    try:
        _search(opened, MAX_ENTRIES, MAX_DEPTH)
    except _MountedError:
        return True
    finally:
        os.close(opened)
    return False


def mount_points_in(directory: Path) -> list[Path]:
    """Return the entries of a directory that are mount points; empty if it does not exist.

    Raises TooManyEntries if reading the mount table is faster, or the kernel is too old for anything else;
    OSError if the directory cannot be read.
    """
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    try:
        names = sorted(os.listdir(opened))  # noqa: PTH208 - of an open directory
        if len(names) > MAX_ENTRIES:
            raise TooManyEntries
        for name in names:
            try:
                entry = _open_if_same_mount(opened, name)
            except _MountedError:
                found.append(directory / name)
            else:
                if entry is not None:
                    os.close(entry)
    finally:
        os.close(opened)
    return found


class _MountedError(Exception):
    """Raised for a mount point."""


def _search(directory: int, budget: int, depth: int) -> int:
    """Check everything below an open directory; return the number of entries that may still be checked.

    Raises _MountedError at the first mount point, and TooManyEntries.
    """
    with os.scandir(directory) as entries:
        for listed in entries:
            budget -= 1
            if budget < 0 or not depth:
                raise TooManyEntries
            entry = _open_if_same_mount(directory, listed.name)
            if entry is None:
                continue
            try:
                if stat.S_ISDIR(os.fstat(entry).st_mode):
                    inner = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=entry)
                    try:
                        budget = _search(inner, budget, depth - 1)
                    finally:
                        os.close(inner)
            finally:
                os.close(entry)
    return budget


def _open_if_same_mount(directory: int, name: str) -> int | None:
    """Open an entry of a directory on the same mount; None if it was removed concurrently.

    Raises _MountedError for a mount point, and TooManyEntries without openat2.
    """
    try:
        return open_on_same_mount(directory, name, _NAMED)
    except OSError as err:
        match err.errno:
            case errno.ENOENT:
                return None
            case errno.EXDEV:
                raise _MountedError from err
            case errno.ENOSYS | errno.EPERM | errno.EAGAIN:
                raise TooManyEntries from err
        raise


MOUNTINFO = Path("/proc/self/mountinfo")
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
_OCTAL = re.compile(r"\\([0-7]{3})")
_ESCAPED = re.compile(r"[\s\\#]|[^\x20-\x7e]")
"""Characters that the kernel may escape in the table."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table."""

    id: int
    parent: int
    root: str
    """Directory of the filesystem that is mounted; `/` unless it is a bind mount."""
    point: Path
    kind: str
    """Filesystem type: `ext4`, `overlay`, `cgroup2`."""
    source: str
    options: frozenset[str]
    """Options of the mount and of its filesystem."""
    shared: bool = False
    """Whether mounts below propagate to other mount namespaces."""


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse the text of mountinfo, in the kernel's order: of stacked mounts the topmost is last."""
    return [mount for line in text.splitlines() if (mount := _parse_line(line)) is not None]


def read_mounts(below: Path | None = None) -> list[Mount]:
    """Return the mounts of this process's mount namespace, or those at or below a directory (a real path).

    The latter is many times cheaper on a host with hundreds of mounts.
    """
    text = MOUNTINFO.read_text(errors="surrogateescape")
    if below is None:
        return parse_mountinfo(text)
    if not _ESCAPED.search(str(below)):
        # Skipping a line takes a tenth of the time of parsing it.
        text = "\n".join(line for line in text.splitlines() if str(below) in line)
    return [mount for mount in parse_mountinfo(text) if mount.point.is_relative_to(below)]


def mounts_below(mounts: Iterable[Mount], directory: Path) -> list[Mount]:
    """Return the mounts strictly below a directory, without one on the directory itself."""
    return [mount for mount in mounts if directory in mount.point.parents]


def plan_unmounts(mounts: Iterable[Mount], directory: Path) -> list[Path]:
    """Return the mount points to unmount, in order, so that nothing is mounted below a directory.

    The newest come first: a mount on or over another one is newer. A point with two stacked mounts appears
    twice.
    """
    return [mount.point for mount in reversed(mounts_below(mounts, directory))]


def has_mounts_inside(path: Path) -> bool:
    """Return whether something is mounted strictly below a path; cheap for directories with few files."""
    try:
        return is_mounted_inside(path)
    except TooManyEntries:
        real = _real(path)
        return bool(mounts_below(read_mounts(real), real))


def unmount(point: Path, *, detach: bool = False) -> bool:
    """Unmount a mount point; with `detach` also a busy one, which the kernel removes when its last user ends.

    Returns whether it was mounted. Raises OSError if it is mounted and cannot be unmounted.
    """
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
    if _libc().umount2(os.fsencode(point), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return False
    raise OSError(number, os.strerror(number), str(point))


def remove_tree(path: Path, mounts: Iterable[Mount] | None = None) -> None:
    """Delete a file, or a directory with all its contents, unless something is mounted inside.

    A missing path is not an error. Raises OSError with EBUSY for a mount, before anything is deleted, because
    the removal would continue into the mounted filesystem. `mounts` is the mount table, or the part of it
    below some parent, if the caller has just read it. Blocks, for a time that grows with the tree.
    """
    if mounts_below(mounts, _real(path)) if mounts is not None else has_mounts_inside(path):
        raise OSError(errno.EBUSY, "something is mounted inside", str(path))
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_entry(parent, path.name)
    finally:
        os.close(parent)


def mount(source: str, point: Path, kind: str, options: str = "", flags: int = 0) -> None:
    """Mount a filesystem, or what the flags (MS_…) specify. Raises OSError with the kernel's error."""
    result = _libc().mount(
        os.fsencode(source), os.fsencode(point), kind.encode(), flags, os.fsencode(options)
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def _real(path: Path) -> Path:
    """Return the path as it appears in the mount table."""
    return path.parent.resolve() / path.name


def _parse_line(line: str) -> Mount | None:
    fields = line.split(" ")
    try:
        # Any number of optional fields is between the sixth field and the "-" separator.
        dash = fields.index("-", 6)
        kind, source, inner = fields[dash + 1 : dash + 4]
        return Mount(
            id=int(fields[0]),
            parent=int(fields[1]),
            root=_unescape(fields[3]),
            point=Path(_unescape(fields[4])),
            kind=kind,
            source=_unescape(source),
            options=frozenset(f"{fields[5]},{inner}".split(",")),
            shared=any(field.startswith("shared:") for field in fields[6:dash]),
        )
    except ValueError:
        return None


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


MS_BIND = 0x1000
MS_REC = 0x4000
MS_SHARED = 0x100000


def share_mounts(directory: Path) -> bool:
    """Ensure that mounts below a directory propagate; return whether it had to be bind-mounted for that.

    A directory with mounts inside is left unchanged. Raises OSError.
    """
    real = directory.resolve()
    if _mount_of(real).shared or mounts_below(read_mounts(real), real):
        return False
    mount(str(real), real, "", flags=MS_BIND)
    mount("", real, "", flags=MS_SHARED | MS_REC)
    return True


def unshare_mounts(directory: Path) -> None:
    """Undo `share_mounts`, unless something is mounted inside the directory. Raises OSError."""
    real = directory.resolve()
    mounts = read_mounts(real)
    if any(mount.point == real for mount in mounts) and not mounts_below(mounts, real):
        unmount(real)


def is_shared(directory: Path) -> bool:
    """Return whether a directory is on a shared mount. Raises OSError."""
    return _mount_of(directory.resolve()).shared


def _mount_of(real: Path) -> Mount:
    """Return the mount that a directory is on."""
    opened = os.open(real, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        facts = Path(f"/proc/self/fdinfo/{opened}").read_text().split()
    finally:
        os.close(opened)
    number = int(facts[facts.index("mnt_id:") + 1])
    return next(mount for mount in read_mounts() if mount.id == number)
