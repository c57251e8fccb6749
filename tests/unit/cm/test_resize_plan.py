"""What is done to resize a pod, in which order, and what is not done: memory in use stays."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod, ResourceRequirements
from pykubelet.cm.cgroups.values import shares_of_weight, weight_of_shares
from pykubelet.cm.resize import (
    NO_RESIZE,
    ContainerResize,
    ContainerSizes,
    PodLimits,
    PodResources,
    Scope,
    effective_resources,
    order_resizes,
    plan_resize,
    pod_steps,
    resources_of,
    shrink_problem,
    sizes_of,
    with_larger_requests,
    with_resources,
    with_sizes,
)

ALL = Scope()
RESTART = [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]
SMALL = {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "64Mi"}}
MORE_CPU = {"requests": {"cpu": "150m", "memory": "32Mi"}, "limits": {"cpu": "300m", "memory": "64Mi"}}
MORE = {"requests": {"cpu": "150m", "memory": "64Mi"}, "limits": {"cpu": "300m", "memory": "128Mi"}}
MI = 1024**2


def pod(
    main: dict[str, Any], *, policy: Any = (), beside: Any = None, init: Any = None, pod_level: Any = None
) -> Pod:
    initial = [("beside", beside, {"restartPolicy": "Always"}), ("init", init, {})]
    document = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {
            "containers": [{"name": "main", "resources": main, "resizePolicy": list(policy)}],
            "initContainers": [
                {"name": name, "resources": parts, **more}
                for name, parts, more in initial
                if parts is not None
            ],
            **({"resources": pod_level} if pod_level is not None else {}),
        },
    }
    return from_document(Pod, document)


def needs(document: dict[str, Any]) -> ResourceRequirements:
    return from_document(ResourceRequirements, document)


class TestViews:
    def test_with_resources_equal_returns_same_pod(self) -> None:
        wished = pod(SMALL, beside=SMALL)
        assert with_resources(wished, resources_of(wished, ALL), ALL) is wished
        equal = pod({"requests": {"cpu": "0.1", "memory": "32Mi"}, "limits": SMALL["limits"]}, beside=SMALL)
        assert with_resources(equal, resources_of(wished, ALL), ALL) is equal

    def test_with_resources_different_replaces_resources_only(self) -> None:
        before, after = pod(SMALL, beside=SMALL, pod_level=SMALL), pod(MORE, beside=MORE, pod_level=MORE)
        after.metadata.labels["new"] = "label"
        seen = with_resources(after, resources_of(before, ALL), ALL)
        assert seen.spec.containers[0].resources == needs(SMALL)
        assert seen.spec.init_containers[0].resources == needs(SMALL)
        assert seen.spec.resources == needs(SMALL)
        assert seen.metadata.labels == {"new": "label"}
        assert after.spec.containers[0].resources == needs(MORE)  # others hold that object

    def test_with_resources_scope_disabled_ignores_pod_level_and_init(self) -> None:
        before, after = pod(SMALL, init=SMALL, pod_level=SMALL), pod(SMALL, init=MORE, pod_level=MORE)
        none = Scope(pod_level=False, init=False)
        assert resources_of(before, none).containers.keys() == {"main"}
        assert with_resources(after, resources_of(before, none), none) is after

    def test_effective_resources_pod_level_limits_bound_containers(self) -> None:
        whole = {"limits": {"cpu": "1", "memory": "256Mi"}}
        made = pod({"limits": {"cpu": "200m"}}, pod_level=whole)
        main = made.spec.containers[0]
        assert effective_resources(main, made, ALL) == needs({"limits": {"cpu": "200m", "memory": "256Mi"}})
        assert effective_resources(main, made, Scope(pod_level=False)) is main.resources
        assert sizes_of(main.resources, made.spec.resources) == ContainerSizes(256 * MI, 0, 200, 0)

    def test_with_larger_requests_takes_larger_of_allocated_and_actuated(self) -> None:
        promised, had = pod(SMALL, beside=MORE), pod(MORE, beside=SMALL)
        counted = with_larger_requests(promised, resources_of(had, ALL), ALL)
        assert [
            one.resources.requests for one in (*counted.spec.containers, *counted.spec.init_containers)
        ] == [
            needs(MORE).requests,
            needs(MORE).requests,
        ]
        assert with_larger_requests(promised, resources_of(promised, ALL), ALL) is promised

    @given(st.tuples(*(st.integers(0, 2**20) for _ in range(4))))
    def test_with_sizes_roundtrips(self, numbers: tuple[int, int, int, int]) -> None:
        sizes = ContainerSizes(*numbers)
        container = pod({"limits": {"ephemeral-storage": "1Gi"}}).spec.containers[0]
        sized = with_sizes(container, sizes)
        assert sizes_of(sized.resources, None) == sizes
        assert str(sized.resources.limits["ephemeral-storage"]) == "1Gi"

    def test_with_sizes_zero_request_not_replaced_by_limit(self) -> None:
        own = needs({"requests": {"cpu": "0"}, "limits": {"cpu": "100m"}})
        container = pod({"requests": {"cpu": "0"}, "limits": {"cpu": "100m"}}).spec.containers[0]
        assert with_sizes(container, sizes_of(own, None)).resources == own
        # Nor in the round of memory, while the new request is still to come.
        growing = pod({"requests": {"cpu": "50m"}, "limits": {"cpu": "100m"}}).spec.containers[0]
        assert with_sizes(growing, sizes_of(own, None)).resources == own


class TestPlan:
    @pytest.mark.parametrize(
        ("wished", "has", "running", "resized", "restarted"),
        [
            (pod(SMALL), pod(SMALL), {"main"}, set(), set()),
            (pod(MORE), pod(SMALL), {"main"}, {"main"}, set()),
            (pod(MORE), pod(SMALL), set(), set(), set()),
            (pod(MORE, policy=RESTART), pod(SMALL), {"main"}, {"main"}, {"main"}),
            (pod(MORE_CPU, policy=RESTART), pod(SMALL), {"main"}, {"main"}, set()),
            (pod(SMALL, beside=MORE), pod(SMALL, beside=SMALL), {"main", "beside"}, {"beside"}, set()),
            (pod(SMALL, init=MORE), pod(SMALL, init=SMALL), {"init"}, {"init"}, set()),
        ],
    )
    def test_plan_resize_changed_containers_resized_or_restarted(
        self, wished: Pod, has: Pod, running: set[str], resized: set[str], restarted: set[str]
    ) -> None:
        plan = plan_resize(wished, running, resources_of(has, ALL), ALL)
        assert plan.containers.keys() == resized
        assert {name for name, one in plan.containers.items() if one.restart} == restarted
        assert bool(plan) == bool(resized)

    def test_plan_resize_unknown_actuated_resources_set_without_restart(self) -> None:
        plan = plan_resize(pod(MORE, policy=RESTART), {"main"}, None, ALL)
        assert plan.containers["main"].current is None
        assert not plan.containers["main"].restart
        assert order_resizes([*plan.containers.values()], "memory") == []
        assert order_resizes([*plan.containers.values()], "cpu") == [*plan.containers.values()]

    def test_plan_resize_pod_level_change_resizes_containers(self) -> None:
        before, after = pod({}, pod_level=SMALL), pod({}, pod_level=MORE)
        plan = plan_resize(after, {"main"}, resources_of(before, ALL), ALL)
        assert plan.pod_level
        assert plan.containers["main"].desired.memory_limit == 128 * MI
        assert plan_resize(before, {"main"}, resources_of(before, ALL), ALL) == NO_RESIZE
        assert not plan_resize(after, {"main"}, resources_of(before, Scope(False)), Scope(False))

    def test_container_resize_after_memory_leaves_cpu_unchanged(self) -> None:
        plan = plan_resize(pod(MORE), {"main"}, resources_of(pod(SMALL), ALL), ALL)
        one = plan.containers["main"]
        assert one.after("memory") == ContainerSizes(128 * MI, 64 * MI, 200, 100)
        assert one.after("cpu") == one.desired == ContainerSizes(128 * MI, 64 * MI, 300, 150)


sizes = st.builds(ContainerSizes, *(st.integers(0, 5) for _ in range(4)))
resizes = st.lists(st.builds(ContainerResize, st.text("ab", max_size=2), sizes, sizes), max_size=5)
limits = st.builds(PodLimits, st.integers(1, 9), st.integers(-1, 9), st.integers(2, 9))


class TestOrder:
    @given(resizes)
    def test_order_resizes_decreases_before_increases(self, many: list[ContainerResize]) -> None:
        for resource in ("memory", "cpu"):
            order = [one.change(resource) > 0 for one in order_resizes(many, resource)]
            assert order == sorted(order)
            assert len(order) == sum(bool(one.change(resource)) for one in many)

    @given(limits, limits)
    def test_pod_steps_increases_before_containers_decreases_after(
        self, now: PodLimits, new: PodLimits
    ) -> None:
        known, wanted = (
            {**limits._asdict(), "quota": math.inf if limits.quota < 0 else limits.quota}
            for limits in (now, new)
        )
        for resource in ("memory", "cpu"):
            before, after = pod_steps(now, new, resource)
            assert all(wanted[part] > known[part] for part in before)
            assert all(wanted[part] < known[part] for part in after)
            differing = {part for part in known if (part == "memory") == (resource == "memory")}
            assert {*before, *after} == {part for part in differing if wanted[part] != known[part]}

    def test_pod_steps_cpu_request_never_above_limit(self) -> None:
        small, large = PodLimits(1, 10, 10), PodLimits(1, 20, 20)
        assert pod_steps(small, large, "cpu") == (["quota", "shares"], [])
        assert pod_steps(large, small, "cpu") == ([], ["shares", "quota"])

    def test_pod_steps_first_quota_set_after_containers(self) -> None:
        # The kernel takes no quota of a pod that is below that of one of its containers.
        assert pod_steps(PodLimits(1, -1, 10), PodLimits(1, 20, 10), "cpu") == ([], ["quota"])

    @given(st.integers(1, 10_000))
    def test_weight_of_shares_roundtrips(self, weight: int) -> None:
        assert weight_of_shares(shares_of_weight(weight)) == weight


def shrinking(limit: int, before: int = 100) -> ContainerResize:
    return ContainerResize("main", ContainerSizes(memory_limit=limit), ContainerSizes(memory_limit=before))


POD = "attempting to set pod memory limit ({}) below current usage ({})"
MAIN = 'attempting to set container "main" memory limit ({}) below current usage ({})'


@pytest.mark.parametrize(
    ("limit", "now", "usage", "resizes", "usages", "problem"),
    [
        (50, 100, 40, [shrinking(50)], {"main": 40}, ""),
        (50, 100, 60, [], {}, POD.format(50, 60)),
        (50, 100, 50, [], {}, POD.format(50, 50)),
        (None, 100, 60, [], {}, ""),
        (100, 50, 60, [], {}, ""),
        (50, 100, None, [], {}, "missing pod memory usage"),
        (None, 0, None, [shrinking(50)], {"main": 60}, MAIN.format(50, 60)),
        (None, 0, None, [shrinking(50, before=0)], {"main": 60}, MAIN.format(50, 60)),
        (None, 0, None, [shrinking(50)], {}, 'missing container "main" memory usage'),
        (None, 0, None, [shrinking(0)], {"main": 60}, ""),
        (None, 0, None, [ContainerResize("main", ContainerSizes(memory_limit=50))], {"main": 60}, ""),
        (50, 99, 60, [shrinking(50)], {"main": 55}, f"[{POD.format(50, 60)}, {MAIN.format(50, 55)}]"),
    ],
)
def test_shrink_problem_limit_below_usage_returns_message(
    limit: int | None,
    now: int,
    usage: int | None,
    resizes: list[ContainerResize],
    usages: dict[str, int],
    problem: str,
) -> None:
    expected = f"cannot decrease memory limits: {problem}" if problem else ""
    assert shrink_problem(limit, now, usage, resizes, usages) == expected


def test_plan_resize_container_without_resources_returns_no_resize() -> None:
    assert plan_resize(pod({}), {"main"}, PodResources({"main": ResourceRequirements()}), ALL) == NO_RESIZE
