"""Names of rotated logs, and decisions about them; pure functions.

Names and their order are upstream's, so that a node can be switched between kubelets:

    0.log                          written by the runtime
    0.log.20260102-030405          rotated at that local time, not compressed
    0.log.20260102-030405_000001   the next one of the same second, sorted after it
    0.log.20260102-030405.gz       compressed
    0.log.20260102-030405.tmp      a compression in progress, or an interrupted one

Every name with the prefix `0.log.` belongs to the log, as upstream. Names that are not a time, or one of the
future, count as the oldest, so that no pod can displace its log by naming files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMPRESSED = ".gz"
TEMPORARY = ".tmp"
SMALLEST_URGENT_SIZE = 1024 * 1024
"""Bytes below which a log waits for the end of the monitoring interval, however fast it grows."""
SHORTEST_CHECK_SECONDS = 0.05
TICK_SECONDS = 1.0
"""Seconds between the checks of all logs, and the longest time between those of a fast growing one."""
_STAMP = "%Y%m%d-%H%M%S"
_STEM = re.compile(r"(?P<stamp>[0-9]{8}-[0-9]{6})(?:_(?P<number>[0-9]{6}))?", re.ASCII)
_LAST_NUMBER = 999_999
_FUTURE_SECONDS = 86_400.0
"""Seconds by which the clock may have been set back since a rotation."""
_OVERSHOOT = 1.25
"""Share by which rotated files may exceed the maximum size of a log on average."""
_ATTEMPT = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """Limits per container, `containerLogMaxSize` and `containerLogMaxFiles`."""

    max_size: int
    """Bytes at which a log is rotated; negative: never."""
    max_files: int
    """Number of files of a log, including the one being written."""

    @property
    def urgent_size(self) -> int:
        """Bytes at which a log is rotated without waiting for the end of the monitoring interval."""
        return max(self.max_size, SMALLEST_URGENT_SIZE)

    @property
    def max_rotated(self) -> int:
        """Number of rotated files."""
        return max(self.max_files - 1, 1)

    @property
    def max_rotated_bytes(self) -> int:
        """Bytes of all rotated files; more are kept only of the newest file."""
        return int(_OVERSHOOT * self.max_rotated * self.urgent_size)

    @property
    def max_exited_bytes(self) -> int:
        """Bytes of the log of an exited container, without its rotated files."""
        return self.max_rotated_bytes


@dataclass(frozen=True, slots=True)
class LogDirectoryEntry:
    """A directory entry whose name has the prefix of a log's rotated files."""

    suffix: str
    """Name without the prefix."""
    size: int = 0
    modified: float = 0.0
    """Time of the last change, in seconds since the Unix epoch."""
    inode: tuple[int, int] = (0, 0)
    """Device and inode number."""
    is_regular: bool = True

    @property
    def stem(self) -> str:
        """Suffix without `.gz`: equal for a file before and after its compression."""
        return self.suffix.removesuffix(COMPRESSED)

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed, by its name."""
        return self.suffix.endswith(COMPRESSED)


@dataclass(frozen=True, slots=True)
class RotatedFiles:
    """Entries of a log's directory, by their use."""

    rotated: tuple[LogDirectoryEntry, ...] = ()
    """Oldest first."""
    unused: tuple[str, ...] = ()
    """Suffixes of files left by interrupted rotations, and of everything that is not a regular file."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Rotated files to remove, and what is retained beyond the limits for readers."""

    remove: tuple[LogDirectoryEntry, ...] = ()
    held_bytes: int = 0


def newest_allowed(now: float) -> str:
    """Return the largest stem that a rotation may have had at `now` (seconds since the epoch)."""
    return time.strftime(_STAMP, time.localtime(now + _FUTURE_SECONDS))


def sort_key(stem: str, newest: str) -> tuple[bool, str]:
    """Return the position of a stem among the rotated files of a log; `newest` is the largest valid one."""
    return _STEM.fullmatch(stem) is not None and stem <= newest, stem


def next_stem(existing: Iterable[str], now: float) -> str:
    """Return the stem for a rotation at `now`, sorted after all valid existing ones."""
    stamp, newest = time.strftime(_STAMP, time.localtime(now)), newest_allowed(now)
    last = max((stem for stem in existing if sort_key(stem, newest)[0]), default="")
    if stamp > last:
        return stamp
    # A second rotation in one second, or the clock was set back.
    match = _STEM.fullmatch(last)
    assert match is not None
    number = int(match["number"] or 0) + 1
    if number <= _LAST_NUMBER:
        return f"{match['stamp']}_{number:06}"
    seconds = time.mktime(time.strptime(match["stamp"], _STAMP))
    return next_stem((), seconds + 1)


def classify(
    entries: Iterable[LogDirectoryEntry], active: tuple[int, int] | None, now: float
) -> RotatedFiles:
    """Sort entries by their use; `active` is the inode of the file that the runtime writes, if it exists.

    Unused are temporary files, files whose compressed form is complete, second names of the active file (an
    interrupted rename), and everything that is not a regular file.
    """
    found = list(entries)
    compressed = {entry.stem for entry in found if entry.is_compressed and entry.is_regular}
    rotated, unused = [], []
    for entry in found:
        in_use = (
            entry.is_regular
            and not entry.suffix.endswith(TEMPORARY)
            and entry.inode != active
            and (entry.is_compressed or entry.stem not in compressed)
        )
        if in_use:
            rotated.append(entry)
        else:
            unused.append(entry.suffix)
    newest = newest_allowed(now)
    rotated.sort(key=lambda entry: sort_key(entry.stem, newest))
    return RotatedFiles(tuple(rotated), tuple(sorted(unused)))


def find_excess(
    rotated: Sequence[LogDirectoryEntry],
    max_files: int,
    max_bytes: int,
    *,
    unread_after: str | None = None,
    hold_bytes: int = 0,
) -> Excess:
    """Return the files to remove, oldest first, so that the rest is within both limits.

    The newest file always stays, whatever its size. Files after the stem `unread_after` are to be read by a
    client and stay as well, up to `hold_bytes` of them; empty ones do not, or their number had no limit.
    """
    count, total = len(rotated), sum(entry.size for entry in rotated)
    remove, held = [], 0
    for entry in rotated[:-1] if max_files > 0 else rotated:
        if count <= max_files and total <= max_bytes:
            break
        count, total = count - 1, total - entry.size
        is_unread = unread_after is not None and entry.stem > unread_after and entry.size > 0
        if is_unread and held + entry.size <= hold_bytes:
            held += entry.size
        else:
            remove.append(entry)
    return Excess(tuple(remove), held)


def find_uncompressed(
    rotated: Sequence[LogDirectoryEntry], now: float, min_age: float, *, include_newest: bool = False
) -> list[LogDirectoryEntry]:
    """Return the files to compress, oldest first.

    The newest one stays as it is, because the runtime may still write to it and log shippers read it. A file
    that was written within `min_age` seconds is not worth compressing: of a log that grows so fast, it is
    removed soon.
    """
    candidates = rotated if include_newest else rotated[:-1]
    return [entry for entry in candidates if not entry.is_compressed and now - entry.modified >= min_age]


def stale_attempts(names: Iterable[str], known: Iterable[str]) -> set[int]:
    """Return the attempts of a container whose logs can be removed, by the names of all its log files.

    `known` are the log files of containers that the runtime has. Of the others, which the runtime has lost,
    the newest attempt is kept: it may be one that is being started.
    """
    kept = {int(match[1]) for name in known if (match := _ATTEMPT.fullmatch(name))}
    found = {int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))}
    lost = found - kept
    return lost - {max(lost)} if lost else set()


def attempt_of(name: str) -> int | None:
    """Return the attempt that a log file belongs to; None for an unrelated file."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def next_check_seconds(size: int, rate: float, urgent_size: int) -> float:
    """Return the seconds after which a log of `size` bytes may reach its limit, growing by `rate` per second.

    At least SHORTEST_CHECK_SECONDS, at most TICK_SECONDS.
    """
    if rate <= 0:
        return TICK_SECONDS
    return min(max((urgent_size - size) / rate, SHORTEST_CHECK_SECONDS), TICK_SECONDS)
