"""Counting what a volume takes: file systems are asked, folders on a shared disk are walked.

A walk counts what `du` counts: blocks, not lengths (a sparse file is small), a file with several names
once, the folder itself, and nothing of other file systems that are mounted inside. Containers write to
what is walked while it is walked, so no link is ever followed, folders are opened one from the other,
and what vanishes meanwhile is passed by.

A walk of millions of files must not be felt. It is not run at a low priority: a thread that the kernel
passes over while it holds the interpreter would hold up the whole agent. Instead it rests, three times
as long as it has worked.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pykubelet.host.tree_walk import OPEN_DIRECTORY, open_subdirectory, walk_tree

WORK_SECONDS = 0.005
"""How long a walk works at a stretch."""
REST_FACTOR = 3
MAX_LINKED = 200_000
"""Inodes with several names that a walk remembers, so that a volume cannot fill the kubelet's memory."""

_BLOCK = 512
_EVERY = 128


class Interrupted(Exception):
    """Nobody waits for the walk any more."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a file system holds, in bytes and inodes."""

    capacity: int
    available: int
    """What is left for ordinary users."""
    used: int
    inodes: int
    inodes_free: int

    @property
    def inodes_used(self) -> int:
        """Inodes in use; 0 where the file system has no fixed number of them."""
        return self.inodes - self.inodes_free


@dataclass(frozen=True, slots=True)
class Tally:
    """What a folder takes, in bytes and inodes."""

    used: int
    inodes: int


class Pace:
    """Gives long work its rests, in a thread; `stop` ends the work with Interrupted."""

    def __init__(self, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self.steps = 0
        """How many pieces of work were done: others may see whether there is any progress."""
        self._began = clock()

    def step(self) -> None:
        """Count a small piece of work, and rest when it is time; raises Interrupted."""
        self.steps += 1
        if self.steps % _EVERY:
            return
        worked = self._clock() - self._began
        if worked < WORK_SECONDS:
            return
        if self._stop.wait(worked * REST_FACTOR):
            raise Interrupted
        self._began = self._clock()


def file_system(path: Path) -> FileSystem:
    """Ask the file system that a path is on; raises OSError. Blocks for as long as its server is away."""
    found = os.statvfs(path)
    return FileSystem(
        capacity=found.f_frsize * found.f_blocks,
        available=found.f_frsize * found.f_bavail,
        used=found.f_frsize * (found.f_blocks - found.f_bfree),
        inodes=found.f_files,
        inodes_free=found.f_ffree,
    )


def tally(path: Path, pace: Pace) -> Tally:
    """Walk a folder and count; raises OSError, and Interrupted."""
    return _Walk(pace).count(path)


class _Walk:
    """Counts what `walk_tree` visits."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._blocks = 0.0
        self._inodes = 0.0
        self._device = 0
        self._linked: set[int] = set()
        """Files with several names that were counted."""

    def count(self, path: Path) -> Tally:
        facts = path.lstat()
        self._device = facts.st_dev
        self._add(facts)
        walk_tree(os.open(path, OPEN_DIRECTORY), self)
        return Tally(round(self._blocks * _BLOCK), round(self._inodes))

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        """Count an entry; return whether it is a directory of the same file system."""
        self._pace.step()
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        return facts.st_dev == self._device and self._add(facts) and stat.S_ISDIR(facts.st_mode)

    def enter(self, name: str, parent: int) -> int | None:
        """Open a directory that was counted; None when it is gone, or something else has replaced it."""
        opened = open_subdirectory(name, parent)
        if opened is None or os.fstat(opened).st_dev == self._device:
            return opened
        os.close(opened)
        return None

    def leave(self, opened: int) -> None:
        """Do nothing: a directory is counted as an entry of its parent."""

    def _add(self, facts: os.stat_result) -> bool:
        """Count a file, unless it has been counted under another name.

        When more inodes have several names than are remembered, each name counts for its share of the inode.
        """
        share = 1
        if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
            if facts.st_ino in self._linked:
                return False
            if len(self._linked) < MAX_LINKED:
                self._linked.add(facts.st_ino)
            else:
                share = facts.st_nlink
        self._blocks += facts.st_blocks / share
        self._inodes += 1 / share
        return True
