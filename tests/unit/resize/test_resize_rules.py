"""What becomes of a wish for other resources: the rules and the words, as tables."""

from datetime import UTC, datetime
from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cm.resize import Scope
from pykubelet.kuberuntime.observed import ActualResources, ContainerPhase, ObservedContainer
from pykubelet.resize.feasibility import ResizeRules, infeasible, requested_changes, summary, urgency
from pykubelet.status.containers import actual_resources

EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
MI = 1024**2


def pod(
    cpu: str = "100m",
    memory: str = "100",
    *,
    limits: dict[str, str] | None = None,
    guaranteed: bool = False,
    restarts: bool = False,
    **spec: Any,
) -> Pod:
    requests = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    resources: dict[str, Any] = {"requests": requests, "limits": requests if guaranteed else limits or {}}
    policy = [{"resourceName": "memory", "restartPolicy": "RestartContainer"}] if restarts else []
    main = {"name": "main", "resources": resources, "resizePolicy": policy}
    document = {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [main], **spec}}
    return from_document(Pod, document)


def guaranteed(cpu: str = "100m", memory: str = "100") -> Pod:
    return pod(cpu, memory, guaranteed=True)


SWAPS = ResizeRules(may_swap=lambda pod, container: True)
STATIC = ResizeRules(static_cpus=True, static_memory=True)
WHOLE: dict[str, Any] = {"resources": {"requests": {"cpu": "1"}}}


@pytest.mark.parametrize(
    ("wished", "allocated", "rules", "detail", "words"),
    [
        (pod("200m"), pod(), ResizeRules(), None, ""),
        (guaranteed("200m"), guaranteed(), ResizeRules(), None, ""),
        (
            guaranteed("200m"),
            guaranteed(),
            STATIC,
            "guaranteed_pod_cpu_manager_static_policy",
            'Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static"',
        ),
        (
            guaranteed(memory="200"),
            guaranteed(),
            STATIC,
            "guaranteed_pod_memory_manager_static_policy",
            'Resize is infeasible for Guaranteed Pods alongside Memory Manager policy "Static"',
        ),
        (guaranteed(memory="200"), guaranteed(), ResizeRules(static_cpus=True), None, ""),
        (pod("200m"), pod(), STATIC, None, ""),
        (
            pod(memory="200"),
            pod(),
            SWAPS,
            "swap_limitation",
            "In-place resize of containers with swap is not supported.",
        ),
        (pod("200m"), pod(), SWAPS, None, ""),
        (pod(memory="200", restarts=True), pod(restarts=True), SWAPS, None, ""),
        (
            pod(**WHOLE),
            pod(),
            ResizeRules(scope=Scope(pod_level=False)),
            "plr_feature_gate_off",
            "InPlacePodLevelResourcesVerticalScaling is disabled",
        ),
    ],
)
def test_infeasible_returns_upstream_detail_and_message(
    wished: Pod, allocated: Pod, rules: ResizeRules, detail: str | None, words: str
) -> None:
    found = infeasible(wished, allocated, rules)
    assert (found.detail if found else None, found.message if found else "") == (detail, words)


def test_urgency_orders_by_decrease_priority_qos_and_time() -> None:
    order = [
        urgency(pod("50m"), pod(), LATE),  # asks for less
        urgency(pod("200m", priority=100), pod(), LATE),
        urgency(guaranteed("200m"), guaranteed(), LATE),
        urgency(pod("200m"), pod(), EARLY),
        urgency(pod("200m"), pod(), LATE),
        urgency(pod("200m"), pod(), None),
        urgency(pod(memory="200", priority=-1), pod(), EARLY),
    ]
    assert order == sorted(order)
    assert len(set(order)) == len(order)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (pod(), pod(), []),
        (pod(), pod("200m"), [("cpu", "requests", "increase")]),
        (pod("200m"), pod("0.1"), [("cpu", "requests", "decrease")]),
        (pod(), pod(limits={"memory": "200"}), [("memory", "limits", "add")]),
        (
            pod(limits={"memory": "200"}),
            pod(memory=""),
            [("memory", "requests", "remove"), ("memory", "limits", "remove")],
        ),
    ],
)
def test_requested_changes_returns_operation_per_resource(
    before: Pod, after: Pod, expected: list[tuple[str, str, str]]
) -> None:
    assert list(requested_changes(before, after, Scope())) == expected


def test_summary_event_message_equals_upstream() -> None:
    several = pod(limits={"cpu": "200m"})
    several.spec.init_containers = pod("", "100").spec.containers
    several.spec.init_containers[0].name = "c0"
    assert summary("Pod resize started", several, 2) == (
        'Pod resize started: {"initContainers":[{"name":"c0","resources":{"requests":{"memory":"100"}}}],'
        '"containers":[{"name":"main","resources":{"limits":{"cpu":"200m"},'
        '"requests":{"cpu":"100m","memory":"100"}}}],"generation":2}'
    )
    assert summary("Pod resize error", pod("", ""), 1, "a < b") == (
        'Pod resize error: {"containers":[{"name":"main","resources":{}}],"generation":1,'
        '"error":"a \\u003c b"}'
    )


def seen(phase: ContainerPhase = "running", told: ActualResources | None = None) -> ObservedContainer:
    return ObservedContainer(id="c", name="main", phase=phase, resources=told)


TOLD = ActualResources(cpu_request=100, cpu_limit=200, memory_limit=64 * MI)
OLD = pod(memory="32Mi", limits={"cpu": "200m", "memory": "64Mi"})
NEW = pod("250m", "48Mi", limits={"cpu": "500m", "memory": "128Mi"})


@pytest.mark.parametrize(
    ("promised", "container", "actuated", "limits", "requests"),
    [
        # Nothing is being resized: the author's own words, whatever the runtime can tell.
        (OLD, seen(), OLD, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "32Mi"}),
        (OLD, seen(told=TOLD), OLD, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "32Mi"}),
        (OLD, seen(), None, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "32Mi"}),
        # In the middle of it: what it was set to, or what the runtime tells.
        (NEW, seen(), OLD, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "32Mi"}),
        (NEW, seen(told=TOLD), OLD, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "32Mi"}),
        (NEW, seen(told=TOLD), NEW, {"cpu": "200m", "memory": "64Mi"}, {"cpu": "100m", "memory": "48Mi"}),
        # One that does not run has what it will have.
        (NEW, seen("exited"), OLD, {"cpu": "500m", "memory": "128Mi"}, {"cpu": "250m", "memory": "48Mi"}),
        # A limit that comes anew is not there yet.
        (NEW, seen(), pod(memory="32Mi"), {}, {"cpu": "100m", "memory": "32Mi"}),
        # The kernel's least stands for anything below.
        (
            pod("1m", ""),
            seen(told=ActualResources(cpu_request=2)),
            pod("1m", ""),
            {},
            {"cpu": "1m"},
        ),
        (pod("", ""), seen(told=ActualResources(cpu_request=2)), pod("", ""), {}, {}),
    ],
)
def test_actual_resources_resize_in_progress_returns_actuated_values(
    promised: Pod,
    container: ObservedContainer,
    actuated: Pod | None,
    limits: dict[str, str],
    requests: dict[str, str],
) -> None:
    known = actuated.spec.containers[0].resources if actuated is not None else None
    found = actual_resources(promised.spec.containers[0].resources, container, known)
    assert {name: str(amount) for name, amount in found.limits.items()} == limits
    assert {name: str(amount) for name, amount in found.requests.items()} == requests
