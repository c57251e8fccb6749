"""Collector: samples the cgroups of the node, its pods and their containers, and keeps the latest samples.

Each cgroup is a `Target`. The caller sets the targets of the node once, those of a pod whenever they change,
and those that a search has found below them; the collector does not search the cgroup tree itself. Usage is
sampled once per housekeeping interval and target, and that of an idle cgroup less often, as upstream's
cAdvisor does (`sample_interval`). The targets are spread over the interval, and one turn of the event loop
samples for a few milliseconds at most. A new target is sampled within a second, and a second time before a
whole interval has passed, so that its processor usage is known early.

From their second sample on, the containers of a pod are sampled right after the pod's own cgroup, whose
counters include theirs: while these stay the same, so do those of the containers, and they are not read.

Details are read when a client asks (`refresh_details`), unless those that exist are younger than an interval;
a client that needs only the network and the number of processes asks for these (`refresh_summary`). Both are
read in a thread: counting the open files of a container's processes takes as long as the container wants.

A cgroup that does not exist (its container has just been created, or has exited) has no record. The collector
tries again, less and less often, until its owner removes the target.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from pykubelet.logs import get_logger
from pykubelet.stats.cached_call import SharedWork
from pykubelet.stats.cgroups.readers import CgroupReader
from pykubelet.stats.memory_curve import SLOTS, MemoryCurve
from pykubelet.stats.processes import ProcessScan
from pykubelet.stats.sampler import DetailedSample, Sampler, SummarySample, sample_interval, was_idle
from pykubelet.stats.samples import (
    UNLIMITED,
    CgroupError,
    CgroupGone,
    ContainerMemoryCurve,
    Limits,
    MemoryCurves,
    Record,
    Target,
    Usage,
)
from pykubelet.util.backoff import exponential_delay
from pykubelet.util.tasks import TaskScope, finish_in_thread, seconds_to_tick

log = get_logger(__name__)
R = TypeVar("R")
NODE = ""
"""Owner of the targets that belong to no pod."""
NESTED = "nested"
"""Owner of the targets that were found by a search, below those of containers and of the node."""
TICK_SECONDS = 1.0
SLICE_SECONDS = 0.003
"""Seconds of sampling in one turn of the event loop."""
_LIMITS_EVERY = 18
"""Limits are read with so many samples of usage, when the targets of their owner change, and with details."""
_MIN_RATE_SHARE = 0.1
"""Share of the interval that a processor usage covers at least."""
_CURVE_SECONDS = 600.0
"""Time that a memory curve covers at least."""
_DETAILS_BATCH, _SUMMARY_BATCH = 16, 64
"""Cgroups that are read in one call of a thread; for a summary hardly anything is read of most of them."""
_SUMMARY_KINDS = ("root", "sandbox", "container")
"""Targets with a network or a number of processes."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A target, and its cgroup while it exists."""

    target: Target
    sampler: Sampler | None = None
    record: Record | None = None
    rate_start: Usage | None = None
    """Sample from which on the next processor usage is computed."""
    curve: MemoryCurve | None = None
    """Memory of the last minutes, of a container."""
    samples: int = 0
    idle_samples: int = 0
    """Samples in sequence that were equal to the one before."""
    has_new_limits: bool = False
    """Whether the limits may have changed."""
    failures: int = 0
    follows: bool = False
    """Whether the cgroup is sampled with its pod's, and has no due time of its own."""
    removed: bool = False


def nano_cores(previous: Usage | None, usage: Usage) -> int | None:
    """Return the processor usage between two samples in nanoseconds per second.

    None if it is unknown: there is one sample only, or a counter has decreased because the cgroup was
    replaced, or the clock was set back.
    """
    if previous is None or usage.time <= previous.time or usage.cpu < previous.cpu:
        return None
    return round((usage.cpu - previous.cpu) / (usage.time - previous.time))


def _read_batch(
    batch: Sequence[tuple[Sampler, Usage | None]], read: Callable[[Sampler, Usage | None], R]
) -> list[R | CgroupError]:
    """Read some cgroups, whose last samples are given. Blocks."""
    readings: list[R | CgroupError] = []
    for sampler, sampled in batch:
        try:
            readings.append(read(sampler, sampled))
        except CgroupError as err:
            readings.append(err)
    return readings


class Collector:
    """Latest samples of all targets; `run` samples them."""

    def __init__(
        self,
        open_cgroup: Callable[[str], CgroupReader],
        tasks: TaskScope,
        interval: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize; `open_cgroup` returns the reader of a cgroup path, and raises CgroupGone.

        Details are read in `tasks`.
        """
        self._open = open_cgroup
        self._interval = interval
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        """Entries by cgroup path."""
        self._owned: dict[str, tuple[str, ...]] = {}
        """Paths by owner: the uid of a pod, or `NODE`."""
        self._curves: dict[str, dict[str, MemoryCurve]] = {}
        """Memory curves by owner and name of the container."""
        self._slot_seconds = max(interval, _CURVE_SECONDS / SLOTS)
        self._due: list[tuple[float, int, _Entry]] = []
        self._ties = itertools.count()
        self._sorted: list[Record] | None = None
        self._in_thread: set[Sampler] = set()
        """Samplers whose details a thread reads; the event loop must neither read nor close them."""
        self._listeners: list[Callable[[Record], None]] = []
        self._reading = SharedWork("statistics-details", tasks)
        self._reading_what = ""

    @property
    def interval(self) -> float:
        """Seconds between two samples of a target."""
        return self._interval

    def add_listener(self, listener: Callable[[Record], None]) -> None:
        """Add a listener for every sample of usage from now on; it must not block."""
        self._listeners.append(listener)

    def set_targets(self, owner: str, targets: Iterable[Target]) -> None:
        """Replace the targets of an owner; a cgroup that stays keeps its samples."""
        new = {target.path: target for target in targets}
        for path in self._owned.get(owner, ()):
            if path not in new:
                self._remove(path)
        for path, target in new.items():
            entry = self._entries.get(path)
            if entry is None:
                entry = self._entries[path] = _Entry(target)
                if target.kind == "container":
                    entry.curve = self._curve(owner, target.container)
                self._schedule(entry, 0.0)
                continue
            entry.has_new_limits = True
            if entry.target != target:
                entry.target = target
                if entry.record is not None:
                    entry.record.target = target
        if new:
            self._owned[owner] = tuple(new)
        else:
            self._owned.pop(owner, None)
            self._curves.pop(owner, None)

    def targets(self) -> Iterator[Target]:
        """Yield all targets, also those whose cgroups do not exist yet."""
        return (entry.target for entry in self._entries.values())

    def targets_of(self, owner: str) -> Iterator[Target]:
        """Yield the targets of an owner."""
        return (self._entries[path].target for path in self._owned.get(owner, ()))

    def owners(self) -> Iterable[str]:
        """Return the owners that have targets."""
        return self._owned.keys()

    def records(self) -> Sequence[Record]:
        """Return the records of all cgroups that exist, by path; the caller must not change them."""
        if self._sorted is None:
            records = (entry.record for entry in self._entries.values())
            self._sorted = sorted(
                (record for record in records if record is not None), key=lambda record: record.target.path
            )
        return self._sorted

    def record(self, path: str) -> Record | None:
        """Return the record of a cgroup, if it exists."""
        entry = self._entries.get(path)
        return entry.record if entry is not None else None

    def records_of(self, owner: str) -> Iterator[Record]:
        """Yield the records of an owner."""
        for path in self._owned.get(owner, ()):
            if (record := self._entries[path].record) is not None:
                yield record

    def count_oom(self, path: str) -> None:
        """Count an out-of-memory kill because of the limit of a cgroup."""
        entry = self._entries.get(path)
        if entry is not None and entry.record is not None:
            entry.record.oom_events += 1

    def count_oom_in_container(self, owner: str, container: str) -> None:
        """Count an out-of-memory kill of a process of a container in its memory curve.

        The container may be too young to have a target; then its owner has one, or gets an empty entry, which
        is removed as that of any other owner.
        """
        if container:
            self._owned.setdefault(owner, ())
            self._curve(owner, container).add_kill(int(self._clock() / self._slot_seconds))

    def find_target(self, path: str) -> Target | None:
        """Return the target of a cgroup, or of the nearest cgroup above it, that belongs to a pod."""
        while path:
            entry = self._entries.get(path)
            if entry is not None and entry.target.pod_uid:
                return entry.target
            path = path.rpartition("/")[0]
        return None

    def memory_curves(self, owner: str) -> MemoryCurves:
        """Return the memory of the containers of a pod in the last minutes."""
        limits = {
            record.target.container: record.limits.memory_limit
            for record in self.records_of(owner)
            if record.target.kind == "container" and 0 < record.limits.memory_limit < UNLIMITED
        }
        slot = int(self._clock() / self._slot_seconds)
        return MemoryCurves(
            slot_seconds=self._slot_seconds,
            containers=[
                ContainerMemoryCurve(name, limits.get(name), *curve.read(slot))
                for name, curve in self._curves.get(owner, {}).items()
            ],
        )

    def close(self) -> None:
        """Close the files of all cgroups."""
        for path in list(self._entries):
            self._remove(path)
        self._owned.clear()
        self._curves.clear()

    async def run(self, update_targets: Callable[[], None] = lambda: None) -> None:
        """Sample until cancelled; `update_targets` is called before each round, and sets changed targets."""
        try:
            while True:
                update_targets()
                await self.sample_due()
                await asyncio.sleep(seconds_to_tick(min(TICK_SECONDS, self._interval)))
        finally:
            await self._reading.wait()
            self.close()

    async def sample_due(self) -> None:
        """Sample the usage of the targets that are due."""
        loop = asyncio.get_running_loop()
        now = slice_start = loop.time()
        while self._due and self._due[0][0] <= now:
            _, _, entry = heapq.heappop(self._due)
            if entry.removed:
                continue
            self._sample(entry)
            if loop.time() - slice_start > SLICE_SECONDS:
                await asyncio.sleep(0)
                slice_start = loop.time()

    def sample_now(self, paths: Iterable[str]) -> None:
        """Sample the usage of a few targets immediately, for a caller that cannot wait for the next sample.

        Nothing of an earlier sample is reused. A target whose details a thread reads is skipped: it is being
        sampled. Blocks briefly.
        """
        for path in paths:
            entry = self._entries.get(path)
            if entry is None or entry.sampler in self._in_thread:
                continue
            try:
                self._read_usage(entry, fresh=True)
            except CgroupError:
                self._drop(entry)  # the next regular sample logs it, if it is still so

    async def refresh_details(self) -> None:
        """Read the details of all records whose details are older than an interval.

        Concurrent callers wait for one pass; a caller that is cancelled does not end it.
        """
        await self._refresh("details", lambda record: record.details_time, self._read_details)

    async def refresh_summary(self) -> None:
        """Read networks and numbers of processes that are older than an interval, as `refresh_details`."""

        def time_of(record: Record) -> float:
            return record.summary_time if record.target.kind in _SUMMARY_KINDS else math.inf

        await self._refresh("summary", time_of, self._read_summaries)

    async def _refresh(
        self,
        what: str,
        time_of: Callable[[Record], float],
        read: Callable[[Sequence[_Entry]], Coroutine[Any, Any, None]],
    ) -> None:
        while True:
            oldest = self._clock() - self._interval
            due = [
                entry
                for entry in self._entries.values()
                if entry.record is not None and time_of(entry.record) <= oldest
            ]
            if not due:
                return
            if self._reading.in_progress and self._reading_what != what:
                await self._reading.wait()  # only one thread may use a sampler
                continue
            self._reading_what = what
            await self._reading.run(partial(read, due))
            return

    def _curve(self, owner: str, container: str) -> MemoryCurve:
        """Return the memory curve of a container; it is created if it does not exist."""
        curves = self._curves.setdefault(owner, {})
        if container not in curves:
            curves[container] = MemoryCurve()
        return curves[container]

    def _schedule(self, entry: _Entry, delay: float) -> None:
        due = asyncio.get_running_loop().time() + delay
        heapq.heappush(self._due, (due, next(self._ties), entry))

    def _remove(self, path: str) -> None:
        entry = self._entries.pop(path)
        entry.removed = True
        self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Drop the record of a cgroup that does not exist, or cannot be read."""
        if entry.sampler is not None and entry.sampler not in self._in_thread:
            entry.sampler.close()
        if entry.record is not None:
            self._sorted = None
        entry.sampler = entry.record = entry.rate_start = None
        entry.samples = entry.idle_samples = 0
        if entry.target.kind == "pod":
            self._release_followers(entry)
        elif entry.follows and not entry.removed:
            entry.follows = False
            self._schedule(entry, TICK_SECONDS)

    def _sample(self, entry: _Entry) -> None:
        if entry.sampler in self._in_thread:
            self._schedule(entry, TICK_SECONDS)  # by then there is a new sample
            return
        before = entry.record.usage if entry.record is not None else None
        try:
            self._read_usage(entry)
        except CgroupError as err:
            self._fail(entry, err)
            return
        entry.failures = 0
        now = entry.record.usage if entry.record is not None else None
        is_idle = before is not None and now is not None and was_idle(before, now)
        entry.idle_samples = entry.idle_samples + 1 if is_idle else 0
        if entry.samples == 1:
            # The second sample comes early, and at a random time, which spreads the targets.
            self._schedule(entry, self._interval * random.uniform(0.2, 1.0))  # noqa: S311
            return
        if entry.target.kind == "pod":
            self._sample_followers(entry, before if is_idle else None)
        elif self._has_sampled_pod(entry):
            entry.follows = True
            return
        self._schedule(entry, sample_interval(self._interval, entry.idle_samples))

    def _has_sampled_pod(self, entry: _Entry) -> bool:
        """Return whether a cgroup is below that of its pod, and that is sampled."""
        pod = self._entries.get(entry.target.path.rpartition("/")[0])
        return pod is not None and pod.target.kind == "pod" and pod.record is not None and pod.samples > 1

    def _followers(self, pod: _Entry) -> Iterator[_Entry]:
        for path in self._owned.get(pod.target.pod_uid, ()):
            entry = self._entries.get(path)
            if entry is not None and entry.follows:
                yield entry

    def _sample_followers(self, pod: _Entry, same_since: Usage | None) -> None:
        """Sample the containers of a pod whose cgroup was just sampled.

        `same_since` is its previous sample if both are equal: no process has run in between.
        """
        assert pod.record is not None
        assert pod.record.usage is not None
        time = pod.record.usage.time
        for entry in list(self._followers(pod)):
            if entry.sampler is None or entry.sampler in self._in_thread:
                continue
            usage = entry.record.usage if entry.record is not None else None
            has_limits = not entry.has_new_limits and entry.samples % _LIMITS_EVERY != 0
            is_same = same_since is not None and usage is not None and same_since.time <= usage.time < time
            if is_same and usage is not None and has_limits:
                self._store(entry, msgspec.structs.replace(usage, time=time), None)
                continue
            try:
                self._read_usage(entry)
            except CgroupError as err:
                self._fail(entry, err)

    def _release_followers(self, pod: _Entry) -> None:
        """Have the containers of a pod without a cgroup sampled on their own."""
        for entry in list(self._followers(pod)):
            entry.follows = False
            self._schedule(entry, 0.0)

    def _fail(self, entry: _Entry, err: CgroupError) -> None:
        if not isinstance(err, CgroupGone):
            log.v(2).info("Failed to read cgroup", cgroup=entry.target.path, err=str(err))
        entry.follows = False
        self._drop(entry)
        entry.failures += 1
        self._schedule(entry, exponential_delay(TICK_SECONDS, self._interval, entry.failures))

    def _read_usage(self, entry: _Entry, *, fresh: bool = False) -> None:
        if entry.sampler is None:
            entry.sampler = Sampler(entry.target, self._open(entry.target.path))
        reader = entry.sampler.reader
        usage = reader.read_usage(fresh=fresh)
        limits = None
        if entry.has_new_limits or entry.samples % _LIMITS_EVERY == 0:
            limits, entry.has_new_limits = reader.read_limits(), False
        self._store(entry, usage, limits)

    def _store(self, entry: _Entry, usage: Usage, limits: Limits | None) -> None:
        """Store a sample, and compute the processor usage since an earlier one.

        Details may be read a moment after a sample. Over so short a time a process that runs just then would
        use a whole processor, so the usage that is known stays.
        """
        record = entry.record
        if record is None:
            assert limits is not None
            record = entry.record = Record(target=entry.target, limits=limits)
            self._sorted = None
        elif limits is not None:
            record.limits = limits
        start = entry.rate_start
        if (
            start is None
            or usage.cpu < start.cpu
            or not 0 <= usage.time - start.time < self._interval * _MIN_RATE_SHARE
        ):
            record.nano_cores = nano_cores(start, usage)
            entry.rate_start = usage
        record.usage = usage
        entry.samples += 1
        if entry.curve is not None:
            entry.curve.add(int(usage.time / self._slot_seconds), usage.working_set)
        for listener in self._listeners:
            listener(record)

    async def _read_details(self, due: Sequence[_Entry]) -> None:
        scan = ProcessScan()

        def store(entry: _Entry, reading: DetailedSample) -> None:
            if entry.record is None or reading.usage is not entry.record.usage:
                self._store(entry, reading.usage, reading.limits)
            record = entry.record
            assert record is not None
            record.details, record.details_time = reading.details, reading.usage.time
            record.network, record.network_time = reading.network, reading.network_time
            record.processes, record.summary_time = reading.details.processes, reading.usage.time

        await self._read_in_thread(
            due, _DETAILS_BATCH, lambda sampler, sampled: sampler.read_details(scan, sampled), store
        )

    async def _read_summaries(self, due: Sequence[_Entry]) -> None:
        now = self._clock()

        def store(entry: _Entry, reading: SummarySample) -> None:
            record = entry.record
            if record is not None:
                record.processes, record.summary_time = reading.processes, now
                record.network, record.network_time = reading.network, reading.network_time

        await self._read_in_thread(due, _SUMMARY_BATCH, Sampler.read_summary, store)

    async def _read_in_thread(
        self,
        due: Sequence[_Entry],
        size: int,
        read: Callable[[Sampler, Usage | None], R],
        store: Callable[[_Entry, R], None],
    ) -> None:
        """Read cgroups in a thread, in batches of a size, and store what was read."""
        for start in range(0, len(due), size):
            batch = [
                (entry, entry.sampler) for entry in due[start : start + size] if entry.sampler is not None
            ]
            self._in_thread.update(sampler for _, sampler in batch)
            readings: list[R | CgroupError] = []
            try:
                samplers = [
                    (sampler, entry.record.usage if entry.record is not None else None)
                    for entry, sampler in batch
                ]
                readings = await finish_in_thread(partial(_read_batch, samplers, read))
            finally:
                for entry, sampler in batch:
                    self._in_thread.discard(sampler)
                    if entry.sampler is not sampler:
                        sampler.close()  # it was dropped in the meantime
            for (entry, sampler), reading in zip(batch, readings, strict=True):
                if entry.sampler is not sampler:
                    continue
                if isinstance(reading, CgroupError):
                    self._drop(entry)  # the next sample finds out whether it exists again
                else:
                    store(entry, reading)
