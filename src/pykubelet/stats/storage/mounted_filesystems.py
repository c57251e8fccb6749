"""The file systems of the host that cAdvisor reports, found in the text of /proc/self/mountinfo.

Pure, but for stat(2) of btrfs mounts. A file system is named by its device (`/dev/vda`), a tmpfs by its mount
point, an overlay by its device number. Of several mounts of one source the first counts, so that bind mounts
are not repeated, but the mount at `/` counts before all others.

cAdvisor reads the table once, when the kubelet starts. Here it is read again whenever it has changed, so
mounts that belong to pods are left out, which cAdvisor does not see on a node without pods: those inside the
kubelet's pod and plugin directories, and those of containers (root file system, shm), whose path contains the
container's id.

Pods can add mounts by the thousand (through mount propagation). Lines of other types cost one comparison, and
at most `MAX_FILESYSTEMS` file systems are returned, in the order of the table: those of the host come first.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

MAX_FILESYSTEMS = 200
_LINES_PER_SLEEP = 1000
_SLEEP_SECONDS = 0.001
_OCTAL = re.compile(rb"\\([0-7]{3})")
_CONTAINER_ID = re.compile(rb"/[0-9a-f]{64}/")
_SEPARATOR = b" - "
_TYPES = frozenset(
    {
        *(b"btrfs", b"overlay", b"tmpfs", b"zfs"),
        *(b"xfs", b"squashfs", b"f2fs", b"jfs", b"reiserfs", b"hfs", b"hfsplus", b"ntfs", b"vfat", b"fat"),
        *(b"msdos", b"exfat", b"udf", b"iso9660"),
    }
)
_TYPE_PREFIXES = (b"ext", b"nfs")


class MountedFilesystem(msgspec.Struct, frozen=True, kw_only=True):
    """A file system and the mount point at which it is measured."""

    device: str
    """Name as cAdvisor reports it."""
    source: str
    point: bytes
    type: str
    major: int
    minor: int

    @property
    def is_remote(self) -> bool:
        """Whether it is on a file server, which may not respond."""
        return self.type.startswith("nfs")


class MountTable(msgspec.Struct, frozen=True):
    """The file systems of a mount table."""

    filesystems: tuple[MountedFilesystem, ...] = ()
    omitted: int = 0
    """Number of file systems above `MAX_FILESYSTEMS`."""

    def for_device(self, major: int, minor: int) -> MountedFilesystem | None:
        """Return the file system with a device number."""
        return next((fs for fs in self.filesystems if (fs.major, fs.minor) == (major, minor)), None)


def parse_mount_table(text: bytes, kubelet_root: Path) -> MountTable:
    """Return the file systems that are listed in the text of mountinfo; `kubelet_root` is a real path.

    Sleeps between parts of a large table, so that other threads can run. Blocks.
    """
    inside_kubelet = tuple(os.fsencode(kubelet_root / name) + b"/" for name in ("pods", "plugins"))
    found: dict[str, MountedFilesystem] = {}
    omitted = 0
    root: MountedFilesystem | None = None
    for mount in _mounts(text):
        if mount.point == b"/" and root is None:
            root = mount
        if mount.point.startswith(inside_kubelet) or _CONTAINER_ID.search(mount.point):
            continue
        if mount.source in found and mount.type != "tmpfs":
            continue
        name = _name(mount)
        if name not in found and len(found) >= MAX_FILESYSTEMS:
            omitted += 1
            continue
        found[name] = msgspec.structs.replace(_with_real_numbers(mount), device=name)
    if root is not None:
        found[root.source] = _with_real_numbers(root)
    return MountTable(tuple(found.values()), omitted)


def mount_of_directory(text: bytes, directory: bytes) -> MountedFilesystem | None:
    """Return the mount that contains a directory (a real path), of any type; of stacked ones the topmost.

    Blocks, as `parse_mount_table` does.
    """
    best: MountedFilesystem | None = None
    for mount in _mounts(text, every_type=True):
        inside = directory == mount.point or directory.startswith(mount.point.rstrip(b"/") + b"/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best and msgspec.structs.replace(best, device=_name(best))


def _mounts(text: bytes, *, every_type: bool = False) -> Iterator[MountedFilesystem]:
    for number, line in enumerate(text.split(b"\n"), start=1):
        if number % _LINES_PER_SLEEP == 0:
            time.sleep(_SLEEP_SECONDS)
        # Paths contain no spaces: the kernel escapes them.
        start, _, end = line.partition(_SEPARATOR)
        type_, _, rest = end.partition(b" ")
        if not (every_type or type_ in _TYPES or type_.startswith(_TYPE_PREFIXES)):
            continue
        fields = start.split(b" ", 5)
        if len(fields) < 6:
            continue
        major, _, minor = fields[2].partition(b":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        source = _decode(_unescape(rest.partition(b" ")[0]))
        yield MountedFilesystem(
            device=source,
            source=source,
            point=_unescape(fields[4]),
            type=_decode(type_),
            major=int(major),
            minor=int(minor),
        )


def _name(mount: MountedFilesystem) -> str:
    match mount.type:
        case "tmpfs":
            return _decode(mount.point)
        case "overlay":
            return f"{mount.source}_{mount.major}-{mount.minor}"
    return mount.source


def _with_real_numbers(mount: MountedFilesystem) -> MountedFilesystem:
    """Return a btrfs mount with the device number of its subvolume, which the table does not have."""
    if mount.type != "btrfs" or mount.major != 0 or not mount.source.startswith("/dev/"):
        return mount
    try:
        if not stat.S_ISBLK(os.stat(mount.source).st_mode):  # noqa: PTH116 - no Path for a single call
            return mount
        device = os.stat(mount.point).st_dev  # noqa: PTH116 - bytes
    except OSError:
        return mount
    return msgspec.structs.replace(mount, major=os.major(device), minor=os.minor(device))


def _unescape(text: bytes) -> bytes:
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), text) if b"\\" in text else text


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")
