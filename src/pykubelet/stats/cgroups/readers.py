"""Choice of the cgroup reader for this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.stats.cgroups.files import DescriptorBudget
from pykubelet.stats.cgroups.host import ReaderHost, boot_time, huge_page_sizes
from pykubelet.stats.cgroups.v1 import CgroupV1Reader, find_io_sources
from pykubelet.stats.cgroups.v2 import CgroupV2Reader
from pykubelet.stats.samples import Details, Limits, Usage

_V1_CONTROLLERS = ("cpu", "cpuacct", "memory", "pids", "blkio", "hugetlb", "devices")


class CgroupReader(Protocol):
    """A reader of one cgroup. Not safe for use in several threads at the same time.

    After CgroupGone all files are closed. After CgroupError, which is raised for content or permissions that
    the reader cannot handle, a later read may succeed.
    """

    @property
    def procs_file(self) -> Path | None:
        """File with the processes of the cgroup, None if there is no hierarchy to read them from."""

    def read_usage(self, *, fresh: bool = False) -> Usage:
        """Return processor time and memory; with `fresh`, nothing of an earlier read is reused.

        Raises CgroupGone and CgroupError.
        """

    def read(self) -> tuple[Usage, Details]:
        """Return usage and details, without the numbers of `processes`. Raises CgroupGone and CgroupError."""

    def refresh(self, details: Details) -> Details:
        """Return the details of a cgroup in which no process has run since `details` were read."""

    def read_limits(self) -> Limits:
        """Return the limits. Raises CgroupGone."""

    def close(self) -> None:
        """Close all files; a later read opens them again."""


def cgroup_reader_factory(cgroups: Cgroups, host: ReaderHost | None = None) -> Callable[[str], CgroupReader]:
    """Return a function that returns the reader of a cgroup by its path, such as `/kubepods/burstable`.

    All readers of one factory share a budget of descriptors. A reader opens nothing before its first read.
    """
    shared = host or ReaderHost(
        budget=DescriptorBudget(), boot_time=boot_time(), huge_page_sizes=huge_page_sizes()
    )
    if cgroups.unified:
        return lambda path: CgroupV2Reader(path, cgroups.root, shared)
    mounts = {name: cgroups.mounts[name] for name in _V1_CONTROLLERS if name in cgroups.mounts}
    io_sources = find_io_sources(mounts.get("blkio"))
    return lambda path: CgroupV1Reader(path, mounts, shared, io_sources)
