"""History of the node and its pods for the page: rings of 32-bit floats with one value per slot.

The collector reports every sample (`Collector.add_listener`); a rate is computed from the previous sample of
the same cgroup. A series has a fixed size from its first value on, and the number of series is bounded: a pod
above the bound has no history. A pod's series are dropped with its samples (`forget`). Nothing is read or
scheduled here, so that the history of a page that no client watches costs nothing but these writes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from pykubelet.stats.samples import NetworkInterface, Record, Usage

SLOTS = 180
SLOT_SECONDS = 10.0
"""A series covers half an hour."""
MAX_SERIES = 2500
"""Series of all owners together: 2.2 MB."""
_EMPTY = array("f", [math.nan]) * SLOTS
NODE = ""
"""Owner of the node's series; the agent's own are `AGENT`."""
AGENT = "agent"


class Series:
    """A ring of the largest value of each slot; a slot without a value is not a number."""

    __slots__ = ("_slot", "_values")

    def __init__(self) -> None:
        self._values = _EMPTY[:]
        self._slot = 0

    def add(self, time: float, value: float) -> None:
        """Record a value."""
        slot = int(time / SLOT_SECONDS)
        if not self._slot - SLOTS < slot <= self._slot:
            self._advance(slot)
        index = slot % SLOTS
        if not self._values[index] > value:
            self._values[index] = value

    def read(self, now: float, slots: int = SLOTS) -> Sequence[float]:
        """Return the values of the last slots, oldest first.

        One missing slot repeats its predecessor, because samples do not arrive exactly once per slot. A time
        before the latest value is possible: the caller may have read the clock before it waited.
        """
        last = int(now / SLOT_SECONDS)
        oldest = self._slot - SLOTS
        values = [
            self._values[slot % SLOTS] if oldest < slot <= self._slot else math.nan
            for slot in range(last + 1 - slots, last + 1)
        ]
        for at in range(1, len(values)):
            if math.isnan(values[at]) and not math.isnan(values[at - 1]):
                if at + 1 < len(values) and math.isnan(values[at + 1]):
                    continue
                values[at] = values[at - 1]
        return values

    def _advance(self, slot: int) -> None:
        """Clear the slots until a new one; all of them if the clock was set back far."""
        ahead = slot - self._slot
        if not 0 < ahead < SLOTS:
            self._values[:] = _EMPTY
        else:
            for cleared in range(self._slot + 1, slot + 1):
                self._values[cleared % SLOTS] = math.nan
        self._slot = slot


class Key(NamedTuple):
    """Name of a series: of the node (no uid), of a pod, or of one of its containers."""

    uid: str
    container: str
    name: str
    """`cpu` in cores, `memory` and `network` in bytes, `throttled` and `pressure` as a share of the time."""


class _Last(NamedTuple):
    usage: Usage
    throttled: tuple[float, int] | None


class _Traffic(NamedTuple):
    time: float
    received: int
    sent: int


class History:
    """All series of the page."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._series: dict[Key, Series] = {}
        self._last: dict[str, _Last] = {}
        """Last sample by cgroup path, of cgroups that have series."""
        self._traffic: dict[str, _Traffic] = {}
        """Last counters of network interfaces by uid."""
        self._paths: dict[str, set[str]] = {}
        """Cgroup paths by uid of the pod."""

    def __len__(self) -> int:
        return len(self._series)

    def add(self, key: Key, time: float, value: float) -> None:
        """Record a value, unless the series is new and there are too many."""
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= self._max_series:
                return
            series = self._series[key] = Series()
        series.add(time, value)

    def read(self, key: Key, now: float, slots: int = SLOTS) -> Sequence[float] | None:
        """Return the values of a series, oldest first; None without a value."""
        series = self._series.get(key)
        return series.read(now, slots) if series is not None else None

    def handle_sample(self, record: Record) -> None:
        """Record a sample of the collector."""
        target, usage = record.target, record.usage
        if usage is None or target.kind not in ("root", "pod", "container", "sandbox"):
            return
        before = self._last.get(target.path)
        if before is None and len(self._last) >= self._max_series:
            return
        uid = target.pod_uid
        if target.kind != "sandbox":
            self._add_usage(
                Key(uid, target.container, ""), usage, before.usage if before is not None else None
            )
        throttled = _throttled(record) if target.kind == "container" else None
        if before is not None:
            self._add_throttled(Key(uid, target.container, "throttled"), before.throttled, throttled)
        elif uid:
            self._paths.setdefault(uid, set()).add(target.path)
        if target.kind == "sandbox" and record.network:
            self.handle_network(uid, record.network_time, record.network)
        self._last[target.path] = _Last(usage, throttled)

    def handle_network(self, uid: str, time: float, interfaces: Sequence[NetworkInterface]) -> None:
        """Record the counters of the interfaces of a pod, or of the node (no uid)."""
        own = list(own_interfaces(interfaces))
        now = _Traffic(time, sum(each.rx_bytes for each in own), sum(each.tx_bytes for each in own))
        before = self._traffic.get(uid)
        if before is None and len(self._traffic) >= self._max_series:
            return
        self._traffic[uid] = now
        if before is None or now.time <= before.time:
            return
        for name, old, new in (("received", before.received, now.received), ("sent", before.sent, now.sent)):
            if new >= old:
                self.add(Key(uid, "", name), now.time, (new - old) / (now.time - before.time))

    def forget(self, alive: Collection[str], sampled: Collection[str]) -> None:
        """Drop the series of all pods but those with these uids, and samples of other than these cgroups.

        A container that is restarted has another cgroup each time.
        """
        for paths in self._paths.values():
            for path in [path for path in paths if path not in sampled]:
                paths.discard(path)
                self._last.pop(path, None)
        for uid in [uid for uid in self._paths if uid not in alive]:
            for path in self._paths.pop(uid):
                self._last.pop(path, None)
            self._traffic.pop(uid, None)
        for key in [key for key in self._series if key.uid not in alive and key.uid not in (NODE, AGENT)]:
            del self._series[key]

    def _add_usage(self, key: Key, usage: Usage, before: Usage | None) -> None:
        now = usage.time
        self.add(key._replace(name="memory"), now, usage.working_set)
        if before is not None and usage.time > before.time and usage.cpu >= before.cpu:
            rate = (usage.cpu - before.cpu) / (usage.time - before.time) / 1e9
            self.add(key._replace(name="cpu"), now, rate)
        if not key.uid:
            for name, psi in _pressures(usage).items():
                self.add(key._replace(name=name), now, psi)

    def _add_throttled(
        self, key: Key, before: tuple[float, int] | None, now: tuple[float, int] | None
    ) -> None:
        if before is not None and now is not None and now[0] > before[0] and now[1] >= before[1]:
            self.add(key, now[0], (now[1] - before[1]) / (now[0] - before[0]) / 1e9)


def _pressures(usage: Usage) -> Mapping[str, float]:
    return {
        "pressure-cpu": usage.cpu_psi.some.avg10 / 100,
        "pressure-memory": usage.memory_psi.some.avg10 / 100,
        "pressure-io": usage.io_psi.some.avg10 / 100,
    }


def _throttled(record: Record) -> tuple[float, int] | None:
    return (record.details_time, record.details.throttled) if record.details is not None else None


def own_interfaces(interfaces: Sequence[NetworkInterface]) -> Iterator[NetworkInterface]:
    """Yield the interfaces that count: not the loopback, and no second time what a bridge of pods carries."""
    skipped = ("lo", "veth", "cni", "pyk", "docker", "br-", "virbr", "dummy")
    yield from (each for each in interfaces if not each.name.startswith(skipped))
