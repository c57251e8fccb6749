"""Statistics of ours are those of the upstream kubelet, for the same pods on the same host.

The pods keep running while the node's kubelet is exchanged: upstream's, ours, upstream's. See
`tests.support.stats_comparison` for what is compared. With PYKUBELET_STATS_AGENT=reference, ours is the
upstream kubelet, too: the rules must hold for it. PYKUBELET_STATS_KEEP is a directory for all answers.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.cluster.conftest import fresh_namespace
from tests.support.cluster_node import in_cluster
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime
from tests.support.stats_comparison import Difference, Rule, compare, compare_expositions
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
UPSTREAM_AGE_SECONDS, TOLERATED_SECONDS = 15.0, 1.0
"""The longest interval at which the upstream kubelet measures a container, and the time of a fetch."""


class Measured(NamedTuple):
    """The answers, and rules for series of other processes of this host."""

    before: StatsPages
    ours: StatsPages
    after: StatsPages
    host_rules: list[Rule]


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
SINCE_START = "counted since the start of the kubelet"
FLUCTUATES = "changes from sample to sample"
HOST = "other processes of the host change it"

CHANGING_PODS = "(.*/)?(writer|sidecar|crasher)"
"""Pods whose processes come and go: commands of a loop, probes (runc has eight threads), restarts."""
CADVISOR_MEMORY = (
    "container_memory_(usage_bytes|working_set_bytes|cache|rss|mapped_file|kernel_usage)|"
    "container_memory_total_(in)?active_file_bytes"
)
PROCESSES = "container_(processes|threads|file_descriptors|sockets)"
BATCHES = "the kernel charges memory in batches per CPU"

CADVISOR_RULES = [
    RESTARTED,
    STATIC_POD,
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
    Rule("container_oom_events_total", SINCE_START, any_value=True),
]
RESOURCE_RULES = [
    RESTARTED,
    STATIC_POD,
    Rule("node_memory_working_set_bytes", HOST, relative=0.25, absolute=64 * MIB),
    Rule(".*_memory_working_set_bytes", FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=MIB),
    Rule(".*_memory_working_set_bytes", BATCHES, absolute=32 * 1024),
]
SLIS_RULES = [Rule("process_start_time_seconds|kubernetes_healthchecks_total", SINCE_START, any_value=True)]
PROBES_RULES = [Rule("prober_probe_.*", SINCE_START, any_value=True)]
SUMMARY_MEMORY = r".*\.memory\.(usageBytes|workingSetBytes|rssBytes|availableBytes)"
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
    mounts, links = mounted_devices(), network_links()
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
            rules = host_rules(mounts & mounted_devices(), links & network_links())
            yield Measured(**answers, host_rules=rules)


def mounted_devices() -> set[str]:
    """Return the names by which cAdvisor may call the mounted file systems.

    Mounts of containers are not among them: the upstream kubelet reports those that exist when it starts,
    ours none.
    """
    found: set[str] = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        number, point = first.split()[2], first.split()[4]
        if not re.search("/[0-9a-f]{64}/", point):
            found |= {second.split()[1], point, f"overlay_{number.replace(':', '-')}"}
    return found


def network_links() -> set[str]:
    """Return the names of the host's network interfaces."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def host_rules(devices: Iterable[str], links: Iterable[str]) -> list[Rule]:
    """Ignore file systems and interfaces of the host that did not exist all the time."""
    other_link = {"interface": _none_of(links)}
    return [
        Rule(".*", HOST, labels={"id": "/", "device": _none_of(devices)}, ignored=True),
        Rule(".*", HOST, labels={"id": "/", **other_link}, ignored=True),
        Rule(".*", HOST, labels={"pod": f"(.*/)?{HOST_NETWORK}", **other_link}, ignored=True),
        Rule("node.network.interfaces.*", HOST, labels=other_link, ignored=True),
    ]


def _none_of(names: Iterable[str]) -> str:
    return rf"(?!(?:{'|'.join(map(re.escape, sorted(names)))})$).+"


@pytest.mark.parametrize("endpoint", EXPOSITIONS)
def test_exposition_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    before, ours, after = (
        pages.expositions[endpoint] for pages in (measured.before, measured.ours, measured.after)
    )
    check(compare_expositions(before, ours, after, [*measured.host_rules, *RULES[endpoint]]))


@pytest.mark.parametrize("endpoint", SUMMARIES)
def test_summary_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    before, ours, after = (
        pages.summaries[endpoint] for pages in (measured.before, measured.ours, measured.after)
    )
    check(compare(before, ours, after, [*measured.host_rules, *RULES[endpoint]]))


@pytest.mark.skipif(REFERENCE, reason="the upstream kubelet adds jitter to its interval")
@pytest.mark.parametrize("endpoint", ["cadvisor", "resource"])
def test_exposition_samples_are_not_older_than_upstreams(measured: Measured, endpoint: str) -> None:
    allowed = max(measured.before.age(endpoint), measured.after.age(endpoint), UPSTREAM_AGE_SECONDS)
    assert measured.ours.age(endpoint) <= allowed + TOLERATED_SECONDS


def check(differences: list[Difference]) -> None:
    """Fail with all differences, first those of most consequence."""
    assert not differences, "\n".join([f"{len(differences)} differences", *map(str, differences)])
