"""The statistics of a node as one kubelet serves them, once it has measured all pods of `StatsPods`."""

import json
import os
import time
import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.cluster_node import ClusterNode, cluster_node
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime
from tests.support.stats_comparison import Exposition, Samples, parse_exposition, parse_summary
from tests.support.stats_pods import StatsPods

REFERENCE = os.environ.get("PYKUBELET_STATS_AGENT") == "reference"
"""Whether the tests of statistics run the upstream kubelet instead of ours: so they test themselves."""
SUMMARIES = {"summary": "/stats/summary", "cpu-memory": "/stats/summary?only_cpu_and_memory=true"}
EXPOSITIONS = {
    "cadvisor": "/metrics/cadvisor",
    "resource": "/metrics/resource",
    "slis": "/metrics/slis",
    "probes": "/metrics/probes",
}
SETTINGS = {"volumeStatsAggPeriod": "5s"}
_MEASURED_SECONDS = 150.0
_WRITTEN_VOLUMES = ("disk", "memory", "claim")
"""Volumes whose usage the upstream kubelet measures again; it measures the others once."""


@dataclass(frozen=True, slots=True)
class StatsPages:
    """All responses of one kubelet, fetched at one time."""

    summaries: dict[str, Samples]
    expositions: dict[str, Exposition]
    fetched_at: float

    def age(self, endpoint: str) -> float:
        """Return the age of the oldest sample of an exposition, in seconds."""
        return self.fetched_at - self.expositions[endpoint].oldest()


def stats_node(plane: Plane, runtime: RunningRuntime, *, reference: bool = REFERENCE) -> ClusterNode:
    """Return a node with the settings for these tests; not started yet."""
    program = plane.reference_kubelet if reference else None
    # The upstream kubelet's cAdvisor reads the names of containers from containerd itself.
    flags = [f"--containerd={runtime.instance.socket}"]
    return cluster_node(plane, runtime, program=program, flags=flags, settings=SETTINGS)


def fetch_stats(node: ClusterNode, pods: StatsPods, directory: Path | None = None) -> StatsPages:
    """Fetch all responses; with a directory, keep their texts there.

    Ids of the static pod are replaced by words: each kubelet gives it another uid and restarts it.
    """
    # On this port both kubelets run all health checks, and count them.
    node.plane.kubectl("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/healthz")
    texts = {name: node.page(path) for name, path in {**EXPOSITIONS, **SUMMARIES}.items()}
    now = time.time()
    for id, word in _static_ids(node, pods).items():
        texts = {name: text.replace(id, word) for name, text in texts.items()}
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    return StatsPages(
        {name: parse_summary(json.loads(texts[name])) for name in SUMMARIES},
        {name: parse_exposition(texts[name]) for name in EXPOSITIONS},
        now,
    )


def _static_ids(node: ClusterNode, pods: StatsPods) -> dict[str, str]:
    """Return words for the ids of the static pod, of its sandbox and of its container."""
    (uid,) = [pod["metadata"]["uid"] for pod in node.pods() if pod["metadata"]["name"] == pods.mirror]
    (container,) = node.truth.running(pods.mirror)
    return {uid: "STATIC", container.pod_sandbox_id: "SANDBOX", container.id: "CONTAINER"}


def wait_measured(node: ClusterNode, pods: StatsPods) -> None:
    """Wait until the node's kubelet has measured everything since now."""
    since = time.time()
    # Times in the Summary API are whole seconds.
    node.wait_none(
        "statistics of all pods", lambda: unmeasured(node, pods, int(since) + 1), _MEASURED_SECONDS
    )


def unmeasured(node: ClusterNode, pods: StatsPods, since: float) -> list[str]:
    """Return what the kubelet's statistics lack, or have only from before `since`."""
    try:
        summary = node.get(SUMMARIES["summary"])
        shown = parse_exposition(node.page(EXPOSITIONS["cadvisor"])).samples
        probes = parse_exposition(node.page(EXPOSITIONS["probes"])).samples
    except urllib.error.HTTPError as err:
        return [f"{err.url}: {err}"]
    found = {pod["podRef"]["name"]: pod for pod in summary["pods"]}
    lacking = [
        f"cadvisor: {pod}/{container}"
        for pod, container in pods.running_containers()
        if not any({("pod", pod), ("container", container)} <= set(series.labels) for series in shown)
    ]
    for pod, container in pods.running_containers():
        measured = found.get(pod, {}).get("containers", [])
        entry: dict[str, Any] = next((one for one in measured if one["name"] == container), {})
        lacking += [f"{pod}/{container}: {name}" for name in _stale(entry, since)]
        if node.reference and "psi" not in entry.get("cpu", ()):
            # Its cAdvisor has measured the container once, and the values are the runtime's.
            lacking.append(f"{pod}/{container}: from cAdvisor")
    for pod, part in found.items():
        lacking += [f"{pod}: {name}" for name in _stale(part, since, ("cpu", "memory"))]
        lacking += [f"{pod}: {name}" for name in ("network", "ephemeral-storage") if name not in part]
    for pod, names in pods.volumes().items():
        volumes = {volume["name"]: volume for volume in found.get(pod, {}).get("volume", ())}
        lacking += [f"{pod}: volume {name}" for name in names if name not in volumes]
        lacking += [
            f"{pod}: volume {name} since"
            for name, volume in volumes.items()
            if name in _WRITTEN_VOLUMES and _time(volume) < since
        ]
    lacking += [f"node: {name}" for name in _stale(summary["node"], since, ("cpu", "memory", "fs"))]
    lacking += [f"{pods.mirror}: one"] if len(node.truth.running(pods.mirror)) != 1 else []
    lacking += ["probes: none"] if not any(series.name == "prober_probe_total" for series in probes) else []
    return lacking


def _stale(
    entry: dict[str, Any], since: float, names: Iterable[str] = ("cpu", "memory", "rootfs", "logs")
) -> list[str]:
    """Return the parts of an entry that are missing or older than `since`."""
    stale = [name for name in names if name not in entry or _time(entry[name]) < since]
    # A rate needs two samples.
    return stale + (["rate"] if "usageNanoCores" not in entry.get("cpu", ()) else [])


def _time(part: dict[str, Any]) -> float:
    # Null is what was not measured yet.
    return datetime.fromisoformat(part["time"]).timestamp() if part["time"] else 0.0
