"""Which cgroups this machine has, and where.

Everything that limits or measures a container depends on the answer, so it is found once and
handed on as facts. Whether the machine is unified (v2) is decided as the container runtimes
decide it, by the type of the filesystem at /sys/fs/cgroup: two answers on one node would put
pods where nobody looks for them.
"""

import ctypes
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pykubelet.host.mounts import Mount, parse_mountinfo

CGROUP2_MAGIC = 0x63677270
REQUIRED_V1 = frozenset({"cpu", "cpuacct", "cpuset", "memory"})
REQUIRED_V2 = frozenset({"cpu", "cpuset", "memory", "pids"})


class CgroupMode(Enum):
    """How the kernel's controllers are laid out on this machine."""

    V1 = "v1"
    HYBRID = "hybrid"
    """v1, with a v2 hierarchy on the side that holds no controllers (systemd's)."""
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The machine's cgroups."""

    mode: CgroupMode
    root: Path
    mounts: dict[str, Path]
    """v1 controller (or `name=systemd`) to mount point; on v2 every controller leads to the root."""
    own: dict[str, str]
    """Controller to the cgroup of this process in it; "" is the v2 hierarchy."""

    @property
    def unified(self) -> bool:
        """Whether pods are managed through cgroup v2."""
        return self.mode is CgroupMode.V2

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that can be used, without named hierarchies."""
        return frozenset(name for name in self.mounts if not name.startswith("name="))

    @property
    def missing(self) -> frozenset[str]:
        """The controllers without which pods cannot be run."""
        return (REQUIRED_V2 if self.unified else REQUIRED_V1) - self.controllers

    def path(self, controller: str, cgroup: str = "/") -> Path:
        """Give the folder of a cgroup, named as in /proc/PID/cgroup, under a controller.

        Raises KeyError when the controller is not there.
        """
        return self.mounts[controller] / cgroup.lstrip("/")


def detect_cgroups(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Cgroups:
    """Look at the machine.

    Raises OSError when /proc cannot be read or `root` is not there.
    """
    mode = decide_mode(filesystem_magic(root), _magic_or_none(root / "unified"))
    own = parse_own_cgroups((proc / "self/cgroup").read_text())
    if mode is CgroupMode.V2:
        names = (root / "cgroup.controllers").read_text().split()
        mounts = dict.fromkeys(names, root)
        own = dict.fromkeys(["", *names], own.get("", "/"))
    else:
        mounts = find_v1_mounts(parse_mountinfo((proc / "self/mountinfo").read_text()), frozenset(own))
    return Cgroups(mode, root, mounts, own)


def decide_mode(root_magic: int, unified_magic: int | None) -> CgroupMode:
    """Decide by the filesystem types of /sys/fs/cgroup and /sys/fs/cgroup/unified."""
    if root_magic == CGROUP2_MAGIC:
        return CgroupMode.V2
    return CgroupMode.HYBRID if unified_magic == CGROUP2_MAGIC else CgroupMode.V1


def find_v1_mounts(mounts: Iterable[Mount], names: frozenset[str]) -> dict[str, Path]:
    """Find each v1 controller's mount point.

    `names` are those of `parse_own_cgroups`; they tell controllers from other mount options. Of
    several mount points of one controller the first counts: later ones were made for containers.
    """
    found: dict[str, Path] = {}
    for mount in mounts:
        if mount.kind == "cgroup":
            for name in mount.options & names:
                found.setdefault(name, mount.point)
    return found


def parse_own_cgroups(text: str) -> dict[str, str]:
    """Read /proc/PID/cgroup: controller to cgroup, the v2 hierarchy under ""."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, cgroup = [*line.split(":", 2), "", ""][:3]
        for name in names.split(","):
            found[name] = cgroup or "/"
    return found


def filesystem_magic(path: Path) -> int:
    """Give the kernel's number for the type of the filesystem that a path is on.

    Raises OSError when there is no such path.
    """
    # Of struct statfs only the first word is of interest; it is an int on s390x and a long elsewhere.
    word = ctypes.c_uint32 if platform.machine() == "s390x" else ctypes.c_long
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(word.from_buffer(buffer).value) & 0xFFFFFFFF


def _magic_or_none(path: Path) -> int | None:
    try:
        return filesystem_magic(path)
    except OSError:
        return None
