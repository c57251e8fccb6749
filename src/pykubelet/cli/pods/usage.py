"""Resource usage for the command line: values of the Summary API, quantities as in `kubectl top`.

Every value may be missing, because the node omits what it has not measured. Sizes are bytes, processor usage
is nanocores (1e9 is one core). All functions are pure; a missing value is formatted as `-`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from pykubelet.api.stats import (
    ContainerStats,
    CPUStats,
    FsStats,
    IOStats,
    MemoryStats,
    NetworkStats,
    PodStats,
    Summary,
    SwapStats,
)
from pykubelet.stats.samples import ContainerMemoryCurve

MISSING = "-"
_UNITS = ("B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def nano_cores(cpu: CPUStats | None) -> int | None:
    """Return the processor usage."""
    return None if cpu is None else cpu.usage_nano_cores


def working_set(memory: MemoryStats | None) -> int | None:
    """Return the working set, which is what counts towards the limit and what `kubectl top` shows."""
    return None if memory is None else memory.working_set_bytes


def pod_nano_cores(stats: PodStats | None) -> int | None:
    """Return the processor usage of the pod's cgroup, else the sum of its containers."""
    if stats is None:
        return None
    own = nano_cores(stats.cpu)
    return _total(nano_cores(found.cpu) for found in stats.containers) if own is None else own


def pod_working_set(stats: PodStats | None) -> int | None:
    """Return the working set of the pod's cgroup, else the sum of its containers."""
    if stats is None:
        return None
    own = working_set(stats.memory)
    return _total(working_set(found.memory) for found in stats.containers) if own is None else own


def container_storage(stats: ContainerStats) -> int | None:
    """Return the bytes of the writable layer and the logs."""
    return _total(part.used_bytes for part in (stats.rootfs, stats.logs) if part is not None)


def memory_capacity(memory: MemoryStats | None) -> int | None:
    """Return the limit of the cgroup; for the node it is the memory of the host."""
    if memory is None or memory.available_bytes is None or memory.working_set_bytes is None:
        return None
    return memory.available_bytes + memory.working_set_bytes


def used_bytes(files: FsStats | None) -> int | None:
    """Return the used bytes of a file system."""
    return None if files is None else files.used_bytes


def swap_usage(swap: SwapStats | None) -> int | None:
    """Return the used swap."""
    return None if swap is None else swap.swap_usage_bytes


def pressure(stats: CPUStats | MemoryStats | IOStats | None) -> float | None:
    """Return the share of the last 10 s, in percent, in which some tasks waited for the resource."""
    if stats is None or stats.psi is None:
        return None
    return stats.psi.some.avg10


@dataclass(frozen=True, slots=True)
class Traffic:
    """Received and sent bytes: since the start of the pod, or per second."""

    received: int | None = None
    sent: int | None = None


NO_TRAFFIC = Traffic()


def traffic(network: NetworkStats | None) -> Traffic:
    """Return the counters of the default interface, else the sum of all interfaces."""
    if network is None:
        return NO_TRAFFIC
    if network.rx_bytes is not None or network.tx_bytes is not None:
        return Traffic(network.rx_bytes, network.tx_bytes)
    return Traffic(
        _total(found.rx_bytes for found in network.interfaces),
        _total(found.tx_bytes for found in network.interfaces),
    )


class TrafficRates:
    """Network rates between two samples, by key (pod uid, or "" for the node).

    A sample that is older than the interval of the watch keeps its rate; a counter that decreased, as after
    a restart of the sandbox, has no rate until the next sample.
    """

    def __init__(self) -> None:
        self._samples: dict[str, tuple[datetime, Traffic, Traffic]] = {}

    def update(self, summary: Summary) -> dict[str, Traffic]:
        """Record the counters of a Summary and return the rates."""
        samples = {}
        for key, network in (("", summary.node.network), *((p.pod_ref.uid, p.network) for p in summary.pods)):
            if network is not None and network.time is not None:
                samples[key] = self._sample(key, network.time, traffic(network))
        self._samples = samples
        return {key: rates for key, (_, _, rates) in samples.items()}

    def _sample(self, key: str, time: datetime, counters: Traffic) -> tuple[datetime, Traffic, Traffic]:
        if key not in self._samples:
            return time, counters, NO_TRAFFIC
        last_time, last, rates = self._samples[key]
        seconds = (time - last_time).total_seconds()
        if seconds <= 0:
            return last_time, last, rates
        return (
            time,
            counters,
            Traffic(
                _rate(last.received, counters.received, seconds),
                _rate(last.sent, counters.sent, seconds),
            ),
        )


def _rate(before: int | None, after: int | None, seconds: float) -> int | None:
    if before is None or after is None or after < before:
        return None
    return round((after - before) / seconds)


def format_cpu(nanos: int | None, *, detail: bool = False) -> str:
    """Format nanocores as millicores, rounded up: `12m`; with `detail` `11.3m`."""
    if nanos is None:
        return MISSING
    return f"{nanos / 1e6:.1f}m" if detail else f"{-(-nanos // 10**6)}m"


def format_memory(size: int | None, *, detail: bool = False) -> str:
    """Format bytes as whole MiB: `20Mi`; with `detail` as `format_size`."""
    if size is None:
        return MISSING
    return format_size(size, detail=True) if detail else f"{size >> 20}Mi"


def format_size(size: int | None, *, detail: bool = False) -> str:
    """Format bytes in the largest unit below them: `24Ki`, `1.2Mi`; with `detail` always one decimal."""
    if size is None:
        return MISSING
    if size < 1024:
        return f"{size}B" if size else "0"
    power = min((size.bit_length() - 1) // 10, len(_UNITS) - 1)
    value = size / (1 << 10 * power)
    if power < len(_UNITS) - 1 and round(value, 1 if detail else 0) >= 1024:
        power, value = power + 1, value / 1024
    return f"{value:.1f}{_UNITS[power]}" if detail or value < 9.95 else f"{value:.0f}{_UNITS[power]}"


def format_rate(rate: int | None, *, detail: bool = False) -> str:
    """Format bytes per second: `1.2Mi/s`."""
    return MISSING if rate is None else f"{format_size(rate, detail=detail)}/s"


def share(used: int | None, total: int | None) -> float | None:
    """Return the share of a total in percent, or None if one of them is unknown or there is no total."""
    return None if used is None or not total else 100 * used / total


def format_share(percent: float | None, *, detail: bool = False) -> str:
    """Format a share as whole percent, rounded down: `9%`; with `detail` `9.4%`."""
    if percent is None:
        return MISSING
    return f"{percent:.1f}%" if detail else f"{int(percent)}%"


_BARS = "▁▂▃▄▅▆▇█"
_KILL = "✗"


def memory_sparkline(curve: ContainerMemoryCurve, slot_seconds: float, limit: int | None = None) -> str:
    """Return the memory of the last minutes in one line: bars up to the limit or the largest sample.

    A slot with an OOM kill is a cross, one without a sample is blank. `limit` is that of the manifest.
    """
    known = [size for size in curve.sizes if size > 0]
    kills = sum(max(0, kill) for kill in curve.kills)
    if not known and not kills:
        return ""
    limit = curve.limit or limit
    top = max([limit or 0, *known, 1])
    bars = []
    for size, killed in itertools.zip_longest(curve.sizes, curve.kills, fillvalue=0):
        if killed > 0:
            bars.append(_KILL)
        elif size > 0:
            bars.append(_BARS[min(size * len(_BARS) // top, len(_BARS) - 1)])
        else:
            bars.append(" ")
    facts = [f"{format_size(min(known))} to {format_size(max(known))}"] if known else []
    facts += [f"limit {format_size(limit)}"] if limit else []
    facts += [f"{kills} OOM kill{'s' if kills > 1 else ''} ({_KILL})"] if kills else []
    seconds = len(bars) * slot_seconds
    span = f"{seconds / 60:.0f}m" if seconds >= 60 else f"{seconds:.0f}s"
    return f"{''.join(bars)} {', '.join(facts)}, last {span}"


def _total(amounts: Iterable[int | None]) -> int | None:
    """Return the sum of the known amounts, or None if none is known."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None
