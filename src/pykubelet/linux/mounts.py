"""What is mounted where, and taking it away again.

Reads the kernel's own table (`/proc/self/mountinfo`), which is the only one that knows every
bind mount and every mount on top of another. Which mounts to take away, and in which order, is
decided by a pure function.

Whether something is mounted inside a small folder, found out without the kernel's mount table.

The table has a line for every container of the machine, and the kernel writes all of them anew for each
reader. For the few files of a pod it is cheaper to ask for each of them, and as safe: the kernel itself
refuses to step from one mount onto another.

Mounts that appear in containers while they run, and the other way round.

A volume with `mountPropagation` shares what is mounted in it between node and container; the runtime
refuses it unless the agent's root lies on a shared mount. On most machines everything does. On others
the root is bound onto itself and made shared, which is what the reference kubelet does, too: one that
takes the node over later finds it done. Doing it late would hide what is mounted below already.
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

from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, open_on_same_mount, remove_entry

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


MOUNTINFO = Path("/proc/self/mountinfo")
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
_OCTAL = re.compile(r"\\([0-7]{3})")
_ESCAPED = re.compile(r"[\s\\#]|[^\x20-\x7e]")
"""What the kernel may write otherwise than it is."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the kernel's mount table."""

    id: int
    parent: int
    root: str
    """The directory of the file system that is visible here; `/` unless it is a bind mount."""
    point: Path
    kind: str
    """The file system's type: `ext4`, `overlay`, `cgroup2`."""
    source: str
    options: frozenset[str]
    """Options of the mount and of its file system together."""
    shared: bool = False
    """Whether what is mounted below appears in other mount namespaces, too."""


def parse_mountinfo(text: str) -> list[Mount]:
    """Read the table's text, in the kernel's order: what lies on top comes later."""
    return [mount for line in text.splitlines() if (mount := _parse_line(line)) is not None]


def read_mounts(below: Path | None = None) -> list[Mount]:
    """Give the mounts that this process sees, or those at or below a directory, given by its real path.

    The latter is many times cheaper on a machine with hundreds of mounts.
    """
    text = MOUNTINFO.read_text(errors="surrogateescape")
    if below is None:
        return parse_mountinfo(text)
    if not _ESCAPED.search(str(below)):
        # Passing a line by takes a tenth of the time of reading it.
        text = "\n".join(line for line in text.splitlines() if str(below) in line)
    return [mount for mount in parse_mountinfo(text) if mount.point.is_relative_to(below)]


def mounts_below(mounts: Iterable[Mount], directory: Path) -> list[Mount]:
    """Give the mounts strictly below a directory; one on the directory itself is not ours to judge."""
    return [mount for mount in mounts if directory in mount.point.parents]


def plan_unmounts(mounts: Iterable[Mount], directory: Path) -> list[Path]:
    """Decide what to unmount so that nothing is mounted below a directory, in a workable order.

    The youngest first: whatever stands on a mount, or hides it, was mounted later. A point that is
    mounted over twice appears twice.
    """
    return [mount.point for mount in reversed(mounts_below(mounts, directory))]


def has_mounts_inside(path: Path) -> bool:
    """Whether something is mounted strictly below a path; costs little where there are few files."""
    try:
        return is_mounted_inside(path)
    except TooManyEntries:
        real = _real(path)
        return bool(mounts_below(read_mounts(real), real))


def unmount(point: Path, *, detach: bool = False) -> bool:
    """Unmount one point; with `detach` also a busy one, which then vanishes when its last user ends.

    Returns whether the point was mounted. Raises OSError when it is and stays so.
    """
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
    if _libc().umount2(os.fsencode(point), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return False
    raise OSError(number, os.strerror(number), str(point))


def remove_tree(path: Path, mounts: Iterable[Mount] | None = None) -> None:
    """Delete a file, or a directory with everything in it, unless something is mounted inside.

    What is already gone is fine. Raises OSError with EBUSY when there is a mount, because deleting
    would go on into somebody else's files, and before anything is deleted. `mounts` is the mount
    table, or its part below some parent, if it was just read. Blocks, for as long as the tree is large.
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
    """Mount a file system, or what else the flags (MS_…) say; raises OSError with the kernel's reason."""
    result = _libc().mount(
        os.fsencode(source), os.fsencode(point), kind.encode(), flags, os.fsencode(options)
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def _real(path: Path) -> Path:
    """Give the path as the mount table knows it."""
    return path.parent.resolve() / path.name


def _parse_line(line: str) -> Mount | None:
    fields = line.split(" ")
    try:
        # Optional fields of unknown number sit between the sixth and the lone dash.
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


def share_mounts(folder: Path) -> bool:
    """Have mounts below a folder be shared; gives whether the folder had to become a mount for that.

    A folder in which something is mounted already stays as it is. Raises OSError.
    """
    real = folder.resolve()
    if _mount_of(real).shared or mounts_below(read_mounts(real), real):
        return False
    mount(str(real), real, "", flags=MS_BIND)
    mount("", real, "", flags=MS_SHARED | MS_REC)
    return True


def unshare_mounts(folder: Path) -> None:
    """Take back what `share_mounts` did, unless something is mounted in the folder; raises OSError."""
    real = folder.resolve()
    mounts = read_mounts(real)
    if any(one.point == real for one in mounts) and not mounts_below(mounts, real):
        unmount(real)


def is_shared(folder: Path) -> bool:
    """Whether a folder lies on a shared mount; raises OSError."""
    return _mount_of(folder.resolve()).shared


def _mount_of(real: Path) -> Mount:
    """Give the mount on which a folder lies."""
    opened = os.open(real, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        facts = Path(f"/proc/self/fdinfo/{opened}").read_text().split()
    finally:
        os.close(opened)
    number = int(facts[facts.index("mnt_id:") + 1])
    return next(one for one in read_mounts() if one.id == number)
