"""Statistics on cgroup v2 with pressure are those of the upstream kubelet, for the same pods.

The pods keep running while the node's kubelet is exchanged: upstream's, ours, upstream's. See
`tests.support.stats_comparison` for what is compared: series and labels must be equal, and counters of ours
lie between upstream's. Gauges have wide tolerances, because the guest is slow and minutes pass in between.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.devcluster.binaries import module_cache_dir, source_module
from tests.support.data_dir import short_dir
from tests.support.node import NAME
from tests.support.stats_comparison import (
    Rule,
    Series,
)
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
from tests.support.stats_pages import EXPOSITIONS, SUMMARIES, StatsPages
from tests.vm.guest.node import SLOW
from tests.vm.guest.stats_node import (
    BURNER,
    HOST_NETWORK,
    PROBED,
    READER,
    READER_LIMIT,
    WRITER,
    stats_node,
    stats_pods,
)

pytestmark = pytest.mark.timeout(1700)

KIB, MIB = 1 << 10, 1 << 20
TOLERATED_SECONDS = 5.0
"""Time of a fetch."""
WAITING = [(BURNER, "cpu"), (READER, "memory")]
"""Containers that need more than their limit, and what they wait for."""


CHANGING_PODS = f"(.*/)?({WRITER}|{PROBED})-{NAME}"
"""Pods whose processes come and go: commands of a loop, connections of probes."""
READING_PODS = f"((.*/)?{READER}-{NAME})?"
"""The pod whose page cache fills its limit and is freed; without a name, cgroups above those of pods."""
WITH_KUBELET = "/|/system.slice/vmtest.service"
"""Cgroups with the kubelet in them."""
CADVISOR_MEMORY = (
    "container_memory_(usage_bytes|working_set_bytes|cache|rss|mapped_file)|"
    "container_memory_total_(in)?active_file_bytes"
)

CADVISOR_RULES = [
    Rule(CADVISOR_MEMORY, HOST, labels={"id": WITH_KUBELET}, relative=0.25, absolute=128 * MIB),
    Rule(PROCESSES, HOST, labels={"id": WITH_KUBELET}, any_value=True),
    Rule("container_fs_usage_bytes", HOST, labels={"id": "/"}, absolute=16 * MIB),
    Rule("container_fs_inodes_free", HOST, labels={"id": "/"}, relative=0.01),
    *(
        Rule(name, FLUCTUATES, labels={"pod": pods}, absolute=absolute)
        for pods, memory in ((CHANGING_PODS, MIB), (READING_PODS, READER_LIMIT))
        for name, absolute in ((CADVISOR_MEMORY, memory), (PROCESSES, 4))
    ),
    Rule(CADVISOR_MEMORY, BATCHES, absolute=64 * KIB),
    OOM_RULE,
]
RESOURCE_RULES = [
    Rule("node_memory_working_set_bytes", HOST, relative=0.25, absolute=128 * MIB),
    Rule(".*_memory_working_set_bytes", FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=MIB),
    Rule(".*_memory_working_set_bytes", FLUCTUATES, labels={"pod": READING_PODS}, absolute=READER_LIMIT),
    Rule(".*_memory_working_set_bytes", BATCHES, absolute=64 * KIB),
]
SUMMARY_RULES = [
    Rule(r".*\.psi\.(full|some)\.avg\d+", FLUCTUATES, any_value=True),
    Rule(r"node\.cpu\.usageNanoCores|node\.rlimit\.curproc", HOST, any_value=True),
    Rule(r".*\.usageNanoCores", HOST, labels={"systemContainers": "kubelet"}, any_value=True),
    Rule(r".*\.usageNanoCores", FLUCTUATES, relative=0.25, absolute=100e6),
    Rule(r"node\.memory\.(available|usage|workingSet|rss)Bytes", HOST, relative=0.25, absolute=128 * MIB),
    Rule(SUMMARY_MEMORY, HOST, labels={"systemContainers": "kubelet"}, relative=0.25, absolute=128 * MIB),
    Rule(SUMMARY_MEMORY, FLUCTUATES, labels={"pod": CHANGING_PODS}, absolute=MIB),
    Rule(SUMMARY_MEMORY, FLUCTUATES, labels={"pod": READING_PODS}, absolute=READER_LIMIT),
    Rule(SUMMARY_MEMORY, BATCHES, absolute=64 * KIB),
    Rule(
        r"node\.fs\.usedBytes|.*(fs|Fs|logs|volume|ephemeral-storage)\.availableBytes",
        HOST,
        absolute=16 * MIB,
    ),
    Rule(r".*\.inodesFree|node\.fs\.inodesUsed", HOST, relative=0.01, absolute=64),
    Rule(r".*\.process_count", FLUCTUATES, labels={"pod": f"{CHANGING_PODS}|{READING_PODS}"}, absolute=4),
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
def measured() -> Iterator[Measured]:
    """Measure the same pods by the upstream kubelet, by ours, and by the upstream kubelet again."""
    upstream = upstream_kubelet()
    if upstream is None:
        pytest.skip("the host has not built the control plane, and with it the upstream kubelet: make test")
    names = [f"{document['metadata']['name']}-{NAME}" for document in stats_pods()]
    answers: dict[str, StatsPages] = {}
    parts = host_parts(containers=True)
    with short_dir() as path, stats_node(path) as node:
        for turn, program in (("before", upstream), ("ours", None), ("after", upstream)):
            node.hand_to(program)
            for name in names:
                node.wait_ready(name, SLOW)
            node.wait_measured()
            answers[turn] = node.fetch()
            if program is None:
                node.check_log()
        rules = host_rules(parts.common(host_parts(containers=True)), f"{HOST_NETWORK}-{NAME}")
        yield Measured(**answers, host_rules=rules)


def upstream_kubelet() -> Path | None:
    """Return the upstream kubelet of the host's control plane; the guest cannot build one."""
    path = module_cache_dir(source_module()) / "kubelet"
    return path if path.exists() else None


def test_guest_kernel_measures_pressure() -> None:
    for resource in ("cpu", "memory", "io"):
        assert Path(f"/sys/fs/cgroup/{resource}.pressure").read_text().startswith("some avg10=")


@pytest.mark.parametrize("endpoint", EXPOSITIONS)
def test_exposition_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_exposition(endpoint, RULES)


@pytest.mark.parametrize("endpoint", SUMMARIES)
def test_summary_same_pods_equals_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_summary(endpoint, RULES)


@pytest.mark.parametrize("endpoint", ["cadvisor", "resource"])
def test_exposition_samples_are_not_older_than_upstreams(measured: Measured, endpoint: str) -> None:
    measured.check_age(endpoint, TOLERATED_SECONDS)


@pytest.mark.parametrize("endpoint", SUMMARIES)
@pytest.mark.parametrize(("pod", "resource"), WAITING)
def test_summary_container_exceeds_limit_has_growing_pressure(
    measured: Measured, pod: str, resource: str, endpoint: str
) -> None:
    for kind in ("some", "full"):
        labels = (("pod", f"default/{pod}-{NAME}"), ("container", "main"))
        series = Series(f"pods.containers.{resource}.psi.{kind}.total", labels)
        expect_growth([pages.summaries[endpoint][series] for pages in measured[:3]])


@pytest.mark.parametrize(("pod", "resource"), WAITING)
def test_exposition_container_exceeds_limit_has_growing_pressure(
    measured: Measured, pod: str, resource: str
) -> None:
    for kind in ("waiting", "stalled"):
        name = f"container_pressure_{resource}_{kind}_seconds_total"
        (series,) = (
            series
            for series in measured.ours.expositions["cadvisor"].samples
            if series.name == name and {("pod", f"{pod}-{NAME}"), ("container", "main")} <= set(series.labels)
        )
        expect_growth([pages.expositions["cadvisor"].samples[series] for pages in measured[:3]])


def expect_growth(values: list[float | str]) -> None:
    before, ours, after = map(float, values)
    assert 0 < before < ours < after
