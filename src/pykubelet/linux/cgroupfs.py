"""Which cgroups this machine has, and where.

Everything that limits or measures a container depends on the answer, so it is found once and
handed on as facts. Whether the machine is unified (v2) is decided as the container runtimes
decide it, by the type of the filesystem at /sys/fs/cgroup: two answers on one node would put
pods where nobody looks for them.

A named cgroup in every hierarchy of the machine: who is in it, and removing it whole.

Works for v1 (one tree per controller), v2 (one tree) and both at once, because it goes by what
is mounted and not by what the machine is said to be.

A privileged container can nest cgroups without end below its own. They are walked from open directories
(`tree_walk.py`), so that neither Python's stack nor PATH_MAX limits the depth, and in a thread.

Whether the kernel can bound the swap of a cgroup: not every kernel counts it.

On v2 the file is in every cgroup but the root's, so one below it answers for all.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pykubelet.linux.mounts import Mount, parse_mountinfo, read_mounts
from pykubelet.linux.untrusted_files import (
    OPEN_DIRECTORY,
    REPLACED,
    Visitor,
    open_on_same_mount,
    open_subdirectory,
    walk_tree,
)

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


_KINDS = frozenset({"cgroup", "cgroup2"})


def hierarchies(mounts: Iterable[Mount]) -> list[Path]:
    """Give the places where cgroup hierarchies are mounted, each once."""
    return list(dict.fromkeys(mount.point for mount in mounts if mount.kind in _KINDS))


def find_trees(name: str) -> list[Path]:
    """Give the directories of the top-level cgroup `name` in all hierarchies that have it."""
    return [tree for root in hierarchies(read_mounts()) if (tree := root / name).is_dir()]


def members(tree: Path) -> set[int]:
    """Return the pids of all processes in a cgroup and below it. Raises OSError. Blocks."""
    found = _Members()
    _walk(tree, found)
    return found.pids


async def kill_members(tree: Path, *, timeout: float = 5.0) -> bool:
    """Kill every process in a cgroup and below, again and again until none is left.

    Never kills the calling process. Returns whether the cgroup is empty.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    with suppress(OSError):
        # Where the kernel offers it (v2 since 5.14) even a fork bomb cannot outrun it.
        inside = await asyncio.to_thread(members, tree)
        if inside and os.getpid() not in inside:
            (tree / "cgroup.kill").write_text("1")
    while victims := await asyncio.to_thread(members, tree) - {0, os.getpid()}:
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return not await asyncio.to_thread(members, tree)


async def remove(tree: Path, *, timeout: float = 5.0) -> bool:
    """Remove a cgroup and those below it; returns whether it is gone.

    The kernel lets go of a cgroup a moment after its last process, hence the patience.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while not await asyncio.to_thread(_remove_once, tree):
        if asyncio.get_running_loop().time() > deadline:
            return not tree.is_dir()
        await asyncio.sleep(0.02)
    return True


def _remove_once(tree: Path) -> bool:
    """Remove the cgroups of a tree that hold no process; return whether all are gone. Raises OSError."""
    _walk(tree, _Removal())
    return _rmdir(tree)


def _walk(tree: Path, visitor: Visitor) -> None:
    """Visit a cgroup and all below it; one that does not exist is empty. Raises OSError."""
    try:
        opened = os.open(tree, OPEN_DIRECTORY)
    except OSError as err:
        if err.errno not in REPLACED:
            raise
        return
    walk_tree(opened, visitor)


class _Cgroups:
    """Base of visitors: enters all cgroups below the top, except where something is mounted over one."""

    def entry(self, entry: os.DirEntry[str], _parent: int) -> bool:
        return entry.is_dir(follow_symlinks=False)

    def enter(self, name: str, parent: int) -> int | None:
        try:
            return open_on_same_mount(parent, name, OPEN_DIRECTORY)
        except OSError as err:
            if err.errno in (errno.ENOSYS, errno.EPERM, errno.EAGAIN):
                return open_subdirectory(name, parent)
            if err.errno not in (*REPLACED, errno.EXDEV):
                raise
        return None


class _Members(_Cgroups):
    """Collects pids."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def leave(self, opened: int) -> None:
        try:
            with open("cgroup.procs", opener=lambda path, flags: os.open(path, flags, dir_fd=opened)) as file:
                text = file.read()
        except OSError as err:
            # Gone in the meantime, or a threaded v2 cgroup, whose root lists its members.
            if err.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                return
            raise
        self.pids.update(int(pid) for pid in text.split())


class _Removal(_Cgroups):
    """Removes every cgroup below the top after those below it."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def enter(self, name: str, parent: int) -> int | None:
        opened = super().enter(name, parent)
        if opened is not None:
            self._names.append(name)
        return opened

    def leave(self, opened: int) -> None:
        if self._names:
            # A cgroup cannot be moved below another one: ".." is the directory that it was entered from.
            _rmdir(f"../{self._names.pop()}", opened)


def _rmdir(path: str | Path, directory: int | None = None) -> bool:
    """Remove a cgroup; return whether it is gone, False if it is in use. Raises OSError."""
    try:
        os.rmdir(path, dir_fd=directory)
    except OSError as err:
        if err.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
            raise
        return err.errno == errno.ENOENT
    return True


def can_bound_swap(
    *, unified: bool, root: Path = Path("/sys/fs/cgroup"), swaps: Path = Path("/proc/swaps")
) -> bool:
    """Look at the cgroups below `root`; `unified` says whether they are v2's."""
    if not unified:
        return (root / "memory/memory.memsw.limit_in_bytes").exists()
    if any(root.glob("*/memory.max")):
        return any(root.glob("*/memory.swap.max"))
    # Nobody has a cgroup with memory yet; where there is swap at all it will be counted.
    try:
        return "memory" in (root / "cgroup.controllers").read_text().split() and swaps.exists()
    except OSError:
        return False
