"""Cost per pod with many pods against few, on a node of a real cluster.

Few and many pods are started and stopped in turn, each time by a new kubelet process on the same runtime and
control plane. Processor time is compared per pod: it must not grow with the number of pods. The time until
all pods run is compared with bare CRI calls for as many pods, measured before and after each round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.floor import Times, measure_floor
from bench.node import bare_runtime, data_dir
from bench.plane import Agent, control_plane
from bench.processes import cpu_seconds, pss_mb
from bench.results import Result
from bench.watched_pods import watched_pods
from pykubelet.devcluster.binaries import find_programs
from pykubelet.devcluster.cluster import DevCluster
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.standalone.instance import Instance

_ROUNDS = 3
_SETTLE_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_QUIET_PERCENT = 3.0
"""Percent of a core below which a kubelet has sent the events and statuses that it had put off."""
_LONGEST_SECONDS = 120.0
"""Seconds after which a kubelet that does not become quiet is measured as it is."""


@dataclass(frozen=True, slots=True)
class Run:
    """One start and stop of a number of pods."""

    count: int
    times: Times
    start_cpu: float
    """Seconds of processor time from the first request until the kubelet is quiet again."""
    stop_cpu: float
    memory_kb: float
    """Growth of the kubelet's PSS per pod while all pods run, in kB."""

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of processor time per pod."""
        return 1000 * (self.start_cpu + self.stop_cpu) / self.count

    def __str__(self) -> str:
        return (
            f"{self.count} pods: {self.cpu_ms:.1f} ms of processor time per pod (of these "
            f"{1000 * self.stop_cpu / self.count:.1f} for the stop), "
            f"{self.memory_kb:.0f} kB of memory per pod; all running {self.times.all_running:.2f} s, "
            f"all deleted {self.times.all_deleted:.2f} s"
        )


def scale(few: int, many: int) -> list[Result]:
    """Measure few and many pods in turn."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     the cost per pod is not measured: {err}")
        return []
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        instance = Instance.at(path)
        floors = [asyncio.run(measure_floor(instance, image, many))]
        small, large = list[Run](), list[Run]()
        for number in range(_ROUNDS):
            for runs, count in ((small, few), (large, many)):
                runs.append(_run(plane, path, image, count, f"scale-{number}"))
                print(f"     {runs[-1]}", flush=True)
            floors.append(asyncio.run(measure_floor(instance, image, many)))
            print(f"     the floor, {many} pods: all running {floors[-1].all_running:.2f} s", flush=True)
    ratios = [
        run.times.over(before.mean(after))
        for run, before, after in zip(large, floors[:-1], floors[1:], strict=True)
    ]
    cpu_few, cpu_many = (statistics.median(run.cpu_ms for run in runs) for runs in (small, large))
    memory = statistics.median(run.memory_kb for run in large)
    running = statistics.median(ratio.all_running for ratio in ratios)
    print(f"     processor time per pod: {cpu_few:.1f} ms of {few} pods, {cpu_many:.1f} ms of {many} pods")
    return [
        Result(f"cluster: {many} pods, all Running", running, "x floor", 1.2),
        Result(f"cluster: processor per pod, {many} pods against {few}", cpu_many / cpu_few, "times", 1.1),
        Result(f"cluster: memory per pod, {many} pods", memory, "kB", 100),
    ]


def _run(plane: DevCluster, path: Path, image: str, count: int, prefix: str) -> Run:
    """Start and stop pods with a kubelet process of their own."""
    agent = Agent(plane, Instance.at(path))
    names = [f"{prefix}-{count}-{number}" for number in range(count)]
    try:
        agent.start()
        with watched_pods(plane) as pods:
            time.sleep(_SETTLE_SECONDS)
            before, memory = cpu_seconds(agent.pid), pss_mb(agent.pid)
            began = pods.create(image, names)
            started = [when - began for when in pods.wait_running(names)]
            _wait_quiet(agent.pid)
            start_cpu, memory = cpu_seconds(agent.pid) - before, pss_mb(agent.pid) - memory
            before = cpu_seconds(agent.pid)
            began = pods.delete(names)
            deleted = max(pods.wait_gone(names)) - began
            _wait_quiet(agent.pid)
            stop_cpu = cpu_seconds(agent.pid) - before
    finally:
        agent.stop()
    times = Times(max(started), statistics.median(started), deleted)
    return Run(count, times, start_cpu, stop_cpu, 1000 * memory / count)


def _wait_quiet(pid: int) -> None:
    """Wait until a kubelet has sent what it had put off while pods were starting or ending."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        before = cpu_seconds(pid)
        time.sleep(_LOOK_SECONDS)
        if cpu_seconds(pid) - before < _QUIET_PERCENT / 100 * _LOOK_SECONDS:
            return
