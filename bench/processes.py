"""What a process costs: memory by PSS, processor time by the kernel's own counters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2


def pss_mb(pid: int) -> float:
    """Proportional set size in MB (10^6 bytes)."""
    return _memory_mb(pid, "Pss")


def rss_mb(pid: int) -> float:
    """Resident set size in MB: what PSS would be if no other process shared anything."""
    return _memory_mb(pid, "Rss")


def _memory_mb(pid: int, which: str) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no {which} of pid {pid}")


def cpu_seconds(pid: int) -> float:
    """Processor time used so far, user and system, all threads, those that have ended included.

    From the process's CPU clock (clock_getcpuclockid(3)), which counts nanoseconds: the ticks of `/proc` are
    longer than what one request costs.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def system_seconds(pid: int) -> float:
    """Part of the processor time that was spent in the kernel, to a tick of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / TICKS


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor share in percent of one core, and memory, over a span of time."""

    seconds: float
    cpu_percent: float
    pss_mb: float
    rss_mb: float


def cost_over(pid: int, seconds: float) -> Cost:
    """Watch a process for a while."""
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return Cost(elapsed, 100 * (cpu_seconds(pid) - before) / elapsed, pss_mb(pid), rss_mb(pid))
