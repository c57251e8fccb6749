"""Statistics of ours are those of the upstream kubelet, for the same pods on the same host.

The pods keep running while the node's kubelet is exchanged: upstream's, ours, upstream's. See
`tests.support.stats_comparison` for what is compared. With PYKUBELET_STATS_AGENT=reference, ours is the
upstream kubelet, too: the rules must hold for it. PYKUBELET_STATS_KEEP is a directory for all answers.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.cluster.conftest import fresh_namespace
from tests.support.cluster_node import in_cluster
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime
from tests.support.stats_comparison import Rule
from tests.support.stats_measured import (
    BATCHES,
    FLUCTUATES,
    HOST,
    OOM_RULE,
    PROBES_RULES,
    PROCESSES,
    SLIS_RULES,
    SUMMARY_MEMORY,
    Measured,
    host_parts,
    host_rules,
)
from tests.support.stats_pages import (
    EXPOSITIONS,
    REFERENCE,
    SUMMARIES,
    StatsPages,
    fetch_stats,
    stats_node,
    wait_measured,
)
from tests.support.stats_pods import CRASHING, HOST_NETWORK, STATIC, stats_pods

pytestmark = pytest.mark.machine

KEEP = os.environ.get("PYKUBELET_STATS_KEEP", "")
MIB, GIB = 1 << 20, 1 << 30
TOLERATED_SECONDS = 1.0
"""Time of a fetch."""


RESTARTED = Rule(
    ".*",
    "the crash loop's container has another id, or none, each time",
    labels={"pod": f"(.*/)?{CRASHING[0]}", "container": CRASHING[1]},
    ignored=True,
)
STATIC_POD = Rule(
    ".*",
    "each kubelet restarts it, since its uid differs",
    labels={"pod": f"(.*/)?{STATIC}-.*"},
    any_value=True,
)

CHANGING_PODS = "(.*/)?(writer|sidecar|crasher)"
"""Pods whose processes come and go: commands of a loop, probes (runc has eight threads), restarts."""
CADVISOR_MEMORY = (
    "container_memory_(usage_bytes|working_set_bytes|cache|rss|mapped_file|kernel_usage)|"
    "container_memory_total_(in)?active_file_bytes"
)

STARTING = "a container of the crash loop may be starting, with the processes of runc"
STARTING_MEMORY = 8 * MIB

CADVISOR_RULES = [
    RESTARTED,
    STATIC_POD,
    Rule(CADVISOR_MEMORY, STARTING, labels={"pod": CRASHING[0]}, absolute=STARTING_MEMORY),
    Rule(CADVISOR_MEMORY, HOST, labels={"id": "/"}, relative=0.25, absolute=64 * MIB),
    Rule("container_fs_usage_bytes", HOST, labels={"id": "/"}, absolute=GIB),
    Rule("container_fs_inodes_free", HOST, labels={"id": "/"}, relative=0.01),
    Rule("container_fs_io_current", HOST, labels={"id": "/"}, any_value=True),
    Rule(PROCESSES, HOST, labels={"id": "/"}, any_value=True),
    *(
        Rule(name, FLUCTUATES, labels={"pod": pods}, absolute=absolute)
        # Without a pod it is a cgroup above those of pods.
        for pods in (CHANGING_PODS, "")
        for name, absolute in ((CADVISOR_MEMORY, MIB), (PROCESSES, 16))
    ),
    Rule(CADVISOR_MEMORY, BATCHES, absolute=32 * 1024),
    OOM_RULE,
]
RESOURCE_RULES = [
    RESTARTED,
    STATIC_POD,
    Rule("node_memory_working_set_bytes", HOST, relative=0.25, absolute=64 * MIB),
    Rule(".*_memory_working_set_bytes", STARTING, labels={"pod": CRASHING[0]}, absolute=STARTING_MEMORY),
    Rule(".*_memory_working_set_bytes", FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=MIB),
    Rule(".*_memory_working_set_bytes", BATCHES, absolute=32 * 1024),
]
SUMMARY_RULES = [
    RESTARTED,
    STATIC_POD,
    Rule(r"node\.cpu\.usageNanoCores|node\.rlimit\.curproc", HOST, any_value=True),
    Rule(r"node\.memory\.(available|usage|workingSet|rss)Bytes", HOST, relative=0.25, absolute=64 * MIB),
    Rule(r".*\.usageNanoCores", FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=30e6),
    Rule(r".*\.usageNanoCores", FLUCTUATES, relative=0.25, absolute=2e6),
    Rule(r"node\.fs\.usedBytes|.*\.availableBytes", HOST, labels={"pod": ""}, absolute=GIB),
    Rule(r".*(rootfs|logs|volume|ephemeral-storage)\.availableBytes", HOST, absolute=GIB),
    Rule(r".*\.inodesFree|node\.fs\.inodesUsed", HOST, relative=0.01),
    Rule(r".*\.volume\.(usedBytes|inodesUsed)", HOST, labels={"volume": "claim"}, relative=0.05),
    Rule(
        r"node\.runtime\..*\.(usedBytes|inodesUsed)",
        "snapshots of the crash loop",
        relative=0.05,
        absolute=64,
    ),
    Rule(SUMMARY_MEMORY, STARTING, labels={"pod": f".*/{CRASHING[0]}"}, absolute=STARTING_MEMORY),
    Rule(SUMMARY_MEMORY, FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=MIB),
    Rule(SUMMARY_MEMORY, FLUCTUATES, labels={"systemContainers": ".+"}, absolute=MIB),
    Rule(SUMMARY_MEMORY, BATCHES, absolute=32 * 1024),
    Rule(r".*\.process_count", FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=4),
]
RULES = {
    "cadvisor": CADVISOR_RULES,
    "resource": RESOURCE_RULES,
    "slis": SLIS_RULES,
    "probes": PROBES_RULES,
    "summary": SUMMARY_RULES,
    "cpu-memory": SUMMARY_RULES,
}


@pytest.fixture(scope="module")
def measured(plane: Plane, runtime: RunningRuntime) -> Iterator[Measured]:
    """Measure the same pods by the upstream kubelet, by ours, and by the upstream kubelet again."""
    if plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    ours = plane.reference_kubelet if REFERENCE else None
    answers: dict[str, StatsPages] = {}
    parts = host_parts(containers=False)
    node = stats_node(plane, runtime, reference=True)
    with undo_host_changes(), in_cluster(node), fresh_namespace(plane) as namespace:
        with stats_pods(node, namespace) as pods:
            for turn, program in (("before", None), ("ours", ours), ("after", plane.reference_kubelet)):
                if turn != "before":
                    node.kill()
                    node.hand_to(program)
                    node.start()
                    node.wait_registered()
                wait_measured(node, pods)
                answers[turn] = fetch_stats(node, pods, Path(KEEP, turn) if KEEP else None)
            rules = host_rules(parts.common(host_parts(containers=False)), HOST_NETWORK)
            yield Measured(**answers, host_rules=rules)


@pytest.mark.parametrize("endpoint", EXPOSITIONS)
def test_exposition_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_exposition(endpoint, RULES)


@pytest.mark.parametrize("endpoint", SUMMARIES)
def test_summary_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_summary(endpoint, RULES)


@pytest.mark.skipif(REFERENCE, reason="the upstream kubelet adds jitter to its interval")
@pytest.mark.parametrize("endpoint", ["cadvisor", "resource"])
def test_exposition_samples_are_not_older_than_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_age(endpoint, TOLERATED_SECONDS)
