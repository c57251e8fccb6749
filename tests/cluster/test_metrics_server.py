"""metrics-server scrapes our node: `kubectl top` and a HorizontalPodAutoscaler work.

With PYKUBELET_STATS_AGENT=reference, the node's kubelet is the upstream one.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from pykubelet.api.quantity import Quantity
from pykubelet.devcluster.binaries import Binaries
from pykubelet.devcluster.layout import NotAvailable
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.cluster.conftest import running_plane
from tests.support.cluster_node import ClusterNode, in_cluster
from tests.support.data_dir import short_dir
from tests.support.metrics_server import (
    API_FLAGS,
    METRICS,
    find_metrics_server,
    running_metrics_server,
)
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import runtime_process
from tests.support.stats_pages import REFERENCE, stats_node

pytestmark = pytest.mark.machine

CONTROLLER_FLAGS = (
    "--horizontal-pod-autoscaler-sync-period=2s",
    "--horizontal-pod-autoscaler-downscale-stabilization=1s",
    "--horizontal-pod-autoscaler-cpu-initialization-period=10s",
    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
)
SCRAPED_SECONDS = 90.0
"""Patience for two scrapes, which a rate needs."""
SCALED_SECONDS = 180.0
LIMIT_MILLI_CPU = 100
BURN = "while :; do :; done"
HELD_BYTES = 20_000_000
HOLD = "x=$(head -c 20000000 /dev/zero | tr '\\0' x); while :; do sleep 3600; done"
MAX_REPLICAS = 3


@pytest.fixture(scope="module")
def plane(programs: Binaries) -> Iterator[Plane]:
    """A control plane that reaches aggregated API servers, and whose autoscaler is quick."""
    with running_plane(programs, api_flags=API_FLAGS, controller_flags=CONTROLLER_FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def node(pytestconfig: pytest.Config, plane: Plane) -> Iterator[ClusterNode]:
    """A node that metrics-server scrapes."""
    capturing = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capturing.global_and_fixture_disabled():
            print(f"\n{text}", file=sys.stderr, flush=True)

    try:
        program = find_metrics_server(say)
    except NotAvailable as err:
        pytest.skip(str(err))
    with (
        short_dir() as directory,
        runtime_process(directory) as runtime,
        undo_host_changes() if REFERENCE else nullcontext(),
        in_cluster(stats_node(plane, runtime)) as started,
        running_metrics_server(plane, program),
    ):
        yield started


def table(text: str) -> list[dict[str, str]]:
    """Parse a table of kubectl."""
    head, *lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return [dict(zip(head, line, strict=True)) for line in lines]


def top(plane: Plane, *arguments: str) -> list[dict[str, str]]:
    """Return the rows of `kubectl top`; none while metrics-server has not scraped twice."""
    text = plane.kubectl("top", *arguments, check=False)
    return table(text) if text.startswith(("NAME", "POD")) else []


def milli(text: str) -> int:
    return Quantity.parse(text).milli


def test_top_node_running_node_has_its_usage(plane: Plane, node: ClusterNode) -> None:
    (row,) = plane.wait("usage of the node", lambda: top(plane, "node"), SCRAPED_SECONDS)
    assert row["NAME"] == node.name
    shown = plane.get("node", node.name)["status"]["capacity"]
    assert 0 < milli(row["CPU(cores)"]) <= milli(shown["cpu"])
    assert 0 < milli(row["MEMORY(bytes)"]) < milli(shown["memory"])
    assert 0 <= int(row["CPU(%)"].rstrip("%")) <= 100
    metrics = plane.request("GET", f"{METRICS}/nodes/{node.name}")
    assert metrics["window"] != "0s"
    assert set(metrics["usage"]) == {"cpu", "memory"}


def test_top_pod_containers_have_their_usage(plane: Plane, node: ClusterNode, namespace: str) -> None:
    limits = {"cpu": f"{LIMIT_MILLI_CPU}m", "memory": "64Mi"}
    document = node.pod_document("busy", namespace)
    main = document["spec"]["containers"][0]
    scripts = {"burner": BURN, "holder": HOLD, "idle": "while :; do sleep 3600; done"}
    document["spec"]["containers"] = [
        {**main, "name": name, "command": ["sh", "-c", script], "resources": {"limits": limits}}
        for name, script in scripts.items()
    ]
    pod = plane.create(document)
    node.wait_pod_ready(pod)

    def look() -> dict[str, dict[str, str]] | None:
        rows = {row["NAME"]: row for row in top(plane, "pod", "-n", namespace, "--containers")}
        settled = len(rows) == len(scripts) and milli(rows["burner"]["CPU(cores)"]) > LIMIT_MILLI_CPU * 0.6
        return rows if settled else None

    rows = plane.wait("usage of the containers", look, SCRAPED_SECONDS)
    assert {row["POD"] for row in rows.values()} == {"busy"}
    assert milli(rows["burner"]["CPU(cores)"]) <= LIMIT_MILLI_CPU * 1.2
    assert milli(rows["idle"]["CPU(cores)"]) <= 20
    held = milli(rows["holder"]["MEMORY(bytes)"]) // 1000
    assert HELD_BYTES * 0.9 <= held <= HELD_BYTES * 3
    assert milli(rows["idle"]["MEMORY(bytes)"]) // 1000 <= 8 << 20
    # The pod is the sum of its containers.
    (whole,) = top(plane, "pod", "-n", namespace)
    assert milli(whole["CPU(cores)"]) > LIMIT_MILLI_CPU * 0.6
    node.delete_pod(pod)


def autoscaled(node: ClusterNode, namespace: str, directory: Path) -> list[Document]:
    """Return a Deployment whose pods burn CPU while `directory/load` exists, and its autoscaler."""
    pod = node.pod_document("unused", namespace)["spec"]
    del pod["nodeName"]
    work = "trap 'exit 0' TERM; while :; do if [ -e /shared/load ]; then :; else sleep 0.2; fi; done"
    pod["containers"][0] |= {
        "command": ["sh", "-c", work],
        "resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": f"{LIMIT_MILLI_CPU}m"}},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    pod["volumes"] = [{"name": "shared", "hostPath": {"path": str(directory)}}]
    labels = {"app": "worker"}
    meta = {"name": "worker", "namespace": namespace}
    quick = {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Pods", "value": MAX_REPLICAS, "periodSeconds": 1}],
    }
    target = {"type": "Utilization", "averageUtilization": 50}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": meta,
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "worker"},
                "minReplicas": 1,
                "maxReplicas": MAX_REPLICAS,
                "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
                "behavior": {"scaleUp": quick, "scaleDown": quick},
            },
        },
    ]


def test_autoscaler_load_comes_and_goes_deployment_is_scaled(
    plane: Plane, node: ClusterNode, namespace: str
) -> None:
    directory = node.instance.data_dir.parent / unique("shared")
    directory.mkdir()
    load = directory / "load"
    load.touch()
    for document in autoscaled(node, namespace, directory):
        plane.create(document)

    def ready(count: int) -> Document:
        return plane.wait_for(
            "deployment",
            "worker",
            namespace,
            lambda it: (it["status"].get("readyReplicas"), it["status"].get("replicas")) == (count, count),
            SCALED_SECONDS,
        )

    ready(MAX_REPLICAS)
    load.unlink()
    ready(1)
    events = {event["reason"] for event in plane.events(namespace, "worker")}
    assert "SuccessfulRescale" in events
    found = plane.get("horizontalpodautoscaler", "worker", namespace)
    assert found["status"]["currentMetrics"][0]["resource"]["current"]["averageUtilization"] <= 50
