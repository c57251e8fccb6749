"""The agent as a node of a real cluster: pods through the API server against the same by bare CRI calls.

Times are those that a user sees: from the request to the API server to its watch saying that the pod is
Running, or gone. The floor is measured on the same runtime before and after each of several rounds, and the
middle of the rounds' ratios counts: neighbours of such machines take a tenth of the processor at times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from bench.floor import Times, measure_floor
from bench.node import bare_runtime, data_dir
from bench.plane import Agent, audit_mark, control_plane, pod_writes
from bench.processes import Cost, cost_over, cpu_seconds
from bench.results import Result
from bench.watched_pods import WatchedPods, watched_pods
from pykubelet.devcluster.binaries import Binaries, find_programs
from pykubelet.devcluster.cluster import DevCluster
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.standalone.instance import Instance

_SINGLES = 7
"""A single pod is over in a fifth of a second: the middle of several counts."""
_ROUNDS = 5
_RESTARTED = 110
_SETTLE = 5.0
_QUIET = 15.0
"""How long after a restart statuses could still be sent: longer than any batching or resync."""


@dataclass(frozen=True, slots=True)
class Floors:
    """The same by bare CRI calls."""

    one: float
    many: Times


@dataclass(frozen=True, slots=True)
class Round:
    """Many pods, started and stopped once."""

    many: Times
    cpu: float
    """The agent's processor time for both, in seconds."""


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """What an agent did and what it cost."""

    first_ready: float
    one: float
    many: Times
    start_cpu: float
    stop_cpu: float
    held: Cost
    writes_per_pod: float
    ready_again: float
    status_writes: int


def cluster(count: int, hold_seconds: float, *, reference: bool) -> list[Result]:
    """Measure; with `reference`, the reference kubelet, too, for comparison."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     cluster mode is not measured: {err}")
        return []
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        least = asyncio.run(measure_floor(Instance.at(path), image, count, plain=True))
        floors = [_floors(path, image, count)]
        run = _measure(plane, path, image, count, hold_seconds, None)
        rounds = [Round(run.many, run.start_cpu + run.stop_cpu)]
        floors.append(_floors(path, image, count))
        for number in range(1, _ROUNDS):
            rounds.append(_again(plane, path, image, count, number))
            floors.append(_floors(path, image, count))
    print(f"     the least that a runtime takes, {count} pods: all running {least.all_running:.2f} s")
    for before, floor in enumerate(floors):
        _tell(f"floor {before}", floor.one, floor.many)
        if before < len(rounds):
            _tell(f"agent {before}", run.one, rounds[before].many)
    _tell_run("the agent", run)
    if reference:
        _compare(programs, count, hold_seconds)
    one = statistics.mean((floors[0].one, floors[1].one))
    ratios = [
        taken.many.over(before.many.mean(after.many))
        for taken, before, after in zip(rounds, floors[:-1], floors[1:], strict=True)
    ]
    many = Times(*(statistics.median(values) for values in zip(*map(astuple, ratios), strict=True)))
    return [
        Result("cluster: from start to Ready", run.first_ready, "s", 5),
        Result("cluster: one pod, created to Running", run.one / one, "x floor", 1.4),
        Result(f"cluster: {count} pods, all Running", many.all_running, "x floor", 1.25),
        Result(f"cluster: {count} pods, median", many.median_start, "x floor", 1.4),
        Result(f"cluster: {count} pods, all deleted", many.all_deleted, "x floor", 1.3),
        Result(
            "cluster: the agent's processor, start and stop",
            statistics.median(taken.cpu for taken in rounds),
            "s",
            count / 20,
        ),
        Result(f"cluster: {count} pods held: processor", run.held.cpu_percent, "% of core", 1),
        Result(f"cluster: {count} pods held: memory (PSS)", run.held.pss_mb, "MB", 85),
        Result("cluster: API writes per pod until Running", run.writes_per_pod, "writes", 5.99),
        Result(f"cluster: restart with {_RESTARTED} pods, Ready again", run.ready_again, "s", 5),
        Result(f"cluster: restart with {_RESTARTED} pods, status writes", run.status_writes, "writes", 0),
    ]


def _compare(programs: Binaries, count: int, hold_seconds: float) -> None:
    if programs.kubelet is None:
        print("     there is no reference kubelet to compare with")
        return
    with (
        undo_host_changes(),
        data_dir() as path,
        bare_runtime(path) as image,
        control_plane(programs) as plane,
    ):
        _tell_run("the reference", _measure(plane, path, image, count, hold_seconds, programs.kubelet))


def _floors(path: Path, image: str, count: int) -> Floors:
    instance = Instance.at(path)
    singles = [asyncio.run(measure_floor(instance, image, 1)).all_running for _ in range(_SINGLES)]
    return Floors(statistics.median(singles), asyncio.run(measure_floor(instance, image, count)))


def _measure(
    plane: DevCluster, path: Path, image: str, count: int, hold_seconds: float, program: Path | None
) -> ClusterRun:
    agent = Agent(plane, Instance.at(path), program)
    try:
        first_ready = agent.start()
        with watched_pods(plane) as pods:
            time.sleep(_SETTLE)
            one = statistics.median(_single(pods, image, f"one-{number}") for number in range(_SINGLES))
            names = [f"many-{number}" for number in range(count)]
            mark, before = audit_mark(plane), cpu_seconds(agent.pid)
            began = pods.create(image, names)
            started = [when - began for when in pods.wait_running(names)]
            # What was put off while pods were starting or ending (events) is part of the price.
            time.sleep(_SETTLE)
            start_cpu, writes = cpu_seconds(agent.pid) - before, len(pod_writes(plane, mark))
            held = cost_over(agent.pid, hold_seconds)
            before = cpu_seconds(agent.pid)
            began = pods.delete(names)
            deleted = max(pods.wait_gone(names)) - began
            time.sleep(_SETTLE)
            stop_cpu = cpu_seconds(agent.pid) - before
            ready_again, status_writes = _restart(plane, agent, pods, image)
    finally:
        agent.stop()
    times = Times(max(started), statistics.median(started), deleted)
    return ClusterRun(
        first_ready, one, times, start_cpu, stop_cpu, held, writes / count, ready_again, status_writes
    )


def _again(plane: DevCluster, path: Path, image: str, count: int, number: int) -> Round:
    """Start and stop many pods with an agent of its own."""
    agent = Agent(plane, Instance.at(path))
    names = [f"again-{number}-{one}" for one in range(count)]
    try:
        agent.start()
        with watched_pods(plane) as pods:
            time.sleep(_SETTLE)
            before = cpu_seconds(agent.pid)
            began = pods.create(image, names)
            started = [when - began for when in pods.wait_running(names)]
            time.sleep(_SETTLE)
            began = pods.delete(names)
            deleted = max(pods.wait_gone(names)) - began
            time.sleep(_SETTLE)
            cpu = cpu_seconds(agent.pid) - before
    finally:
        agent.stop()
    return Round(Times(max(started), statistics.median(started), deleted), cpu)


def _single(pods: WatchedPods, image: str, name: str) -> float:
    began = pods.create(image, [name])
    (running,) = pods.wait_running([name])
    pods.delete([name])
    pods.wait_gone([name])
    # Its sandbox is removed after its object.
    time.sleep(0.5)
    return running - began


def _restart(plane: DevCluster, agent: Agent, pods: WatchedPods, image: str) -> tuple[float, int]:
    names = [f"stays-{number}" for number in range(_RESTARTED)]
    pods.create(image, names)
    pods.wait_running(names)
    time.sleep(_SETTLE)
    agent.stop()
    mark = audit_mark(plane)
    ready = agent.start()
    time.sleep(_QUIET)
    sent = [event for event in pod_writes(plane, mark) if event["objectRef"]["resource"] == "pods"]
    pods.delete(names)
    pods.wait_gone(names)
    return ready, len(sent)


def _tell(who: str, one: float, many: Times) -> None:
    print(
        f"     {who}: one pod {one:.2f} s; many: all running {many.all_running:.2f} s, "
        f"median {many.median_start:.2f} s, all deleted {many.all_deleted:.2f} s",
        flush=True,
    )


def _tell_run(who: str, run: ClusterRun) -> None:
    _tell(who, run.one, run.many)
    held = run.held
    print(
        f"     {who}: Ready after {run.first_ready:.2f} s; processor {run.start_cpu:.2f} s for the start, "
        f"{run.stop_cpu:.2f} s for the stop, {held.cpu_percent:.2f} % held; "
        f"PSS {held.pss_mb:.0f} MB of RSS {held.rss_mb:.0f} MB; {run.writes_per_pod:.1f} writes per pod; "
        f"restarted with {_RESTARTED} pods: Ready after {run.ready_again:.2f} s, "
        f"{run.status_writes} status writes",
        flush=True,
    )
