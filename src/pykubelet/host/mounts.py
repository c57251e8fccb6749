"""What is mounted where, and taking it away again.

Reads the kernel's own table (`/proc/self/mountinfo`), which is the only one that knows every
bind mount and every mount on top of another. Which mounts to take away, and in which order, is
decided by a pure function.
"""

import ctypes
import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pykubelet.host.one_mount import TooManyEntries, is_mounted_inside
from pykubelet.host.tree_removal import remove_entry

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
