"""Directory trees that are too deep for paths, recursion and open files, and a limit on open files."""

import gc
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CAGE_LEVELS = 100
"""Levels of directories around a deep tree, more than any test moves a directory up."""


def nest(top: Path, depth: int, fill: Callable[[int], None] | None = None) -> None:
    """Create directories called `d` inside of each other; `fill` gets each of them, opened."""
    here = os.open(top, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=here)
            inner = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
            if fill is not None:
                fill(here)
    finally:
        os.close(here)


@contextmanager
def deep_directory() -> Iterator[Path]:
    """Create a directory for a deep tree, and remove it afterwards: pytest's own clean-up cannot.

    It is in memory where that is possible: thousands of directories on a busy disk take a minute. A removal
    that follows `..` of a moved directory, as with a fault of the code under test, must not reach the host's
    directories: it meets the cage around the tree.
    """
    memory = Path("/dev/shm")
    path = Path(
        tempfile.mkdtemp(prefix="pykubelet-deep-", dir=memory if os.access(memory, os.W_OK) else None)
    )
    try:
        inside = path.joinpath(*["cage"] * CAGE_LEVELS)
        inside.mkdir(parents=True)
        yield inside
    finally:
        subprocess.run(["rm", "-rf", path], check=True)


@contextmanager
def few_open_files(count: int) -> Iterator[None]:
    """Allow so many more open files, and verify that all of them are closed in the end."""
    gc.collect()  # descriptors of earlier tests must not be closed in between
    before = _open_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert _open_files() == before


def _open_files() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            os.fstat(int(path.name))
        except OSError:
            continue  # the descriptor that has listed them
        found.add(int(path.name))
    return found
