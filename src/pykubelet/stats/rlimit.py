"""Limit on tasks (processes and threads) of the host, and their number."""

from __future__ import annotations

from pathlib import Path

from pykubelet.api.stats import RlimitStats, stats_time


def read_rlimit(now: float, proc: Path = Path("/proc")) -> RlimitStats:
    """Return the smaller of the kernel's two limits and the number of tasks; what cannot be read is None.

    Takes about 50 microseconds.
    """
    limits = [_number(proc / "sys/kernel" / name) for name in ("pid_max", "threads-max")]
    return RlimitStats(
        time=stats_time(now),
        maxpid=min((limit for limit in limits if limit is not None), default=None),
        curproc=_tasks(proc),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def _tasks(proc: Path) -> int | None:
    try:
        # "0.20 0.18 0.12 1/80 11206": runnable and all tasks
        return int((proc / "loadavg").read_bytes().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return None
