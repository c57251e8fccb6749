"""Prober: runs the startup, readiness and liveness probes of all containers on their schedule.

The pod syncer calls `add_pod`, `remove_pod` and, with each observed state, `observe`. A probe runs while
its container runs, after the initial delay and, except for startup probes, after the container has started.
One task sleeps until the next probe is due and starts a limited number of them at a time, which keeps the
event loop responsive; each worker has at most one run in progress. `results` holds the results after
thresholds.

The schedule is a heap. Measured against one sleeping task per probe (5000 probes, one per second each,
uvloop): 166 instead of 2000 bytes per probe and 13 instead of 16 µs per run; and only a common schedule can
bound how many start concurrently. Operations cost O(log n). Moving or removing an entry leaves a stale one
behind that is skipped later; stale entries are removed when they outnumber the live ones by more than a few.

Timing, in seconds of the event loop's clock:

- A container that is not ready, or not known to have started, is probed immediately after the initial delay
  and, until it passes, again after 0.5, 1.5, 3.5 ... seconds, up to one period. In that first period a
  failure neither counts nor is reported: these *eager* probes only make a pod ready as early as possible, and
  the container still has its full `failureThreshold` x `periodSeconds`.
- The first liveness probe of a new container is in the second half of the first period: a container that has
  just been started must not fail before it can listen.
- Containers that are older than this kubelet process are probed at some point of the first period, so that a
  restart of the kubelet does not cause a burst of probes.
- After that, a probe runs once per period, at a fixed offset. The offset is a hash of pod, container and
  kind: the probes of pods that started together are spread, and the same probe behaves the same each time.
  All but the eager probes run at multiples of `BATCH_SECONDS`, together with others that are due.

All state is in memory; after a restart it begins with the pod's status (see `results.py`).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
import zlib
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Container, Pod, Probe
from pykubelet.logs import get_logger
from pykubelet.probes.custom import CustomProbes, selected_handler
from pykubelet.probes.metrics import Labels, ProbeMetrics, ProbeSeries
from pykubelet.probes.results import (
    ProbeState,
    ProbeUpdate,
    ResultsManager,
    health,
    initial_state,
    restored_state,
    step,
)
from pykubelet.probes.runner import Checker, ExecSlots, ExecSync, PreparedProbe, ProbeRun, default_slots
from pykubelet.probes.types import (
    KINDS,
    Health,
    Kind,
    ProbeHistory,
    ProbeParameters,
    ProbeResult,
    Report,
    RuntimeContainer,
    RuntimePod,
    Target,
    probe_of,
    probe_parameters,
    probed_containers,
)
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_success_log = log.v(3)
T = TypeVar("T", bound=Hashable)
_STALE_SLACK = 64


class Schedule(Generic[T]):
    """A priority queue of items by due time; each item is in it at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._live: dict[T, int] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def put(self, item: T, due: float) -> None:
        """Schedule an item, replacing its earlier due time."""
        self._numbers += 1
        self._live[item] = self._numbers
        heapq.heappush(self._heap, (due, self._numbers, item))
        self._compact()

    def remove(self, item: T) -> None:
        """Remove an item, if it is scheduled."""
        self._live.pop(item, None)
        self._compact()

    def next_due(self) -> float | None:
        """Return the earliest due time, or None if the schedule is empty."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float, limit: int) -> list[T]:
        """Remove and return items that are due, the longest overdue first."""
        due_items: list[T] = []
        while len(due_items) < limit:
            due = self.next_due()
            if due is None or due > now:
                break
            item = heapq.heappop(self._heap)[2]
            del self._live[item]
            due_items.append(item)
        return due_items

    def _is_stale(self, entry: tuple[float, int, T]) -> bool:
        return self._live.get(entry[2]) != entry[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _STALE_SLACK:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)


BATCH_SECONDS = 0.125
"""Seconds between the times at which periodic probes run; a binary fraction, so that multiples are exact.

Most of the CPU time of a single probe is that of a process that has slept: its code and data are no longer in
the processor's caches. Probes that run together share it. Measured with 40 HTTP probes per second: 860 µs per
probe when each runs at a time of its own, 420 µs in batches of 1/16 s, 360 µs of 1/8 s, 300 µs of 1/4 s.
"""
FIRST_GAP = 0.5
"""Seconds between the first two eager probes; the gap doubles."""


@dataclass(frozen=True, slots=True)
class ProbeTick:
    """One scheduled run of a probe."""

    due: float
    earliest: float
    """Earliest time of the first run."""
    eager: bool = False


def probe_phase(uid: str, container_name: str, kind: Kind) -> float:
    """Return the offset of a probe in its period: from 0 up to 1, evenly distributed."""
    return zlib.crc32(f"{uid}/{container_name}/{kind}".encode()) / 2**32


def first_tick(
    parameters: ProbeParameters, earliest: float, phase: float, *, eager: bool, older: bool
) -> ProbeTick:
    """Return the first run of a probe.

    `earliest` is now or later: the initial delay has passed then and, except for startup probes, the
    container has started. `older`: the container is older than this kubelet process.
    """
    if eager:
        return ProbeTick(earliest, earliest, eager=True)
    return ProbeTick(
        earliest + (phase * parameters.period if older else _later_half(phase, parameters)), earliest
    )


def next_tick(
    tick: ProbeTick, parameters: ProbeParameters, passed: bool, now: float, phase: float
) -> ProbeTick:
    """Return the run after a result; never in the past, so that runs do not pile up behind a slow one."""
    if not tick.eager:
        return ProbeTick(max(tick.due + parameters.period, now), tick.earliest)
    if passed:
        return ProbeTick(max(tick.due + _later_half(phase, parameters), now), tick.earliest)
    end = tick.earliest + parameters.period
    due = max(tick.due + (tick.due - tick.earliest) + FIRST_GAP, now)
    return ProbeTick(due, tick.earliest, eager=True) if due < end else ProbeTick(max(end, now), tick.earliest)


def aligned(due: float) -> float:
    """Return the next time at which periodic probes run; see BATCH_SECONDS."""
    return math.ceil(due / BATCH_SECONDS) * BATCH_SECONDS


def _later_half(phase: float, parameters: ProbeParameters) -> float:
    return parameters.period * (0.5 + phase / 2)


@dataclass(slots=True, eq=False)
class ProbeWorker:
    """One probe of a container, with its state for the container that runs now."""

    kind: Kind
    probe: Probe
    parameters: ProbeParameters
    phase: float
    labels: Labels
    state: ProbeState
    series: ProbeSeries | None = None
    prepared: PreparedProbe | None = None
    """The probe of the container that was probed last, at its address."""
    tick: ProbeTick | None = None
    """Next run; None while the probe is not scheduled."""
    run: ProbeRun | None = None
    """The run in progress."""
    passes: int = 1
    """Whether each of the last `MAX_RESULTS` runs passed: one bit per run, the last one lowest, below a 1."""
    last_run: float = 0.0
    """End of the last run, in seconds since the epoch."""
    seconds: float = 0.0
    """Duration of the last run."""
    failure: str = ""
    """Output of the last failed run, shortened."""


@dataclass(slots=True, eq=False)
class ProbedContainer:
    """A container with its probes, as last observed in the runtime."""

    pod: Pod
    container: Container
    workers: dict[Kind, ProbeWorker]
    container_id: str = ""
    running: bool = False
    ip: str = ""
    start_time: float = 0.0
    """Start time of the container, in loop time."""
    older: bool = False
    """Whether the container is older than this kubelet process."""


def probed_container(pod: Pod, container: Container, *, terminating: bool) -> ProbedContainer | None:
    """Return a container with its probes, None without any; of a terminating pod only readiness."""
    workers: dict[Kind, ProbeWorker] = {}
    for kind in KINDS:
        probe = probe_of(container, kind)
        if probe is not None and (kind == "readiness" or not terminating):
            labels = Labels(kind, container.name, pod.metadata.name, pod.metadata.namespace, pod.uid)
            phase = probe_phase(pod.uid, container.name, kind)
            workers[kind] = ProbeWorker(
                kind, probe, probe_parameters(probe), phase, labels, initial_state(kind)
            )
    return ProbedContainer(pod, container, workers) if workers else None


async def _fail(err: Exception) -> None:
    """Fail the scope of this task."""
    raise err


GRACE_SECONDS = 10.0
"""Seconds by which a container must be older than the kubelet process: a just started one counts as new."""
SLACK_SECONDS = 0.001
"""Seconds by which a run may be early: event loops wake up to a clock tick before the due time."""
MAX_RESULTS = 20
"""Runs of each probe whose results are kept: together with the last output, less than 1 KiB per probe."""
_LAST_RESULTS = (1 << MAX_RESULTS) - 1
MAX_FAILURE = 200
"""Characters of the output that are kept."""
MAX_STARTS_PER_ITERATION = 16
"""Number of runs that are started before the event loop runs other tasks."""


class Prober:
    """The probes of all pods. No method but `run` blocks or waits; all are called on the event loop."""

    def __init__(
        self,
        exec_sync: ExecSync,
        report: Report,
        registry: CollectorRegistry,
        *,
        host_ip: Callable[[], str],
        clock: Callable[[], int] = time.time_ns,
        exec_slots: int | None = None,
        custom: CustomProbes | None = None,
        restores: bool = True,
    ) -> None:
        """Initialize with `host_ip` for pods with hostNetwork, and `clock` in nanoseconds since the epoch.

        Without `restores` containers that an earlier kubelet process started begin as new ones.
        """
        self._restores = restores
        self.results = ResultsManager()
        self._report = report
        self._metrics = ProbeMetrics(registry)
        self._checker = Checker(exec_sync, ExecSlots(exec_slots or default_slots()), custom)
        self._host_ip = host_ip
        self._clock = clock
        self._start_time = asyncio.get_running_loop().time()
        self._pods: dict[str, dict[str, ProbedContainer]] = {}
        self._schedule: Schedule[tuple[ProbedContainer, ProbeWorker]] = Schedule()
        self._wake = asyncio.Event()

    # Pods

    def add_pod(self, pod: Pod) -> None:
        """Start probing a pod's containers; idempotent, because probes are immutable."""
        if pod.uid in self._pods:
            return
        terminating = pod.metadata.deletion_timestamp is not None
        containers = {
            container.name: entry
            for container in probed_containers(pod)
            if (entry := probed_container(pod, container, terminating=terminating)) is not None
        }
        if containers:
            self._pods[pod.uid] = containers

    def remove_pod(self, uid: str) -> None:
        """Stop all probes of a pod and forget their results; idempotent."""
        for entry in self._pods.pop(uid, {}).values():
            self._stop_probes(entry, *KINDS)
            entry.running = False
            self.results.forget(entry.container_id)

    def stop_liveness_and_startup(self, uid: str) -> None:
        """Stop all but the readiness probes of a terminating pod; started containers stay started."""
        for entry in self._pods.get(uid, {}).values():
            self._stop_probes(entry, "liveness", "startup")
            self.results.forget(entry.container_id, "liveness")

    def cleanup(self, desired: Collection[str]) -> None:
        """Remove all pods whose UID is not in `desired`."""
        for uid in [uid for uid in self._pods if uid not in desired]:
            self.remove_pod(uid)

    def _stop_probes(self, entry: ProbedContainer, *kinds: Kind) -> None:
        for kind in kinds:
            worker = entry.workers.pop(kind, None)
            if worker is not None:
                self._unschedule(entry, worker)
                if worker.series is not None:
                    worker.series.remove()

    # Observed state

    def observe(self, pod: Pod, seen: RuntimePod) -> None:
        """Handle the observed state of a pod: start probes of new containers, stop those of exited ones."""
        ip = self._host_ip() if pod.spec.host_network else next(iter(seen.ips), "")
        for name, entry in self._pods.get(pod.uid, {}).items():
            found = seen.latest(name)
            entry.pod, entry.ip = pod, ip
            if found is not None and found.phase == "running":
                self._observe_running(entry, found)
            elif entry.running:
                entry.running = False
                for worker in entry.workers.values():
                    self._unschedule(entry, worker)

    def update_status(self, pod: Pod, seen: RuntimePod) -> dict[str, Health]:
        """Return `started` and `ready` for the pod's status, by container name."""
        entries = self._pods.get(pod.uid, {})

        def is_older(name: str, found: RuntimeContainer) -> bool:
            entry = entries.get(name)
            if entry is not None and entry.container_id == found.id:
                return entry.older
            return self._age(found) > self._own_age() + GRACE_SECONDS

        return health(pod, seen, self.results.get, is_older, restores=self._restores)

    def history(self, uid: str) -> list[ProbeHistory]:
        """Return the last results of the probes of a pod, of all its containers."""
        return [
            ProbeHistory(
                container=name,
                kind=worker.kind,
                passed=tuple(digit == "1" for digit in f"{worker.passes:b}"[1:]),
                last_run=worker.last_run,
                seconds=worker.seconds,
                failure=worker.failure,
            )
            for name, entry in self._pods.get(uid, {}).items()
            for worker in entry.workers.values()
        ]

    def _observe_running(self, entry: ProbedContainer, found: RuntimeContainer) -> None:
        if entry.container_id != found.id:
            self.results.forget(entry.container_id)
            age = self._age(found)
            entry.container_id = found.id
            entry.start_time = asyncio.get_running_loop().time() - age
            entry.older = age > self._own_age() + GRACE_SECONDS
            entry.running = False
            for kind in KINDS:
                self._initialize(entry, kind)
        if not entry.running:
            entry.running = True
            self._schedule_probes(entry)

    def _initialize(self, entry: ProbedContainer, kind: Kind) -> None:
        if probe_of(entry.container, kind) is None:
            return
        state = (
            restored_state(entry.pod, kind, entry.container.name, entry.container_id, entry.older)
            if self._restores
            else initial_state(kind)
        )
        self.results.set_initial(kind, entry.container_id, state.result)
        worker = entry.workers.get(kind)
        if worker is not None:
            self._unschedule(entry, worker)
            worker.state = state

    # Ages are compared, not times: a clock step must not make a container older than the kubelet process.

    def _age(self, found: RuntimeContainer) -> float:
        return max(self._clock() - found.started_at, 0) / 1e9

    def _own_age(self) -> float:
        return asyncio.get_running_loop().time() - self._start_time

    # Scheduling

    def _schedule_probes(self, entry: ProbedContainer) -> None:
        """Schedule the probes that may run and are not scheduled yet."""
        now = asyncio.get_running_loop().time()
        startup = self.results.get("startup", entry.container_id)
        started = entry.container.startup_probe is None or startup == "success"
        for worker in entry.workers.values():
            if worker.tick is not None or worker.state.held or (worker.kind == "startup") == started:
                continue
            worker.tick = first_tick(
                worker.parameters,
                max(now, entry.start_time + worker.parameters.delay),
                worker.phase,
                eager=worker.state.result == ("unknown" if worker.kind == "startup" else "failure"),
                older=entry.older,
            )
            self._put(entry, worker)

    def _put(self, entry: ProbedContainer, worker: ProbeWorker) -> None:
        assert worker.tick is not None
        due = worker.tick.due if worker.tick.eager else aligned(worker.tick.due)
        before = self._schedule.next_due()
        self._schedule.put((entry, worker), due)
        if before is None or due < before:
            self._wake.set()

    def _unschedule(self, entry: ProbedContainer, worker: ProbeWorker) -> None:
        worker.tick = None
        self._schedule.remove((entry, worker))
        if worker.run is not None:
            worker.run.cancel()
            worker.run = None

    # Running

    async def run(self) -> None:
        """Run the probes until cancelled."""
        loop = asyncio.get_running_loop()
        async with TaskScope() as runs:
            try:
                while True:
                    soon = loop.time() + SLACK_SECONDS
                    for entry, worker in self._schedule.pop_due(soon, MAX_STARTS_PER_ITERATION):
                        self._start_probe(entry, worker, runs)
                    due = self._schedule.next_due()
                    if due is not None and due <= soon:
                        await asyncio.sleep(0)
                        continue
                    self._wake.clear()
                    timer = loop.call_at(due, self._wake.set) if due is not None else None
                    await self._wake.wait()
                    if timer is not None:
                        timer.cancel()
            finally:
                self._checker.exchanges.close()

    def _start_probe(self, entry: ProbedContainer, worker: ProbeWorker, runs: TaskScope) -> None:
        tick, start_time = worker.tick, asyncio.get_running_loop().time()
        prepared = worker.prepared
        if prepared is None or not prepared.is_for(entry.container_id, entry.ip):
            custom = selected_handler(entry.pod, entry.container.name, worker.kind, worker.probe)
            target = Target(entry.container, entry.container_id, entry.ip, custom)
            prepared = worker.prepared = PreparedProbe(worker.probe, target, self._checker)

        def handle(outcome: ProbeResult) -> None:
            if tick is None or tick is not worker.tick:  # the probe was stopped or rescheduled
                return
            worker.run = None
            seconds = asyncio.get_running_loop().time() - start_time
            try:
                self._handle_result(entry, worker, tick, outcome, seconds)
            except Exception as err:
                # Not in a task: without this, the probe would just not run again.
                runs.start(_fail(err), name="probe-failure")

        worker.run = prepared.start(lambda work: runs.start(work, name=f"probe-{worker.kind}"), handle)

    def _handle_result(
        self,
        entry: ProbedContainer,
        worker: ProbeWorker,
        tick: ProbeTick,
        outcome: ProbeResult,
        seconds: float,
    ) -> None:
        """Handle a result; listeners are notified last, because they may change the schedule."""
        counts = outcome.passed or not tick.eager
        result = None
        self._keep_result(worker, outcome, seconds)
        if not outcome.errored:
            if worker.series is None:
                worker.series = self._metrics.series(worker.labels)
            worker.series.observe(passed=outcome.passed, seconds=seconds)
            if counts:
                worker.state, result = step(worker.state, outcome.passed, worker.kind, worker.parameters)
        worker.tick = None
        if not worker.state.held:
            now = asyncio.get_running_loop().time()
            worker.tick = next_tick(tick, worker.parameters, outcome.passed, now, worker.phase)
            self._put(entry, worker)
        if result is not None:
            self.results.publish(
                ProbeUpdate(entry.pod.uid, entry.container.name, entry.container_id, worker.kind, result)
            )
            if entry.running:
                self._schedule_probes(entry)
        if counts:
            self._report_result(entry, worker, outcome)

    def _keep_result(self, worker: ProbeWorker, outcome: ProbeResult, seconds: float) -> None:
        passes = worker.passes << 1 | outcome.passed
        worker.passes = passes if passes < 2 << MAX_RESULTS else passes & _LAST_RESULTS | 1 << MAX_RESULTS
        worker.last_run, worker.seconds = self._clock() / 1e9, seconds
        if not outcome.passed:
            worker.failure = outcome.output[:MAX_FAILURE]

    def _report_result(self, entry: ProbedContainer, worker: ProbeWorker, outcome: ProbeResult) -> None:
        if outcome.result == "success" and not outcome.errored and not _success_log:
            return
        what = worker.kind.title()
        where = {"pod": entry.pod.full_name, "podUID": entry.pod.uid, "containerName": entry.container.name}
        if outcome.errored:
            message = f"{what} probe errored and resulted in {outcome.result} state: {outcome.output}"
            log.v(1).info("Probe errored", probeType=what, **where, err=outcome.output)
            self._report(entry.pod, entry.container.name, "Unhealthy", message)
        elif outcome.result == "failure":
            log.v(1).info("Probe failed", probeType=what, **where, output=outcome.output)
            self._report(
                entry.pod, entry.container.name, "Unhealthy", f"{what} probe failed: {outcome.output}"
            )
        elif outcome.result == "warning":
            log.v(3).info("Probe succeeded with a warning", probeType=what, **where, output=outcome.output)
            self._report(
                entry.pod, entry.container.name, "ProbeWarning", f"{what} probe warning: {outcome.output}"
            )
        else:
            _success_log.info("Probe succeeded", probeType=what, **where)
