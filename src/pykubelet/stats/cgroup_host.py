"""Facts about the host that all cgroup readers share: huge page sizes, boot time, total memory and swap."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from pykubelet.stats.cgroup_files import DescriptorBudget
from pykubelet.stats.samples import CgroupGone


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
