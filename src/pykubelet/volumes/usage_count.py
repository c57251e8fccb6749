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

import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORK_SECONDS = 0.005
"""How long a walk works at a stretch."""
REST_FACTOR = 3
MOST_OPEN = 1000
"""Folders that a walk may have open at a time: as deep it can go where every folder has several in it."""

_BLOCK = 512
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._blocks = 0
        self._inodes = 0
        self._device = 0
        self._most_open = min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._linked: set[int] = set()
        """Files with several names that were counted."""

    def count(self, path: Path) -> Tally:
        facts = path.lstat()
        self._device = facts.st_dev
        self._add(facts)
        top = os.open(path, _OPEN)
        # Open folders with those in them that are still to be entered.
        trail: list[tuple[int, list[str]]] = []
        try:
            self._enter(top, trail)
            while trail:
                folder, names = trail[-1]
                inner = self._open(names.pop(), folder)
                if not names:
                    # Closed before going on, so that a long chain of folders needs no more than one.
                    trail.pop()
                    os.close(folder)
                if inner is not None:
                    self._enter(inner, trail)
        finally:
            for folder, _ in trail:
                os.close(folder)
        return Tally(self._blocks * _BLOCK, self._inodes)

    def _enter(self, folder: int, trail: list[tuple[int, list[str]]]) -> None:
        """Count what is in an open folder, and keep it open for as long as it is needed."""
        try:
            names = self._scan(folder)
            if names and len(trail) >= self._most_open:
                raise OSError(f"more than {self._most_open} folders inside of each other")
        except BaseException:
            os.close(folder)
            raise
        if names:
            trail.append((folder, names))
        else:
            os.close(folder)

    def _scan(self, folder: int) -> list[str]:
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._pace.step()
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if facts.st_dev == self._device and self._add(facts) and stat.S_ISDIR(facts.st_mode):
                    names.append(entry.name)
        return names

    def _open(self, name: str, folder: int) -> int | None:
        """Open a folder that was seen; None when it is gone, or something else has taken its place."""
        try:
            inner = os.open(name, _OPEN, dir_fd=folder)
        except OSError as err:
            # A link in its place is called one link too many.
            if isinstance(err, FileNotFoundError | NotADirectoryError) or err.errno == errno.ELOOP:
                return None
            raise
        if os.fstat(inner).st_dev == self._device:
            return inner
        os.close(inner)
        return None

    def _add(self, facts: os.stat_result) -> bool:
        """Count a file, unless it has been counted under another name."""
        if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
            if facts.st_ino in self._linked:
                return False
            self._linked.add(facts.st_ino)
        self._blocks += facts.st_blocks
        self._inodes += 1
        return True
