"""One look at a folder of manifests: which files are there, and what they hold.

Looking again is cheap: a file that has not changed since the last look is neither opened nor parsed.
All of this blocks, so it runs in a thread; it touches nothing but the files and returns what it saw.

A file that exists but cannot be used (half-written, invalid, unreadable) keeps what it last held,
together with the problem. The reference forgets such a pod at its next listing; but a
slip of the pen should not stop what runs, and a file that is meant to go can be removed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from pykubelet.config.errors import ConfigError, Problem
from pykubelet.pods.manifests import Contents, read_bytes
from pykubelet.pods.path_watch import SETTLED_AFTER, links

Load = Callable[[bytes, Path], Contents]
"""Makes pods, and what they refer to, of a file's bytes; raises ConfigError."""

_SECOND = 1_000_000_000
# A file that changed so recently may change again without its time or size telling.
_UNCERTAIN = _SECOND // 10
_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one file held at the last look."""

    contents: Contents = field(default_factory=Contents)
    problems: tuple[Problem, ...] = ()
    stamp: tuple[int, ...] | None = None
    """Tells a changed file from an unchanged one without reading it; None when nothing can tell."""
    digest: bytes = b""
    exposed: str = ""
    """What to do so that nobody but root can read it; "" when nobody can."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was there."""

    manifests: dict[Path, Manifest]
    """In the order of the files' names."""
    exists: bool = True
    unsettled: bool = False
    """Whether a file is being written, so that looking again soon is worth it."""


def look(
    path: Path, known: Mapping[Path, Manifest], load: Load, being_written: Set[Path] = frozenset()
) -> Look:
    """Look at a file or a folder of files; hidden files and folders below it do not count.

    `known` is what the look before saw. Raises OSError when the path is there but cannot be listed:
    then nobody knows what it holds.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        elif stat.S_ISREG(mode):
            files = [path]
        else:
            raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
    except (FileNotFoundError, NotADirectoryError):
        return Look({}, exists=False)
    manifests, unsettled = {}, False
    for file in files:
        if _is_being_written(file, being_written):
            unsettled = True
            manifests[file] = known.get(file, Manifest())
        elif (manifest := _read(file, known.get(file, Manifest()), load)) is not None:
            manifests[file] = manifest
    return Look(manifests, unsettled=unsettled)


def _is_being_written(file: Path, being_written: Set[Path]) -> bool:
    if being_written and not being_written.isdisjoint(links(file)):
        return True
    try:
        facts = file.stat()
    except OSError:
        return False
    # A new file is empty until its author writes the first line.
    empty = stat.S_ISREG(facts.st_mode) and facts.st_size == 0
    return empty and 0 <= time.time_ns() - facts.st_mtime_ns < SETTLED_AFTER * _SECOND


def _read(file: Path, known: Manifest, load: Load) -> Manifest | None:
    """Read one file if it changed; None when it is not there any more."""
    try:
        facts = file.stat()
        if stat.S_ISDIR(facts.st_mode):
            return Manifest(problems=(Problem(str(file), "is a folder: only files beside it are read"),))
        stamp = _stamp(facts)
        if stamp is not None and stamp == known.stamp:
            return known
    except FileNotFoundError:
        if not os.path.lexists(file):
            return None
        return Manifest(problems=(Problem(str(file), "is a link to a file that does not exist"),))
    except OSError as err:
        return _unreadable(file, known, err)
    exposed = _exposed(file, facts)
    digest = b""
    try:
        data = read_bytes(file)
        digest = hashlib.blake2b(data).digest()
        if digest == known.digest:
            return replace(known, stamp=stamp, exposed=exposed)
        return Manifest(load(data, file), (), stamp, digest, exposed)
    except ConfigError as err:
        return Manifest(known.contents, tuple(err.problems), stamp, digest, exposed)
    except FileNotFoundError:
        return None
    except OSError as err:
        return _unreadable(file, known, err)


def _unreadable(file: Path, known: Manifest, err: OSError) -> Manifest:
    # Without a stamp and a digest it is read again at every look: nothing else tells when that works.
    return Manifest(known.contents, (Problem(str(file), f"cannot be read: {err.strerror}"),))


def _exposed(file: Path, facts: os.stat_result) -> str:
    remedies = []
    if facts.st_uid not in (0, os.geteuid()):
        remedies.append(f"chown root {file}")
    if facts.st_mode & _OTHERS_READ:
        remedies.append(f"chmod 600 {file}")
    return " && ".join(remedies)


def _stamp(facts: os.stat_result) -> tuple[int, ...] | None:
    if abs(time.time_ns() - facts.st_ctime_ns) < _UNCERTAIN:
        return None
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
