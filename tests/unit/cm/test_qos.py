from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import ObjectMeta, Resources
from pykubelet.api.pod import Container, Pod, PodSpec, ResourceRequirements
from pykubelet.api.pod_status import NodeAllocatableResourceClaimStatus, PodStatus
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import (
    MAX_SHARES,
    MIN_QUOTA,
    MIN_SHARES,
    compute_qos_class,
    has_pod_level_resources,
    milli_cpu_of_quota,
    milli_cpu_of_shares,
    oom_score_adj,
    pod_limits,
    pod_requests,
    qos_class,
    quota_of,
    shares_of,
)

GIB = 1 << 30


def amounts(**values: str) -> Resources:
    return {name.replace("_", "-"): Quantity.parse(value) for name, value in values.items()}


def resources(requests: Resources | None = None, limits: Resources | None = None) -> ResourceRequirements:
    return ResourceRequirements(requests=requests or {}, limits=limits or {})


def container(
    name: str = "main",
    requests: Resources | None = None,
    limits: Resources | None = None,
    sidecar: bool = False,
) -> Container:
    return Container(
        name=name, resources=resources(requests, limits), restart_policy="Always" if sidecar else None
    )


def pod(*containers: Container, init: tuple[Container, ...] = (), **spec: Any) -> Pod:
    return Pod(spec=PodSpec(containers=list(containers), init_containers=list(init), **spec))


def texts(values: Resources) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


FULL = amounts(cpu="1", memory="1Gi")


@pytest.mark.parametrize(
    ("wanted", "subject"),
    [
        ("BestEffort", pod(container())),
        ("BestEffort", pod(container(requests=amounts(ephemeral_storage="1Gi")))),
        ("BestEffort", pod(container(requests=amounts(cpu="0")))),
        ("Burstable", pod(container(requests=amounts(cpu="1m")))),
        ("Burstable", pod(container(limits=amounts(cpu="1"), requests=amounts(cpu="1")))),
        ("Burstable", pod(container("main", FULL, FULL), container("other"))),
        ("Burstable", pod(container(requests=amounts(cpu="1", memory="512Mi"), limits=FULL))),
        ("Burstable", pod(container(limits=FULL))),
        ("Guaranteed", pod(container(requests=FULL, limits=FULL))),
        ("Guaranteed", pod(container(requests=FULL, limits=amounts(cpu="1000m", memory="1024Mi")))),
        ("Burstable", pod(container(requests=FULL, limits=FULL), init=(container("first"),))),
        (
            "Guaranteed",
            pod(container(requests=FULL, limits=FULL), init=(container("first", FULL, FULL),)),
        ),
        # Values of the whole pod decide alone.
        ("Guaranteed", pod(container(), resources=resources(FULL, FULL))),
        ("Burstable", pod(container(requests=FULL, limits=FULL), resources=resources(FULL))),
        ("Burstable", pod(container(), resources=resources(amounts(cpu="1"), amounts(cpu="1")))),
        ("BestEffort", pod(container(), resources=resources())),
    ],
)
def test_qos_class_container_and_pod_resources_returns_class(wanted: str, subject: Pod) -> None:
    assert qos_class(subject) == wanted


def test_qos_class_pod_level_disabled_ignores_pod_and_ephemeral_resources() -> None:
    subject = pod(container(), resources=resources(FULL, FULL))
    subject.spec.ephemeral_containers = [container("debug", FULL, FULL)]
    assert qos_class(subject, pod_level=False) == "BestEffort"


def test_qos_class_set_in_status_takes_precedence() -> None:
    subject = pod(container(requests=FULL, limits=FULL))
    subject.status = PodStatus(qos_class="Burstable")
    assert qos_class(subject) == "Burstable"
    assert compute_qos_class(subject) == "Guaranteed"


def test_pod_requests_init_and_sidecar_containers_returns_maximum() -> None:
    subject = pod(
        container("a", amounts(cpu="100m", memory="100Mi")),
        container("b", amounts(cpu="200m")),
        init=(
            container("early", amounts(cpu="500m")),
            container("sidecar", amounts(cpu="50m", memory="10Mi"), sidecar=True),
            container("late", amounts(cpu="400m", memory="300Mi")),
        ),
        overhead=amounts(cpu="10m", memory="1Mi"),
    )
    assert texts(pod_requests(subject, overhead=False)) == {"cpu": "500m", "memory": "310Mi"}
    assert texts(pod_requests(subject)) == {"cpu": "510m", "memory": "311Mi"}
    subject.spec.init_containers.pop(0)
    assert texts(pod_requests(subject, overhead=False)) == {"cpu": "450m", "memory": "310Mi"}


def test_pod_limits_overhead_without_limits_is_empty() -> None:
    subject = pod(container(), overhead=amounts(cpu="10m", memory="1Mi"))
    assert texts(pod_requests(subject)) == {"cpu": "10m", "memory": "1Mi"}
    assert pod_limits(subject) == {}
    subject.spec.containers[0].resources.limits = amounts(cpu="1", memory="0")
    assert texts(pod_limits(subject)) == {"cpu": "1010m", "memory": "0"}


def test_pod_requests_pod_level_resources_replace_container_sum() -> None:
    subject = pod(
        container("a", FULL, FULL),
        resources=resources(
            amounts(cpu="3", ephemeral_storage="1Gi"), {"hugepages-2Mi": Quantity.parse("4Mi")}
        ),
    )
    assert has_pod_level_resources(subject)
    assert texts(pod_requests(subject)) == {"cpu": "3", "memory": "1Gi"}
    assert texts(pod_requests(subject, pod_level=False)) == {"cpu": "1", "memory": "1Gi"}
    assert texts(pod_limits(subject)) == {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "4Mi"}
    assert not has_pod_level_resources(pod(container(), resources=resources(amounts(ephemeral_storage="1"))))


def test_pod_requests_and_limits_leave_pod_unchanged() -> None:
    subject = pod(container(requests=FULL, limits=FULL), overhead=FULL, resources=resources(FULL, FULL))
    pod_requests(subject)
    pod_limits(subject)
    assert texts(subject.spec.containers[0].resources.requests) == {"cpu": "1", "memory": "1Gi"}
    assert subject.spec.resources is not None
    assert texts(subject.spec.resources.limits) == {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("wanted", "subject"),
    [
        (1000, pod(container())),
        (-997, pod(container(requests=FULL, limits=FULL))),
        (999, pod(container(requests=amounts(cpu="1")))),
        (900, pod(container(requests=amounts(memory="1Gi")))),
        (3, pod(container(requests=amounts(memory="10Gi")))),
        (3, pod(container(requests=amounts(memory="100Gi")))),
        # 6 GiB for the pod, 1 of them assigned, 5 shared by two containers.
        (
            650,
            pod(
                container(requests=amounts(memory="1Gi")),
                container("b"),
                resources=resources(amounts(memory="6Gi")),
            ),
        ),
    ],
)
def test_oom_score_adj_qos_class_and_memory_request_returns_score(wanted: int, subject: Pod) -> None:
    assert oom_score_adj(subject, subject.spec.containers[0], 10 * GIB) == wanted


def test_oom_score_adj_sidecar_not_above_app_containers() -> None:
    sidecar = container("proxy", amounts(memory="100Mi"), sidecar=True)
    served = container("a", amounts(memory="2Gi")), container("b", amounts(memory="3Gi"))
    subject = pod(*served, init=(sidecar,))
    assert oom_score_adj(subject, sidecar, 10 * GIB) == 800
    assert oom_score_adj(subject, served[0], 10 * GIB) == 800


def test_oom_score_adj_node_critical_static_pod_is_minus_997() -> None:
    subject = pod(container(requests=amounts(cpu="1")), priority_class_name="system-node-critical")
    assert oom_score_adj(subject, subject.spec.containers[0], 10 * GIB) == 999
    subject.metadata = ObjectMeta(annotations={"kubernetes.io/config.source": "file"})
    assert oom_score_adj(subject, subject.spec.containers[0], 10 * GIB) == -997


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_oom_score_adj_burstable_between_3_and_999(request: int, capacity: int) -> None:
    subject = pod(container(requests={"cpu": Quantity.from_units(1), "memory": Quantity.from_units(request)}))
    assert 3 <= oom_score_adj(subject, subject.spec.containers[0], capacity) <= 999


@pytest.mark.parametrize(
    ("milli", "shares"),
    [(0, 2), (1, 2), (2, 2), (3, 3), (100, 102), (250, 256), (1000, 1024), (10**9, 262144)],
)
def test_shares_of_milli_cpu_returns_shares(milli: int, shares: int) -> None:
    assert shares_of(milli) == shares


@pytest.mark.parametrize(
    ("milli", "period", "quota"),
    [
        (0, 100_000, 0),
        (1, 100_000, 1000),
        (10, 100_000, 1000),
        (500, 100_000, 50_000),
        (1500, 10_000, 15_000),
    ],
)
def test_quota_of_milli_cpu_returns_quota(milli: int, period: int, quota: int) -> None:
    assert quota_of(milli, period) == quota


@given(st.integers(0, 1 << 40))
def test_shares_of_within_kernel_bounds_and_roundtrips(milli: int) -> None:
    shares = shares_of(milli)
    assert MIN_SHARES <= shares <= MAX_SHARES
    assert shares_of(milli_cpu_of_shares(shares)) == shares


@given(st.integers(1, 1 << 40), st.integers(1_000, 1_000_000))
def test_quota_of_at_least_kernel_minimum_and_roundtrips(milli: int, period: int) -> None:
    quota = quota_of(milli, period)
    assert quota >= MIN_QUOTA
    if quota > MIN_QUOTA and period >= 1000:
        assert milli_cpu_of_quota(quota, period) <= milli < milli_cpu_of_quota(quota, period) + 2


def test_pod_requests_resources_of_claims_below_pod_level_requests() -> None:
    claim = NodeAllocatableResourceClaimStatus(
        resources={"cpu": Quantity.parse("1"), "example.com/gpu": Quantity.parse("2")}
    )
    one = ResourceRequirements(requests={"cpu": Quantity.parse("500m")})
    pod = Pod(
        spec=PodSpec(containers=[Container(name="a", resources=one)]),
        status=PodStatus(node_allocatable_resource_claim_statuses=[claim, claim]),
    )
    amounts = {name: str(amount) for name, amount in pod_requests(pod, claims=True).items()}
    assert amounts == {"cpu": "2500m", "example.com/gpu": "4"}
    assert {name: str(amount) for name, amount in pod_requests(pod).items()} == {"cpu": "500m"}
    pod.spec.resources = ResourceRequirements(requests={"cpu": Quantity.parse("3")})
    assert str(pod_requests(pod, claims=True)["cpu"]) == "3"


def test_milli_cpu_of_quota_unlimited_is_zero() -> None:
    assert milli_cpu_of_quota(-1, 100_000) == 0
    assert milli_cpu_of_quota(50_000, 100_000) == 500
    assert milli_cpu_of_shares(1) == 0
    assert milli_cpu_of_shares(102) == 100
