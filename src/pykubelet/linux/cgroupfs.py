"""Detection of the host's cgroup hierarchies, and members and removal of cgroup trees.

Whether the host uses cgroup v2 is decided by the filesystem type of /sys/fs/cgroup, as container runtimes do:
if kubelet and runtime disagreed, pods would be in different hierarchies. `detect_cgroups` runs once at
start-up, and its result is passed on.

`find_trees`, `members`, `kill_members` and `remove` work on v1 (one tree per controller), v2 (one tree) and
hybrid hosts, because they use what is mounted and not the detected mode. A privileged container can nest
cgroups without limit below its own. Trees are therefore walked from open directories (`untrusted_files.py`),
so that neither Python's stack nor PATH_MAX limits the depth, and in a thread. A removal that fails or is
cancelled can be repeated.
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
    """Layout of the cgroup controllers on this host."""

    V1 = "v1"
    HYBRID = "hybrid"
    """cgroup v1, plus a v2 hierarchy without controllers (systemd's)."""
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The cgroup hierarchies of this host."""

    mode: CgroupMode
    root: Path
    mounts: dict[str, Path]
    """Mount point by v1 controller (or `name=systemd`); on v2 each controller maps to the root."""
    own: dict[str, str]
    """Cgroup of this process by controller; "" is the v2 hierarchy."""

    @property
    def unified(self) -> bool:
        """Whether pods are managed through cgroup v2."""
        return self.mode is CgroupMode.V2

    @property
    def controllers(self) -> frozenset[str]:
        """The available controllers, without named hierarchies."""
        return frozenset(name for name in self.mounts if not name.startswith("name="))

    @property
    def missing(self) -> frozenset[str]:
        """The controllers that are required to run pods and are not available."""
        return (REQUIRED_V2 if self.unified else REQUIRED_V1) - self.controllers

    def path(self, controller: str, cgroup: str = "/") -> Path:
        """Return the directory of a cgroup, named as in /proc/PID/cgroup, under a controller.

        Raises KeyError if the controller is not available.
        """
        return self.mounts[controller] / cgroup.lstrip("/")


def detect_cgroups(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Cgroups:
    """Return the cgroup hierarchies of this host.

    Raises OSError if /proc cannot be read or `root` does not exist.
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
    """Return the mode for the filesystem types of /sys/fs/cgroup and /sys/fs/cgroup/unified."""
    if root_magic == CGROUP2_MAGIC:
        return CgroupMode.V2
    return CgroupMode.HYBRID if unified_magic == CGROUP2_MAGIC else CgroupMode.V1


def find_v1_mounts(mounts: Iterable[Mount], names: frozenset[str]) -> dict[str, Path]:
    """Return the mount point of each v1 controller.

    `names` are the keys of `parse_own_cgroups`; they distinguish controllers from other mount options. If a
    controller is mounted several times, the first mount point counts: later ones were made for containers.
    """
    found: dict[str, Path] = {}
    for mount in mounts:
        if mount.kind == "cgroup":
            for name in mount.options & names:
                found.setdefault(name, mount.point)
    return found


def parse_own_cgroups(text: str) -> dict[str, str]:
    """Parse /proc/PID/cgroup: cgroup by controller, the v2 hierarchy under ""."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, cgroup = [*line.split(":", 2), "", ""][:3]
        for name in names.split(","):
            found[name] = cgroup or "/"
    return found


def filesystem_magic(path: Path) -> int:
    """Return the magic number of the filesystem that a path is on (statfs `f_type`).

    Raises OSError if the path does not exist.
    """
    # f_type is the first field of struct statfs: an int on s390x, a long elsewhere.
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
    """Return the mount points of the cgroup hierarchies, without duplicates."""
    return list(dict.fromkeys(mount.point for mount in mounts if mount.kind in _KINDS))


def find_trees(name: str) -> list[Path]:
    """Return the directories of the top-level cgroup `name` in all hierarchies that have it."""
    return [tree for root in hierarchies(read_mounts()) if (tree := root / name).is_dir()]


def members(tree: Path) -> set[int]:
    """Return the pids of all processes in a cgroup and below it. Raises OSError. Blocks."""
    found = _Members()
    _walk(tree, found)
    return found.pids


async def kill_members(tree: Path, *, timeout: float = 5.0) -> bool:
    """Send SIGKILL to all processes in a cgroup and below, repeatedly until it is empty or `timeout` expires.

    Never kills the calling process. `timeout` is in seconds. Returns whether the cgroup is empty.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    with suppress(OSError):
        # cgroup.kill (v2, Linux 5.14) is atomic: a fork bomb cannot escape it.
        inside = await asyncio.to_thread(members, tree)
        if inside and os.getpid() not in inside:
            (tree / "cgroup.kill").write_text("1")
    while pids := await asyncio.to_thread(members, tree) - {0, os.getpid()}:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return not await asyncio.to_thread(members, tree)


async def remove(tree: Path, *, timeout: float = 5.0) -> bool:
    """Remove a cgroup and its descendants; return whether it is gone.

    Retries for `timeout` seconds: the kernel releases a cgroup shortly after its last process ended.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while not await asyncio.to_thread(_remove_once, tree):
        if asyncio.get_running_loop().time() > deadline:
            return not tree.is_dir()
        await asyncio.sleep(0.02)
    return True


def _remove_once(tree: Path) -> bool:
    """Remove the cgroups of a tree that have no processes; return whether all are gone. Raises OSError."""
    _walk(tree, _Removal())
    return _rmdir(tree)


def _walk(tree: Path, visitor: Visitor) -> None:
    """Visit a cgroup and its descendants; one that does not exist is empty. Raises OSError."""
    try:
        opened = os.open(tree, OPEN_DIRECTORY)
    except OSError as err:
        if err.errno not in REPLACED:
            raise
        return
    walk_tree(opened, visitor)


class _Cgroups:
    """Base of visitors: enters all cgroups below the top, except those that are hidden by a mount."""

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
    """Visitor that collects pids."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def leave(self, opened: int) -> None:
        try:
            with open("cgroup.procs", opener=lambda path, flags: os.open(path, flags, dir_fd=opened)) as file:
                text = file.read()
        except OSError as err:
            # Removed concurrently, or a threaded v2 cgroup, whose members its threaded root lists.
            if err.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                return
            raise
        self.pids.update(int(pid) for pid in text.split())


class _Removal(_Cgroups):
    """Visitor that removes every cgroup below the top, children first."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def enter(self, name: str, parent: int) -> int | None:
        opened = super().enter(name, parent)
        if opened is not None:
            self._names.append(name)
        return opened

    def leave(self, opened: int) -> None:
        if self._names:
            # The kernel cannot move a cgroup to another parent: ".." is where it was entered from.
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
    """Return whether the kernel can limit the swap of cgroups; `unified` is whether they are v2.

    Not every kernel accounts swap. On v2 every cgroup but the root has `memory.swap.max`, so that one below
    the root is enough.
    """
    if not unified:
        return (root / "memory/memory.memsw.limit_in_bytes").exists()
    if any(root.glob("*/memory.max")):
        return any(root.glob("*/memory.swap.max"))
    # No cgroup has the memory controller enabled yet. A kernel with swap support accounts it.
    try:
        return "memory" in (root / "cgroup.controllers").read_text().split() and swaps.exists()
    except OSError:
        return False
