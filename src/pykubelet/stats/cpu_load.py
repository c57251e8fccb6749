"""CPU load of cgroups with `--enable-load-reader`: smoothed numbers of running and uninterruptible tasks.

`CpuLoadReader` listens to the samples of the collector and reads the tasks of each sampled cgroup right after
it, as upstream's cAdvisor does. The averages are part of the record, so they end with the cgroup. Only cgroup
v1 has them (`linux.taskstats`). On v2 cAdvisor's reader fails for every cgroup, and cAdvisor stores no sample
at all; here the load is 0 then, as without the flag, and the samples remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.linux.taskstats import TaskStates, TaskstatsClient
from pykubelet.logs import get_logger
from pykubelet.stats.samples import CpuLoad, Record

log = get_logger(__name__)
_PERIOD_SECONDS = 10.0
"""Time within which an average follows a constant number of tasks."""


class CpuLoadReader:
    """Listener of samples that sets the load of records."""

    def __init__(
        self,
        root: Path,
        read: Callable[[str], TaskStates],
        interval: float,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Initialize with the directory of the CPU hierarchy and the housekeeping interval.

        `read` returns the tasks of a cgroup by its directory, and raises OSError; `close` closes it.
        """
        self.close = close
        self._root = str(root).rstrip("/")
        self._read = read
        self._decay = math.exp(-interval / _PERIOD_SECONDS)

    def on_sample(self, record: Record) -> None:
        """Update the load of a record; it stays as it is when the tasks cannot be read."""
        path = record.target.path
        try:
            tasks = self._read(self._root + path)
        except FileNotFoundError:
            return  # the cgroup was removed since the sample
        except OSError as err:
            log.v(2).info("Failed to read the tasks of cgroup", cgroup=path, err=str(err))
            return
        last = record.load
        record.load = CpuLoad(
            tasks,
            self._average(last.running if last is not None else None, tasks.running),
            self._average(last.uninterruptible if last is not None else None, tasks.uninterruptible),
        )

    def _average(self, last: float | None, count: int) -> float:
        return float(count) if last is None else last * self._decay + count * (1 - self._decay)


def cpu_load_reader(cgroups: Cgroups, interval: float) -> CpuLoadReader | None:
    """Return the reader of this host, or None with a warning if the kernel does not count tasks."""
    if cgroups.unified or "cpu" not in cgroups.mounts:
        log.warning(
            "CPU load is not measured: the kernel counts the tasks of cgroups only on cgroup v1",
            flag="--enable-load-reader",
        )
        return None
    try:
        client = TaskstatsClient()
    except OSError as err:
        log.warning("CPU load is not measured: failed to open taskstats", err=str(err))
        return None
    return CpuLoadReader(cgroups.mounts["cpu"], client.read, interval, client.close)
