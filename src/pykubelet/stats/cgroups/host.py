"""What the cgroup readers of both versions share.

`ReaderHost` has facts about the host: huge page sizes, boot time, total memory and swap. `BaseCgroupReader`
has the operations of a reader; a version implements what they read.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pykubelet.stats.cgroups.files import CgroupFile, DescriptorBudget
from pykubelet.stats.samples import CgroupGone, Details, Limits, Usage

T = TypeVar("T")


class ReaderHost(msgspec.Struct, frozen=True, kw_only=True):
    """The host as cgroup readers see it; tests replace parts of it."""

    budget: DescriptorBudget
    boot_time: float
    """Seconds since the epoch, truncated to minutes as cAdvisor does."""
    huge_page_sizes: tuple[str, ...] = ()
    meminfo: Path = Path("/proc/meminfo")

    def memory_and_swap(self) -> tuple[int, int, int]:
        """Return total memory, total swap and used swap in bytes; zeros if /proc/meminfo cannot be read."""
        found = {"MemTotal": 0, "SwapTotal": 0, "SwapFree": 0}
        with suppress(OSError, ValueError, IndexError):
            for line in self.meminfo.read_text().splitlines()[:256]:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0]) * 1024
        return found["MemTotal"], found["SwapTotal"], max(found["SwapTotal"] - found["SwapFree"], 0)

    def creation_time(self, directories: list[str], marker: str) -> float:
        """Return the creation time of a cgroup with one of these directories: its earliest modification time.

        The modification time of a directory changes when a cgroup is created in it; `marker` is a file whose
        time does not. Raises CgroupGone if none of the directories exists.
        """
        found = []
        for directory in directories:
            for path in (Path(directory), Path(directory, marker)):
                with suppress(OSError):
                    found.append(path.stat().st_mtime)
        if not found:
            raise CgroupGone(f"cgroup {directories[0] if directories else ''} was removed")
        return max(min(found), self.boot_time)


REUSE_SECONDS = 60.0
"""Seconds for which the memory statistics of an idle cgroup are reused."""


class BaseCgroupReader(ABC):
    """A reader of one cgroup; its files are opened by the first read and closed by `close`."""

    def __init__(self, path: str, host: ReaderHost) -> None:
        self._path = path.strip("/")
        self._is_root = not self._path
        self._host = host
        self._files: dict[str, CgroupFile] = {}
        self._created = 0.0
        self._kept: Usage | None = None
        self._kept_until = 0.0

    def read_usage(self, *, fresh: bool = False) -> Usage:
        """Return processor time and memory; with `fresh`, no statistics of an idle cgroup are reused.

        Raises CgroupGone and CgroupError.
        """
        if fresh:
            self._kept = None
        return self._close_if_gone(self._read_usage)

    def read(self) -> tuple[Usage, Details]:
        """Return usage and details, without the numbers of `processes`. Raises CgroupGone and CgroupError."""
        return self._close_if_gone(self._read)

    def refresh(self, details: Details) -> Details:
        """Return the details of a cgroup in which no process has run since `details` were read.

        Raises CgroupGone and CgroupError.
        """
        return self._close_if_gone(lambda: self._refresh(details))

    def read_limits(self) -> Limits:
        """Return the limits. Raises CgroupGone and CgroupError."""
        return self._close_if_gone(self._read_limits)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        for file in self._files.values():
            file.close()

    @abstractmethod
    def _read_usage(self) -> Usage: ...

    @abstractmethod
    def _read(self) -> tuple[Usage, Details]: ...

    @abstractmethod
    def _read_limits(self) -> Limits: ...

    def _refresh(self, details: Details) -> Details:
        return details

    def _keep(self, now: float, cpu: int, memory: int, swap: int, stat: Sequence[int]) -> Usage:
        """Keep a usage that was read completely, and return it.

        `stat` are the values of memory.stat: cache, rss, mapped_file, page faults, major page faults, active
        and inactive page cache.
        """
        cache, rss, mapped, faults, major, active, inactive = stat
        usage = Usage(
            time=now,
            cpu=cpu,
            memory=memory,
            working_set=memory - inactive if memory > inactive else 0,
            rss=rss,
            cache=cache,
            mapped_file=mapped,
            active_file=active,
            inactive_file=inactive,
            swap=swap,
            page_faults=faults,
            major_page_faults=major,
        )
        self._kept, self._kept_until = usage, usage.time + REUSE_SECONDS
        return usage

    def _idle_usage(self, now: float, cpu: int, memory: int) -> Usage | None:
        """Return the usage at `now` if no process has run since it was read; None if it must be read.

        The memory statistics have by far the largest file. If processor time and charged memory are the same,
        they have not changed, except that the kernel may have aged page cache: they are reused for a bounded
        time.
        """
        kept = self._kept
        if (
            kept is None
            or kept.cpu != cpu
            or kept.memory != memory
            or self._is_root
            or not kept.time <= now < self._kept_until
        ):
            return None
        return msgspec.structs.replace(kept, time=now)

    def _creation_time(self, directories: list[str], marker: str) -> float:
        """Return the creation time as `ReaderHost.creation_time`, which is called once."""
        if not self._created:
            self._created = self._host.creation_time(directories, marker)
        return self._created

    def _close_if_gone(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except CgroupGone:
            self.close()
            raise


def boot_time() -> float:
    """Return the time of the last boot in seconds since the epoch, truncated to minutes."""
    uptime = math.ceil(time.clock_gettime(time.CLOCK_BOOTTIME))
    return (time.time() - uptime) // 60 * 60


def huge_page_sizes(directory: Path = Path("/sys/kernel/mm/hugepages")) -> tuple[str, ...]:
    """Return the sizes of huge pages as cgroup files name them, such as `2MB`, smallest first."""
    sizes = []
    with suppress(OSError):
        for entry in directory.iterdir():
            size = entry.name.removeprefix("hugepages-").removesuffix("kB")
            if size.isascii() and size.isdigit() and entry.name == f"hugepages-{size}kB":
                sizes.append(int(size))
    return tuple(map(_size_name, sorted(sizes)))


def _size_name(kilobytes: int) -> str:
    if kilobytes >= 1 << 20:
        return f"{kilobytes >> 20}GB"
    if kilobytes >= 1 << 10:
        return f"{kilobytes >> 10}MB"
    return f"{kilobytes}KB"
