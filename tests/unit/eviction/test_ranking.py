"""Order of eviction, messages and limits on local storage."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.eviction.local_storage import ExceededLimit, exceeded_limit, has_storage_limits
from pykubelet.eviction.messages import evicted_status, eviction_message, node_condition_message
from pykubelet.eviction.observations import DiskUsage, PodUsage
from pykubelet.eviction.ranking import disk_usage, rank
from pykubelet.eviction.signals import SIGNAL_RESOURCES, Disks
from pykubelet.podconfig.static_pods import is_critical_pod
from tests.support.eviction import pod as make
from tests.support.eviction import seen, threshold, usage
from tests.support.pods import LATER, NOW

SINGLE, DEDICATED, SPLIT = Disks(), Disks(dedicated_imagefs=True), Disks(dedicated_imagefs=True, split=True)
SYSTEM_CRITICAL = 2_000_000_000


def order(signal: str, pods: list[Pod], usages: dict[str, PodUsage], disks: Disks = SINGLE) -> list[str]:
    return [found.pod.metadata.name for found in rank(signal, pods, usages, disks)]


def memory_pods() -> tuple[list[Pod], dict[str, PodUsage]]:
    """Pods with priority, request and usage."""
    rows = [
        ("below-requests-high", 10, "1Gi", "300Mi"),
        ("below-requests-low", 1, "1Gi", "300Mi"),
        ("best-effort-high", 10, "0", "300Mi"),
        ("burstable-above-low", 1, "100Mi", "400Mi"),
        ("best-effort-low", 1, "0", "500Mi"),
    ]
    pods = [
        make(name, priority=priority, requests={"memory": request} if request != "0" else {})
        for name, priority, request, _ in rows
    ]
    return pods, {name: usage(used) for name, _, _, used in rows}


def test_rank_memory_exceeding_then_priority_then_amount() -> None:
    pods, usages = memory_pods()
    expected = [
        "best-effort-low",
        "burstable-above-low",
        "best-effort-high",
        "below-requests-low",
        "below-requests-high",
    ]
    assert order("memory.available", pods, usages) == expected
    assert order("allocatableMemory.available", pods[::-1], usages) == expected


def test_rank_memory_unmeasured_pod_comes_first() -> None:
    pods = [make("hog", priority=1), make("new", priority=9)]
    assert order("memory.available", pods, {"hog": usage("3Gi")}) == ["new", "hog"]


def test_rank_pids_priority_then_processes() -> None:
    pods = [make("few", priority=1), make("many", priority=1), make("bomb", priority=5)]
    usages = {"few": usage(processes=3), "many": usage(processes=50), "bomb": usage(processes=5000)}
    assert order("pid.available", pods, usages) == ["many", "few", "bomb"]


def test_rank_overhead_counts_only_with_request() -> None:
    with_request = make("with", requests={"memory": "100Mi"}, overhead={"memory": "400Mi"})
    without = make("without", overhead={"memory": "400Mi"})
    usages = {"with": usage("300Mi"), "without": usage("300Mi")}
    assert order("memory.available", [with_request, without], usages) == ["without", "with"]
    assert [found.exceeds for found in rank("memory.available", [with_request], usages, SINGLE)] == [False]


def storage_pods() -> tuple[list[Pod], dict[str, PodUsage]]:
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
    ]
    pods = [make("layers"), make("logs"), make("scratch", volumes=volumes)]
    usages = {
        "layers": usage(rootfs="3Gi", logs="1Mi", rootfs_inodes=1, logs_inodes=5),
        "logs": usage(rootfs="1Mi", logs="2Gi", rootfs_inodes=2, logs_inodes=1),
        "scratch": usage(volumes={"scratch": ("1Gi", 90), "claim": ("9Gi", 900)}),
    }
    return pods, usages


@pytest.mark.parametrize(
    ("disks", "signal", "expected"),
    [
        (SINGLE, "nodefs.available", ["layers", "logs", "scratch"]),
        (SINGLE, "imagefs.available", ["layers", "logs", "scratch"]),
        (SINGLE, "nodefs.inodesFree", ["scratch", "layers", "logs"]),
        (DEDICATED, "nodefs.available", ["logs", "scratch", "layers"]),
        (DEDICATED, "imagefs.available", ["layers", "logs", "scratch"]),
        (DEDICATED, "containerfs.inodesFree", ["logs", "layers", "scratch"]),
        (SPLIT, "nodefs.available", ["layers", "logs", "scratch"]),
        (SPLIT, "containerfs.available", ["layers", "logs", "scratch"]),
    ],
)
def test_rank_disk_counts_what_is_on_it(disks: Disks, signal: str, expected: list[str]) -> None:
    pods, usages = storage_pods()
    assert order(signal, pods, usages, disks) == expected


def test_rank_disk_request_above_usage_comes_last() -> None:
    pods = [make("within", requests={"ephemeral-storage": "3Gi"}), make("above", priority=100)]
    usages = {"within": usage(rootfs="2Gi"), "above": usage(rootfs="1Mi")}
    assert order("nodefs.available", pods, usages) == ["above", "within"]


usages_of_pods = st.builds(
    PodUsage,
    memory=st.none() | st.integers(0, 100),
    processes=st.none() | st.integers(0, 100),
    containers=st.just(usage(rootfs="5", logs="7", rootfs_inodes=2, logs_inodes=3).containers),
    volumes=st.just({"scratch": DiskUsage(11, 5)}),
)


@given(st.data())
def test_rank_any_pods_order_is_permutation_and_victim_never_critical(data: st.DataObject) -> None:
    priorities = data.draw(st.lists(st.sampled_from([None, 0, 5, SYSTEM_CRITICAL]), max_size=6))
    pods = [make(f"p{index}", priority=priority) for index, priority in enumerate(priorities)]
    usages = data.draw(st.dictionaries(st.sampled_from([pod.uid for pod in pods] or ["x"]), usages_of_pods))
    signal = data.draw(st.sampled_from(sorted(SIGNAL_RESOURCES)))
    disks = data.draw(st.sampled_from([SINGLE, DEDICATED, SPLIT]))
    ranked = rank(signal, pods, usages, disks)
    assert sorted(found.pod.uid for found in ranked) == sorted(pod.uid for pod in pods)
    assert ranked == rank(signal, pods, usages, disks)
    victim = next((found.pod for found in ranked if found.is_evictable), None)
    assert (victim is None) == all(is_critical_pod(pod) for pod in pods)
    if signal.startswith(("memory", "pid")):
        # Of two pods that both exceed, or both do not, the one with the lower priority comes first.
        for left, right in itertools.pairwise(ranked):
            same = (left.usage is None, left.exceeds) == (right.usage is None, right.exceeds)
            assert not same or left.priority <= right.priority


@given(st.sampled_from([SINGLE, DEDICATED, SPLIT]), usages_of_pods)
def test_disk_usage_split_over_disks_counts_nothing_twice(disks: Disks, one: PodUsage) -> None:
    pod = make("p", volumes=[{"name": "scratch", "emptyDir": {}}])
    total = disk_usage("nodefs", pod, one, SINGLE)
    assert total == DiskUsage(5 + 7 + 11, 2 + 3 + 5)
    if disks is SINGLE:
        assert disk_usage("imagefs", pod, one, disks) == total
    else:
        parts = disk_usage("nodefs", pod, one, disks) + disk_usage("imagefs", pod, one, disks)
        assert parts == total


# Messages


def test_eviction_message_memory_is_upstreams() -> None:
    pod = make("web", requests={"memory": "100Mi"})
    observations = {"memory.available": seen("1500Mi", "3Gi")}
    message, annotations = eviction_message(
        pod, usage("700Mi"), "memory", [threshold("memory.available", "2Gi")], observations
    )
    assert message == (
        "The node was low on resource: memory. Threshold quantity: 2Gi, available: 1500Mi. "
        "Container main was using 700Mi, request is 100Mi, has larger consumption of memory. "
    )
    assert annotations == {
        "offending_containers": "main",
        "offending_containers_usage": "700Mi",
        "starved_resource": "memory",
    }


def test_eviction_message_best_effort_has_zero_request() -> None:
    message, _ = eviction_message(make("web"), usage("10Ki"), "memory", [], {})
    assert message == (
        "The node was low on resource: memory. "
        "Container main was using 10Ki, request is 0, has larger consumption of memory. "
    )


def test_eviction_message_pids_has_no_containers() -> None:
    message, annotations = eviction_message(
        make("web"),
        usage(processes=500),
        "pids",
        [threshold("pid.available", "1200")],
        {"pid.available": seen("500", "4000")},
    )
    assert message == "The node was low on resource: pids. Threshold quantity: 1200, available: 500. "
    assert annotations == {
        "offending_containers": "",
        "offending_containers_usage": "",
        "starved_resource": "pids",
    }


def test_eviction_message_unmeasured_pod_has_no_annotations() -> None:
    acting, observed = [threshold("nodefs.available", "10%")], {"nodefs.available": seen("5Gi", "100Gi")}
    message, annotations = eviction_message(make("web"), None, "ephemeral-storage", acting, observed)
    assert message == (
        "The node was low on resource: ephemeral-storage. Threshold quantity: 10737418400, available: 5Gi. "
    )
    assert annotations == {}


def test_eviction_message_ephemeral_storage_sums_layer_and_logs() -> None:
    message, _ = eviction_message(
        make("web", requests={"ephemeral-storage": "1Gi"}),
        usage(rootfs="1Gi", logs="512Mi"),
        "ephemeral-storage",
        [],
        {},
    )
    assert "Container main was using 1536Mi, request is 1Gi, has larger consumption" in message


def test_eviction_message_pod_level_request_names_pod() -> None:
    pod = make("web", resources={"requests": {"memory": "100Mi"}})
    message, annotations = eviction_message(pod, usage("200Mi"), "memory", [], {})
    assert "Pod web was using 200Mi, request is 100Mi, has larger consumption of memory. " in message
    assert (annotations["offending_pod"], annotations["offending_pod_usage"]) == ("web", "200Mi")


def test_node_condition_message_several_conditions_as_go_list() -> None:
    message = node_condition_message(["MemoryPressure", "DiskPressure"])
    assert message == "The node had condition: [MemoryPressure DiskPressure]. "


def test_evicted_status_disrupted_has_condition_once() -> None:
    pod = make("web", meta={"generation": 3})
    status = evicted_status(pod, PodStatus(phase="Running"), "low", NOW, disrupted=True)
    assert (status.phase, status.reason, status.message) == ("Failed", "Evicted", "low")
    again = evicted_status(pod, status, "low", LATER, disrupted=True)
    (condition,) = again.conditions
    assert (condition.type, condition.status, condition.reason, condition.message) == (
        "DisruptionTarget",
        "True",
        "TerminationByKubelet",
        "low",
    )
    assert (condition.observed_generation, condition.last_transition_time) == (3, NOW)


def test_evicted_status_own_limit_has_no_condition() -> None:
    assert evicted_status(make("web"), PodStatus(), "limit", NOW, disrupted=False).conditions == []


# Local storage


def scratch(limit: str | None) -> dict[str, object]:
    return {"name": "scratch", "emptyDir": {"sizeLimit": limit} if limit else {}}


@pytest.mark.parametrize(
    ("pod", "used", "dedicated", "expected"),
    [
        (
            make("empty-dir", volumes=[scratch("1Gi")]),
            usage(volumes={"scratch": ("1025Mi", 1)}),
            False,
            ExceededLimit("emptydirfs.limit", 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '),
        ),
        (make("empty-dir-at", volumes=[scratch("1Gi")]), usage(volumes={"scratch": ("1Gi", 1)}), False, None),
        (make("empty-dir-zero", volumes=[scratch("0")]), usage(volumes={"scratch": ("1Gi", 1)}), False, None),
        (make("no-limit", volumes=[scratch(None)]), usage(ephemeral="9Gi", rootfs="9Gi"), False, None),
        (
            # The hosts file is part of the pod's usage and of no container's (CVE-2020-8557).
            make("hosts", limits={"ephemeral-storage": "1Gi"}),
            usage(ephemeral="2Gi", rootfs="1Mi", logs="1Mi"),
            False,
            ExceededLimit(
                "ephemeralpodfs.limit",
                "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
            ),
        ),
        (
            make("container", limits={"ephemeral-storage": "1Gi"}),
            usage(ephemeral="0", rootfs="1Gi", logs="1Mi"),
            False,
            ExceededLimit(
                "ephemeralcontainerfs.limit",
                'Container main exceeded its local ephemeral storage limit "1Gi". ',
            ),
        ),
        (
            make("other-disk", limits={"ephemeral-storage": "1Gi"}),
            usage(ephemeral="0", rootfs="2Gi", logs="1Mi"),
            True,
            None,
        ),
    ],
    ids=lambda case: case.metadata.name if isinstance(case, Pod) else "",
)
def test_exceeded_limit_usage_against_limits(
    pod: Pod, used: PodUsage, dedicated: bool, expected: ExceededLimit | None
) -> None:
    assert exceeded_limit(pod, used, dedicated_imagefs=dedicated) == expected
    if expected is not None:
        assert has_storage_limits(pod)


def test_has_storage_limits_pod_without_limits_is_not_measured() -> None:
    assert not has_storage_limits(make("web", volumes=[scratch(None)], limits={"memory": "1Gi"}))
