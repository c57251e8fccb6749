"""A named cgroup in every hierarchy of the machine: who is in it, and removing it whole.

Works for v1 (one tree per controller), v2 (one tree) and both at once, because it goes by what
is mounted and not by what the machine is said to be.
"""

import asyncio
import errno
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pykubelet.host.mounts import Mount, read_mounts

_KINDS = frozenset({"cgroup", "cgroup2"})


def hierarchies(mounts: Iterable[Mount]) -> list[Path]:
    """Give the places where cgroup hierarchies are mounted, each once."""
    return list(dict.fromkeys(mount.point for mount in mounts if mount.kind in _KINDS))


def find_trees(name: str) -> list[Path]:
    """Give the directories of the top-level cgroup `name` in all hierarchies that have it."""
    return [tree for root in hierarchies(read_mounts()) if (tree := root / name).is_dir()]


def members(tree: Path) -> set[int]:
    """Give the pids of all processes in a cgroup and below it."""
    pids: set[int] = set()
    for directory, _, _ in os.walk(tree):
        try:
            text = (Path(directory) / "cgroup.procs").read_text()
        except OSError as err:
            # Gone in the meantime, or a threaded v2 cgroup, whose root lists its members.
            if err.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                continue
            raise
        pids.update(int(pid) for pid in text.split())
    return pids


async def kill_members(tree: Path, *, timeout: float = 5.0) -> bool:
    """Kill every process in a cgroup and below, again and again until none is left.

    Never kills the calling process. Returns whether the cgroup is empty.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    with suppress(OSError):
        # Where the kernel offers it (v2 since 5.14) even a fork bomb cannot outrun it.
        inside = members(tree)
        if inside and os.getpid() not in inside:
            (tree / "cgroup.kill").write_text("1")
    while victims := members(tree) - {0, os.getpid()}:
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return not members(tree)


async def remove(tree: Path, *, timeout: float = 5.0) -> bool:
    """Remove a cgroup and those below it; returns whether it is gone.

    The kernel lets go of a cgroup a moment after its last process, hence the patience.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while tree.is_dir():
        busy = False
        for directory, _, _ in os.walk(tree, topdown=False):
            try:
                os.rmdir(directory)  # noqa: PTH106 - os.walk speaks strings
            except OSError as err:
                if err.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                    raise
                busy = True
        if not busy:
            break
        if asyncio.get_running_loop().time() > deadline:
            return not tree.is_dir()
        await asyncio.sleep(0.02)
    return True
