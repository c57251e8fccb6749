"""Prometheus scrapes our node as kube-prometheus configures it, and finds what its users select.

With PYKUBELET_STATS_AGENT=reference, the node's kubelet is the upstream one.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.cluster.conftest import fresh_namespace
from tests.support.cluster_node import ClusterNode, in_cluster
from tests.support.metric_consumers import Consumed, consumed_metrics
from tests.support.plane import Plane
from tests.support.prometheus import (
    JOB,
    PATHS,
    PROGRAM,
    Prometheus,
    running_prometheus,
    scrape_config,
    scrape_token,
)
from tests.support.runtime import RunningRuntime
from tests.support.stats_pages import REFERENCE, stats_node, wait_measured
from tests.support.stats_pods import stats_pods

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason="Prometheus is not installed (Debian: prometheus)"
    ),
]

UNIFIED = detect_cgroups().unified
PSI = UNIFIED and Path("/proc/pressure").exists()
NOT_HERE = {
    "event: when a pod was evicted": "no pod of this test is evicted",
    "event: with rotation of certificates": "the node of this test does not rotate certificates",
    "event: when a call failed": "no call to the runtime has to fail",
    "event: when the API server responded so": "no request has to fail",
    "where the node has such disks": "the disks of a test host have any name",
}
"""Notes of rows that need not match on this node, with the reason."""
if not UNIFIED:
    NOT_HERE["event: when the block cgroup counts I/O of a container"] = "cgroup v1 may not count it"
if not PSI:
    NOT_HERE["event: with cgroup v2 and PSI"] = "this host has no PSI"
LACKING = "reference lacks" if REFERENCE else ("reference lacks", "ours lacks")
NOT_REGISTERED = ("kubernetes_build_info", "rest_client_.*")
"""Metrics that only the main package of the upstream kubelet registers, which the tests' build is without."""
MATCHED_SECONDS = 90.0


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A busy node."""
    with (
        undo_host_changes() if REFERENCE else nullcontext(),
        in_cluster(stats_node(plane, runtime)) as started,
        fresh_namespace(plane) as namespace,
        stats_pods(started, namespace) as pods,
    ):
        wait_measured(started, pods)
        yield started


@pytest.fixture(scope="module")
def prometheus(
    plane: Plane, node: ClusterNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus, which has scraped all paths of the node."""
    directory = tmp_path_factory.mktemp("prometheus")
    token = directory / "token"
    token.write_text(scrape_token(plane))
    status = plane.get("node", node.name)["status"]
    port = status["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    (address,) = [one["address"] for one in status["addresses"] if one["type"] == "InternalIP"]
    with running_prometheus(directory, scrape_config(f"{address}:{port}", node.name, token)) as running:

        def is_scraped() -> bool:
            up = running.query(f'up{{job="{JOB}"}} == 1')
            return {series["metric"]["metrics_path"] for series in up} == set(PATHS)

        running.wait("a scrape of all paths", is_scraped)
        yield running


def must_match(row: Consumed) -> bool:
    """Return whether the selector has to match on this node."""
    if REFERENCE and any(re.fullmatch(name, row.metric) for name in NOT_REGISTERED):
        return False
    return row.note not in NOT_HERE and not row.note.startswith(LACKING)


def test_targets_all_paths_are_scraped_without_error(prometheus: Prometheus) -> None:
    targets = prometheus.get("targets", state="active")["activeTargets"]
    found = {target["labels"]["metrics_path"]: target for target in targets}
    assert set(found) == set(PATHS)
    assert {path: target["lastError"] for path, target in found.items() if target["lastError"]} == {}
    for series in prometheus.query(f'scrape_samples_scraped{{job="{JOB}"}}'):
        assert float(series["value"][1]) > 0, series["metric"]


def test_selectors_of_consumers_match_series(prometheus: Prometheus) -> None:
    rows = {
        row.selector(job=JOB, metrics_path=row.endpoint): row
        for row in consumed_metrics()
        if row.endpoint in PATHS and must_match(row)
    }
    assert len(rows) > 60
    unmatched: list[str] = []

    def all_match() -> bool:
        unmatched[:] = [selector for selector in rows if not prometheus.query(f"count({selector})")]
        return not unmatched

    try:
        prometheus.wait("series for all selectors", all_match, MATCHED_SECONDS)
    except AssertionError as err:
        raise AssertionError("\n".join(["no series for:", *unmatched])) from err


@pytest.mark.parametrize(
    ("note", "labels"),
    [
        ("once per pod and interface", "namespace, pod, interface"),
        ("of containers with a CPU limit; unique without id, name and image", "namespace, pod, container"),
    ],
)
def test_selectors_of_consumers_match_one_series_each(prometheus: Prometheus, note: str, labels: str) -> None:
    """Verify that joins and sums of the consumers count nothing twice."""
    rows = [row for row in consumed_metrics() if row.note == note]
    assert rows
    for row in rows:
        repeated = prometheus.query(f"count by ({labels}) ({row.selector(metrics_path=row.endpoint)}) > 1")
        assert repeated == [], row


def test_rates_of_busy_pods_are_those_of_their_work(prometheus: Prometheus) -> None:
    """Verify that rates, which dashboards show, are right: the burner uses all of its 0.1 CPUs."""
    # /metrics/resource has series of these names, too.
    cpu = 'container_cpu_usage_seconds_total{metrics_path="/metrics/cadvisor",pod="burner",container!=""}'
    sent = 'container_network_transmit_bytes_total{pod="sender",interface="eth0"}'
    seen: list[float] = []

    def is_right() -> bool:
        found = [prometheus.query(f"rate({series}[1m])") for series in (cpu, sent)]
        seen[:] = [float(series["value"][1]) for vector in found for series in vector]
        return len(seen) == 2 and 0.06 < seen[0] < 0.13 and 1000 < seen[1] < 4000

    try:
        prometheus.wait("rates of the pods", is_right, MATCHED_SECONDS)
    except AssertionError as err:
        raise AssertionError(f"the rates are {seen}") from err


def test_ingested_samples_are_neither_duplicate_nor_out_of_order(prometheus: Prometheus) -> None:
    problems = [line for line in prometheus.log_lines() if "Error on ingesting" in line]
    assert problems == []
