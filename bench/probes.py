"""What probes cost: pods with an HTTP readiness and an exec liveness probe, next to the reference kubelet.

Each kubelet is a node of a control plane and a runtime of its own, one after the other. The processor time
counted is that of the kubelet process alone, statistics and heartbeats included: the same pods without probes
are measured in `bench/stats.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.node import bare_runtime, data_dir
from bench.plane import Agent, control_plane
from bench.processes import Cost, cost_over, system_seconds
from bench.results import Result
from bench.watched_pods import watched_pods
from pykubelet.devcluster.binaries import Binaries, find_programs
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.standalone.instance import Instance

_SETTLE_SECONDS = 10.0
"""Seconds after the last pod is Ready: events are sent late, and the kubelets relist."""
_LONGEST_SECONDS = 40.0
"""Seconds over which the pods are held at most; a minute of each kubelet would only add time."""
_READINESS_SECONDS, _LIVENESS_SECONDS = 1, 5
_PORT = 8080
_SERVER = f"mkdir /tmp/www && echo ok > /tmp/www/index.html && exec httpd -f -p {_PORT} -h /tmp/www"
_CONTAINER = {
    "command": ["sh", "-c", _SERVER],
    "readinessProbe": {
        "httpGet": {"path": "/", "port": _PORT},
        "periodSeconds": _READINESS_SECONDS,
        "timeoutSeconds": 5,
    },
    "livenessProbe": {
        "exec": {"command": ["true"]},
        "periodSeconds": _LIVENESS_SECONDS,
        "timeoutSeconds": 10,
    },
}


@dataclass(frozen=True, slots=True)
class ProbesRun:
    """The cost of one kubelet while its pods are probed."""

    held: Cost
    system_percent: float
    """Percent of a core that was spent in the kernel."""


def probes(count: int, hold_seconds: float) -> list[Result]:
    """Measure probed pods with this kubelet and with the reference."""
    try:
        programs = find_programs(lambda text: print(f"     {text}", flush=True))
    except NotAvailable as err:
        print(f"     probes are not measured: {err}")
        return []
    seconds = min(hold_seconds, _LONGEST_SECONDS)
    ours = _measure(programs, None, count, seconds)
    _tell("the agent", count, ours)
    what = f"{count} probed pods held over {ours.held.seconds:.0f} s: processor"
    if programs.kubelet is None:
        print("     there is no reference kubelet to compare with")
        return [Result(what, ours.held.cpu_percent, "% of core", 4.2)]
    with undo_host_changes():
        reference = _measure(programs, programs.kubelet, count, seconds)
    _tell("the reference", count, reference)
    return [Result(what, ours.held.cpu_percent / reference.held.cpu_percent, "x reference", 0.6)]


def _measure(programs: Binaries, program: Path | None, count: int, seconds: float) -> ProbesRun:
    with data_dir() as path, bare_runtime(path) as image, control_plane(programs) as plane:
        agent = Agent(plane, Instance.at(path), program)
        names = [f"probed-{number}" for number in range(count)]
        try:
            agent.start()
            with watched_pods(plane) as pods:
                pods.create(image, names, **_CONTAINER)
                pods.wait_ready(names)
                time.sleep(_SETTLE_SECONDS)
                before = system_seconds(agent.pid)
                held = cost_over(agent.pid, seconds)
                system = system_seconds(agent.pid) - before
                _check_alive(plane.api.request("GET", "/api/v1/namespaces/default/pods")["items"])
        finally:
            agent.stop()
    return ProbesRun(held, 100 * system / held.seconds)


def _check_alive(pods: list[dict[str, Any]]) -> None:
    """Refuse a measurement in which probes failed: restarts would be measured instead."""
    statuses = [status for pod in pods for status in pod["status"]["containerStatuses"]]
    if any(status["restartCount"] or not status["ready"] for status in statuses):
        raise RuntimeError("probes failed during the measurement")


def _tell(who: str, count: int, run: ProbesRun) -> None:
    per_second = count / _READINESS_SECONDS + count / _LIVENESS_SECONDS
    print(
        f"     {who}, {count} pods, HTTP every {_READINESS_SECONDS} s and exec every {_LIVENESS_SECONDS} s: "
        f"{run.held.cpu_percent:.2f} % of a core (of these {run.system_percent:.2f} in the kernel), "
        f"{10 * run.held.cpu_percent / per_second:.2f} ms per probe, PSS {run.held.pss_mb:.0f} MB",
        flush=True,
    )
