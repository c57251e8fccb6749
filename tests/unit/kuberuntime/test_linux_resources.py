from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.linux_resources import (
    container_resources,
    huge_page_size,
    overhead_resources,
    sandbox_resources,
)
from pykubelet.kuberuntime.configuration.options import (
    CpusetAssignment,
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from tests.support.containers import amounts, make_container, make_pod

GIB = 1 << 30


def gates(**wanted: bool) -> FeatureGates:
    result = FeatureGates().with_overrides(wanted)
    assert not result.problems
    return result


NO_POD_LEVEL = gates(PodLevelResources=False, InPlacePodLevelResourcesVerticalScaling=False)


def container_of(requests: dict[str, str], limits: dict[str, str]) -> Container:
    return make_container(
        resources=ResourceRequirements(requests=amounts(**requests), limits=amounts(**limits))
    )


def made(
    requests: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    pod: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **node: Any,
) -> cri.LinuxContainerResources:
    container = container_of(requests or {}, limits or {})
    node.setdefault("memory_capacity", 10 * GIB)
    return container_resources(
        make_pod(container, **(pod or {})),
        container,
        RunContainerOptions(node=RuntimeNodeOptions(**node), **(facts or {})),
    )


@pytest.mark.parametrize(
    ("requests", "limits", "shares", "quota", "memory"),
    [
        ({}, {}, 2, 0, 0),
        ({"cpu": "100m"}, {}, 102, 0, 0),
        ({"cpu": "0"}, {"cpu": "1"}, 2, 100_000, 0),
        ({}, {"cpu": "250m", "memory": "48Mi"}, 256, 25_000, 50331648),
        ({"cpu": "1m"}, {"cpu": "1m"}, 2, 1_000, 0),
        ({"cpu": "1000"}, {"cpu": "1000"}, 262144, 100_000_000, 0),
    ],
)
def test_container_resources_cpu_and_memory_converted(
    requests: dict[str, str], limits: dict[str, str], shares: int, quota: int, memory: int
) -> None:
    message = made(requests, limits)
    assert (message.cpu_shares, message.cpu_quota, message.cpu_period) == (shares, quota, 100_000)
    assert message.memory_limit_in_bytes == memory
    assert message.memory_swap_limit_in_bytes == 0
    assert not message.unified


def test_container_resources_quota_option_and_period_applied() -> None:
    off = made(limits={"cpu": "1"}, cpu_quota=False)
    assert (off.cpu_quota, off.cpu_period) == (0, 0)
    own = made(limits={"cpu": "1"}, cpu_period=10_000)
    assert (own.cpu_quota, own.cpu_period) == (10_000, 10_000)
    gated = made(limits={"cpu": "1"}, cpu_period=10_000, gates=gates(CustomCPUCFSQuotaPeriod=False))
    assert (gated.cpu_quota, gated.cpu_period) == (100_000, 100_000)


def test_container_resources_exclusive_cpus_have_no_quota() -> None:
    grant = {"cpuset": CpusetAssignment("2-3", "0", exclusive=True)}
    message = made(limits={"cpu": "2"}, facts=grant)
    assert (message.cpu_quota, message.cpu_period) == (-1, 100_000)
    assert (message.cpuset_cpus, message.cpuset_mems) == ("2-3", "0")
    old = made(limits={"cpu": "2"}, facts=grant, gates=gates(DisableCPUQuotaWithExclusiveCPUs=False))
    assert old.cpu_quota == 200_000


def test_container_resources_pod_level_limits_bound_unlimited_containers() -> None:
    pod = {"resources": ResourceRequirements(limits=amounts(cpu="2", memory="1Gi"))}
    message = made(limits={"cpu": "1"}, pod=pod)
    assert (message.cpu_quota, message.memory_limit_in_bytes) == (100_000, GIB)
    alone = made(limits={"cpu": "1"}, pod=pod, gates=NO_POD_LEVEL)
    assert alone.memory_limit_in_bytes == 0


@pytest.mark.parametrize(
    ("behavior", "requests", "limits", "pod", "swap"),
    [
        ("", {"memory": "1Gi"}, {}, {}, "0"),
        ("NoSwap", {"memory": "1Gi"}, {}, {}, "0"),
        ("LimitedSwap", {"memory": "1Gi"}, {}, {}, str(GIB // 5)),
        ("LimitedSwap", {"memory": "1Gi"}, {"memory": "2Gi"}, {}, str(GIB // 5)),
        ("LimitedSwap", {"memory": "1Gi", "cpu": "1"}, {"memory": "1Gi"}, {}, "0"),
        ("LimitedSwap", {"cpu": "1"}, {}, {}, "0"),
        ("LimitedSwap", {}, {}, {}, "0"),
        ("LimitedSwap", {"memory": "100Gi"}, {}, {}, "0"),
        ("LimitedSwap", {"memory": "1Gi"}, {}, {"priority": 2_000_000_000}, "0"),
    ],
)
def test_container_resources_swap_behavior_cgroup_v2_sets_swap_max(
    behavior: str, requests: dict[str, str], limits: dict[str, str], pod: dict[str, Any], swap: str
) -> None:
    message = made(
        requests,
        limits,
        pod,
        cgroup_v2=True,
        swap_controller=True,
        swap_behavior=behavior,
        swap_capacity=2 * GIB,
    )
    assert dict(message.unified) == {"memory.swap.max": swap}
    assert message.memory_swap_limit_in_bytes == 0


def test_container_resources_swap_cgroup_v1_disabled() -> None:
    message = made(
        {"memory": "1Gi"},
        {"memory": "2Gi"},
        swap_controller=True,
        swap_behavior="LimitedSwap",
        swap_capacity=GIB,
    )
    assert message.memory_swap_limit_in_bytes == 2 * GIB
    assert not message.unified


def test_container_resources_group_oom_kill_sets_memory_oom_group() -> None:
    assert dict(made(cgroup_v2=True, single_process_oom_kill=False).unified) == {"memory.oom.group": "1"}
    assert not made(cgroup_v2=True).unified
    assert not made(single_process_oom_kill=False).unified


MEMORY_QOS: dict[str, Any] = {
    "cgroup_v2": True,
    "gates": gates(MemoryQoS=True),
    "unreserved_memory": 8 << 30,
}


@pytest.mark.parametrize(
    ("requests", "limits", "policy", "wanted"),
    [
        ({}, {}, "None", {"memory.min": "0", "memory.low": "0"}),
        (
            {"memory": "1Gi"},
            {"memory": "2Gi"},
            "None",
            {"memory.min": "0", "memory.low": "0", "memory.high": "2040107008"},
        ),
        (
            {"memory": "1Gi"},
            {"memory": "2Gi"},
            "TieredReservation",
            {"memory.low": "1073741824", "memory.high": "2040107008"},
        ),
        # Without a limit the ceiling is what the node has: 1 GiB + 0.9 * 7 GiB, in whole pages.
        (
            {"memory": "1Gi"},
            {},
            "TieredReservation",
            {"memory.low": "1073741824", "memory.high": "7838314496"},
        ),
        (
            {"memory": "1Gi", "cpu": "1"},
            {"memory": "1Gi", "cpu": "1"},
            "TieredReservation",
            {"memory.min": "1073741824"},
        ),
        ({"memory": "9Gi"}, {}, "None", {"memory.min": "0", "memory.low": "0"}),
    ],
)
def test_container_resources_memory_qos_sets_min_low_high(
    requests: dict[str, str], limits: dict[str, str], policy: str, wanted: dict[str, str]
) -> None:
    message = made(requests, limits, memory_reservation_policy=policy, **MEMORY_QOS)
    assert dict(message.unified) == wanted


def test_container_resources_memory_qos_requires_gate_and_cgroup_v2() -> None:
    assert not made({"memory": "1Gi"}, cgroup_v2=True).unified
    assert not made({"memory": "1Gi"}, gates=gates(MemoryQoS=True)).unified


def test_container_resources_unrequested_huge_pages_limited_to_zero() -> None:
    container = make_container(
        resources=ResourceRequirements(limits={"hugepages-2Mi": Quantity.parse("4Mi")})
    )
    pod = make_pod(
        container,
        resources=ResourceRequirements(
            limits={"hugepages-2Mi": Quantity.parse("8Mi"), "hugepages-1Gi": Quantity.parse("1Gi")}
        ),
    )

    def limits(pod: Pod, wanted: FeatureGates) -> list[tuple[str, int]]:
        node = RuntimeNodeOptions(huge_page_sizes=("2MB", "1GB", "64KB"), gates=wanted)
        message = container_resources(pod, container, RunContainerOptions(node=node))
        return [(limit.page_size, limit.limit) for limit in message.hugepage_limits]

    assert limits(pod, gates()) == [("2MB", 4 << 20), ("1GB", GIB), ("64KB", 0)]
    assert limits(pod, NO_POD_LEVEL) == [("2MB", 4 << 20), ("1GB", 0), ("64KB", 0)]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hugepages-2Mi", "2MB"),
        ("hugepages-2048Ki", "2MB"),
        ("hugepages-1Gi", "1GB"),
        ("hugepages-64Ki", "64KB"),
        ("hugepages-1", "1B"),
        ("hugepages-", None),
        ("hugepages-x", None),
        ("hugepages-0", None),
        ("hugepages-1025", None),
        ("memory", None),
    ],
)
def test_huge_page_size_resource_name_returns_size(name: str, size: str | None) -> None:
    assert huge_page_size(name) == size


@given(st.text(max_size=10))
def test_huge_page_size_any_suffix_never_raises(suffix: str) -> None:
    huge_page_size(f"hugepages-{suffix}")


def test_sandbox_resources_excludes_overhead() -> None:
    container = container_of({"cpu": "100m"}, {"cpu": "500m", "memory": "64Mi"})
    pod = make_pod(container, container_of({}, {"cpu": "500m"}), overhead=amounts(cpu="250m", memory="1Mi"))
    message = sandbox_resources(pod, RunSandboxOptions(node=RuntimeNodeOptions()))
    assert (message.cpu_shares, message.cpu_quota, message.cpu_period) == (102, 100_000, 100_000)
    assert message.memory_limit_in_bytes == 64 << 20
    overhead = overhead_resources(pod, RuntimeNodeOptions())
    assert (overhead.cpu_shares, overhead.cpu_quota, overhead.memory_limit_in_bytes) == (256, 25_000, 1 << 20)
    assert overhead_resources(make_pod(container), RuntimeNodeOptions()) == cri.LinuxContainerResources()
    exclusive = sandbox_resources(pod, RunSandboxOptions(node=RuntimeNodeOptions(), exclusive_cpus=True))
    assert exclusive.cpu_quota == -1
