"""Sampler of one cgroup: what is read of it, with the files that stay open, and when it counts as idle.

The collector creates a `Sampler` for each cgroup that exists, and closes it when the cgroup is gone. The
event loop reads usage and limits through `reader`; `read_details` and `read_summary` block and run in a
thread. The collector knows which are in a thread: thread and loop must not use a sampler concurrently.
Nothing of it outlives the process.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from pykubelet.logs import get_logger
from pykubelet.stats.cgroups.readers import CgroupReader
from pykubelet.stats.network import HOST_PID, NamespaceGone, NetworkReader
from pykubelet.stats.processes import ProcessScan, first_process, max_open_files, read_pids
from pykubelet.stats.samples import Details, Limits, NetworkInterface, Target, Usage

log = get_logger(__name__)
MAX_IDLE_SECONDS = 15.0
"""Seconds to which the interval grows while no process of a cgroup runs, unless it is longer anyway."""


class Sampler:
    """A cgroup that exists, with everything that is kept open to read it. One thread at a time uses it."""

    def __init__(self, target: Target, reader: CgroupReader) -> None:
        self.target = target
        self.reader = reader
        self._pid = HOST_PID if target.kind == "root" else 0
        self._network: NetworkReader | None = None
        self._last: DetailedSample | None = None
        self._counted: tuple[int, int] | None = None
        """Processor time at which the processes were counted, and their number."""

    def read_details(self, scan: ProcessScan, sampled: Usage | None) -> DetailedSample:
        """Read everything; `sampled` is the last sample. Raises CgroupGone and CgroupError. Blocks.

        If processor time and memory are the same as with the last details, no process of the cgroup has run
        since: only what changes without one is read, and the details are as old as the sample. A sample that
        is not newer than the last details is taken again first, which costs a tenth of reading everything.
        """
        last = self._last
        if last is not None and (sampled is None or sampled.time <= last.usage.time):
            sampled = self.reader.read_usage()
        if last is not None and sampled is not None and was_idle(last.usage, sampled):
            details = self.reader.refresh(last.details)
            self._last = DetailedSample(sampled, details, None, *self._read_network())
        else:
            self._last = self._read_all(scan)
        return self._last

    def read_summary(self, sampled: Usage | None) -> SummarySample:
        """Read what a summary needs; `sampled` is the last sample. Raises CgroupGone and CgroupError. Blocks.

        The processes are counted again if one of them has run since: a process starts others or exits.
        """
        self._find_process()
        count = None
        if self.target.kind == "container" and (procs_file := self.reader.procs_file) is not None:
            if self._counted is None or sampled is None or sampled.cpu != self._counted[0]:
                self._counted = sampled.cpu if sampled is not None else -1, len(read_pids(procs_file))
            count = self._counted[1]
        return SummarySample(count, *self._read_network())

    def _find_process(self) -> None:
        """Find the first process of a sandbox or a container, unless it is known."""
        if self.target.kind in ("sandbox", "container") and not self._pid and self.reader.procs_file:
            self._pid = first_process(self.reader.procs_file)

    def _read_all(self, scan: ProcessScan) -> DetailedSample:
        usage, details = self.reader.read()
        if self.reader.procs_file is not None:
            details = scan.count(self.reader.procs_file).add_to(details)
        limits = self.reader.read_limits()
        self._find_process()
        if self._pid:
            open_files = max_open_files(self._pid)
            details = msgspec.structs.replace(details, max_open_files=open_files)
            if open_files is None:
                self._pid = 0  # it has ended
        return DetailedSample(usage, details, limits, *self._read_network())

    def _read_network(self) -> tuple[tuple[NetworkInterface, ...] | None, float]:
        """Return the interfaces of the host or of a sandbox, and the time.

        The interfaces are None for other cgroups, and when the sandbox has ended.
        """
        if self.target.kind not in ("root", "sandbox") or not self._pid:
            return None, 0.0
        try:
            if self._network is None:
                cgroup = None if self.target.kind == "root" else self.target.path
                self._network = NetworkReader(self._pid, cgroup=cgroup)
            return self._network.read(), time.time()
        except NamespaceGone:
            self._network, self._pid = None, HOST_PID if self.target.kind == "root" else 0
        except OSError as err:
            log.v(4).info("Failed to read network interfaces", cgroup=self.target.path, err=str(err))
        return None, 0.0

    def close(self) -> None:
        """Close the files of the cgroup and the network namespace."""
        self.reader.close()
        if self._network is not None:
            self._network.close()
            self._network = None


class DetailedSample(NamedTuple):
    """Usage, details and network of one cgroup, as read in a thread."""

    usage: Usage
    details: Details
    limits: Limits | None
    """None if they were not read; the next samples read them."""
    network: tuple[NetworkInterface, ...] | None
    network_time: float


class SummarySample(NamedTuple):
    """Network and processes of one cgroup for a summary, as read in a thread."""

    processes: int | None
    """Number of processes of a container."""
    network: tuple[NetworkInterface, ...] | None
    network_time: float


def was_idle(before: Usage, now: Usage) -> bool:
    """Return whether the later sample differs from the earlier one in its time only."""
    return (
        before.time < now.time
        and before.cpu == now.cpu
        and before == msgspec.structs.replace(now, time=before.time)
    )


def sample_interval(interval: float, idle_samples: int) -> float:
    """Return the seconds until the next sample: twice as many after each idle one, up to a maximum."""
    return max(interval, min(interval * (1 << min(idle_samples, 10)), MAX_IDLE_SECONDS))
