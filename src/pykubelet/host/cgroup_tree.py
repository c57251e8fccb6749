"""A named cgroup in every hierarchy of the machine: who is in it, and removing it whole.

Works for v1 (one tree per controller), v2 (one tree) and both at once, because it goes by what
is mounted and not by what the machine is said to be.

A privileged container can nest cgroups without end below its own. They are walked from open directories
(`tree_walk.py`), so that neither Python's stack nor PATH_MAX limits the depth, and in a thread.
"""

import asyncio
import errno
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pykubelet.host.mounts import Mount, read_mounts
from pykubelet.host.tree_walk import (
    OPEN_DIRECTORY,
    REPLACED,
    Visitor,
    open_on_same_mount,
    open_subdirectory,
    walk_tree,
)

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
