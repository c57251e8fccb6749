"""What becomes of a status in the API server: whose word counts, and what never goes back."""

import copy
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import (
    AddressStatus,
    ContainerState,
    NodeAllocatableResourceClaimStatus,
    PodCondition,
    PodStatus,
    StatusResources,
)
from pykubelet.api.quantity import Quantity
from pykubelet.status.compute import OWNED, final_status
from pykubelet.status.patch import MESSAGE_BYTES, merged_status, status_patch
from tests.support.pods import (
    LATER,
    NOW,
    condition,
    container,
    ended,
    make_pod,
    make_status,
    running,
    waiting,
)
from tests.support.strategic import apply_patch


def merge(theirs: PodStatus, ours: PodStatus, *, pod: Pod | None = None, may_run: bool = False) -> PodStatus:
    return merged_status(pod or make_pod(), theirs, ours, may_run=may_run, now=LATER)


@pytest.mark.parametrize(
    ("theirs", "ours", "may_run", "phase"),
    [
        ("Pending", "Running", True, "Running"),
        ("Running", "Pending", True, "Pending"),
        ("Running", "Failed", False, "Failed"),
        # As long as something may run, it is not said that the pod has ended.
        ("Running", "Failed", True, "Running"),
        ("Pending", "Succeeded", True, "Pending"),
        # What was once said of a pod's end stays.
        ("Succeeded", "Running", True, "Succeeded"),
        ("Failed", "Succeeded", False, "Failed"),
    ],
)
def test_merged_status_terminal_phase_stays_and_waits_for_containers(
    theirs: str, ours: str, may_run: bool, phase: str
) -> None:
    merged = merge(
        make_status(theirs, reason="T", message="t"),
        make_status(ours, reason="O", message="o"),
        may_run=may_run,
    )
    assert merged.phase == phase
    whose = "T" if phase == theirs != ours else "O"
    assert (merged.reason, merged.message) == (whose, whose.lower())


def test_merged_status_static_pod_runs_again_after_terminal_phase() -> None:
    """Verify that the mirror pod of a static pod shows it as Running after a node shutdown and a boot."""
    pod = make_pod()
    pod.metadata.annotations = {"kubernetes.io/config.source": "file"}
    theirs = PodStatus(phase="Failed", reason="Terminated", message="shutdown")
    merged = merged_status(pod, theirs, PodStatus(phase="Running"), may_run=True, now=NOW)
    assert (merged.phase, merged.reason, merged.message) == ("Running", "", "")


def test_merged_status_terminated_in_api_server_is_not_ready() -> None:
    merged = merge(make_status("Failed", reason="Evicted"), make_status("Running"))
    ready = {c.type: c for c in merged.conditions}["Ready"]
    assert (ready.status, ready.reason, ready.last_transition_time) == ("False", "PodFailed", LATER)
    assert {c.type: c.reason for c in merge(make_status("Succeeded"), make_status("Running")).conditions} == {
        "Ready": "PodCompleted",
        "ContainersReady": "PodCompleted",
    }


def test_merged_status_foreign_conditions_unchanged() -> None:
    theirs = make_status(conditions=[condition("example.com/gate", "False"), condition("Ready", "False")])
    ours = make_status(conditions=[condition("example.com/gate", "True"), condition("Ready", "True")])
    merged = merge(theirs, ours)
    assert [(c.type, c.status) for c in merged.conditions] == [
        ("example.com/gate", "False"),
        ("Ready", "True"),
    ]
    # One that others have removed does not come back by us.
    assert [c.type for c in merge(make_status(conditions=[]), ours).conditions] == ["Ready"]


def test_merged_status_disruption_target_added_only_with_terminal_phase() -> None:
    ours = make_status("Failed", conditions=[condition("DisruptionTarget")])
    assert not merge(make_status(conditions=[]), ours, may_run=True).conditions
    assert [c.type for c in merge(make_status(conditions=[]), ours).conditions] == ["DisruptionTarget"]


@pytest.mark.parametrize(
    ("policy", "theirs", "ours", "kept"),
    [
        ("Always", ended(1), running(), False),
        ("Never", ended(0), running(), True),
        ("Never", ended(1), waiting(), True),
        ("OnFailure", ended(1), running(), False),
        ("OnFailure", ended(0), running(), True),
        ("Never", running(), waiting(), False),
        ("Never", ended(1), ended(2), False),
    ],
)
def test_merged_status_container_terminated_for_good_stays_terminated(
    policy: str, theirs: ContainerState, ours: ContainerState, kept: bool
) -> None:
    pod = make_pod(policy=policy, init=("first",))
    for field in ("container_statuses", "init_container_statuses"):
        name = "main" if field == "container_statuses" else "first"
        before, after = make_status(), make_status()
        setattr(before, field, [container(name, theirs)])
        setattr(after, field, [container(name, ours)])
        (merged,) = getattr(merge(before, after, pod=pod), field)
        assert merged.state == (theirs if kept else ours)


def test_merged_status_restart_count_and_generation_never_decrease() -> None:
    theirs = make_status("Running", container(restart_count=3), observed_generation=5, start_time=NOW)
    ours = make_status("Running", container(restart_count=1), observed_generation=4, start_time=LATER)
    merged = merge(theirs, ours)
    assert merged.container_statuses[0].restart_count == 3
    assert (merged.observed_generation, merged.start_time) == (5, NOW)
    assert merge(ours, theirs).container_statuses[0].restart_count == 3


def test_merged_status_foreign_fields_unchanged() -> None:
    theirs = make_status(nominated_node_name="n", resize="Proposed")
    assert merge(theirs, make_status()) == theirs


def test_merged_status_long_termination_messages_truncated() -> None:
    long = make_status("Failed", *(container(name, ended(1, "ä" * 4000)) for name in "abc"))
    pod = make_pod(containers=("a", "b", "c"))
    for status in merge(make_status(), long, pod=pod).container_statuses:
        assert status.state.terminated is not None
        message = status.state.terminated.message
        assert isinstance(message, str)
        assert 0 < len(message.encode()) <= MESSAGE_BYTES // 3


def test_merged_status_times_truncated_to_seconds() -> None:
    odd = datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)
    ours = make_status(start_time=odd, conditions=[condition("Ready", at=odd)])
    merged = merge(PodStatus(), ours)
    assert (merged.start_time, merged.conditions[0].last_transition_time) == (NOW, NOW)


# The patch


def patched(before: PodStatus, after: PodStatus) -> PodStatus:
    """What an API server makes of the patch between two statuses."""
    patch = from_document(dict[str, Any], to_document(status_patch(before, after)))
    return from_document(PodStatus, apply_patch(to_document(before), patch))


def test_status_patch_resources_of_claims_are_those_of_scheduler() -> None:
    claim = NodeAllocatableResourceClaimStatus(
        resource_claim_name="c", resources={"cpu": Quantity.parse("1")}
    )
    before = PodStatus(phase="Pending", node_allocatable_resource_claim_statuses=[claim])
    assert status_patch(before, PodStatus(phase="Running")) == {"phase": "Running"}


def test_status_patch_equal_statuses_returns_empty() -> None:
    assert status_patch(make_status(), make_status()) == {}


def test_status_patch_order_and_transition_times_differ_returns_empty() -> None:
    one = make_status("Running", container("a"), container("b"))
    other = make_status(
        "Running",
        container("b"),
        container("a"),
        conditions=[condition("ContainersReady", at=LATER), condition("Ready", at=LATER)],
    )
    assert status_patch(one, other) == {}


def test_status_patch_equal_quantities_returns_empty() -> None:
    def asking(memory: str) -> PodStatus:
        return make_status(resources=StatusResources(requests={"memory": Quantity.parse(memory)}))

    assert status_patch(asking("1Gi"), asking("1024Mi")) == {}
    assert status_patch(asking("1Gi"), asking("1G")) == {"resources": {"requests": {"memory": "1G"}}}


def test_status_patch_contains_only_differences() -> None:
    before = make_status(pod_ip="10.0.0.1", reason="Old")
    after = make_status(
        pod_ip="10.0.0.2", conditions=[condition("Ready", "False", "X"), *before.conditions[1:]]
    )
    assert to_document(status_patch(before, after)) == {
        "podIP": "10.0.0.2",
        "reason": None,
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "X",
                "observedGeneration": 1,
                "lastProbeTime": None,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "$setElementOrder/conditions": [{"type": "Ready"}, {"type": "ContainersReady"}],
    }


def test_status_patch_condition_reason_removed_is_null() -> None:
    before = make_status(conditions=[condition("Ready", "False", "X")])
    after = make_status(conditions=[condition("Ready", "True")])
    assert status_patch(before, after)["conditions"][0]["reason"] is None
    assert patched(before, after) == after


states = st.sampled_from([waiting(), waiting("CrashLoopBackOff"), running(), ended(0), ended(1), ended(137)])
resources = st.dictionaries(
    st.sampled_from(["cpu", "memory"]), st.sampled_from(["1", "2"]).map(Quantity.parse)
)
addresses = st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"]), unique=True, max_size=2).map(
    lambda ips: [AddressStatus(ip=ip) for ip in ips]
)
conditions = st.lists(
    st.builds(
        PodCondition,
        type=st.sampled_from([*OWNED, "example.com/one", "DisruptionTarget"]),
        status=st.sampled_from(["True", "False"]),
        reason=st.sampled_from([msgspec.UNSET, "A", "B"]),
        message=st.sampled_from([msgspec.UNSET, "m"]),
        observed_generation=st.sampled_from([msgspec.UNSET, 1, 2]),
        last_transition_time=st.sampled_from([NOW, LATER]),
    ),
    unique_by=lambda c: c.type,
)


def statuses_of(names: tuple[str, ...]) -> st.SearchStrategy[list[Any]]:
    each = [
        st.builds(
            container,
            st.just(name),
            states,
            restart_count=st.integers(0, 2),
            ready=st.booleans(),
            last_state=st.one_of(st.just(ContainerState()), st.just(ended(1))),
        )
        for name in names
    ]
    return st.one_of(st.just([]), st.tuples(*each).map(list))


statuses = st.builds(
    PodStatus,
    observed_generation=st.integers(0, 2),
    phase=st.sampled_from(["", "Pending", "Running", "Succeeded", "Failed"]),
    reason=st.sampled_from(["", "Evicted"]),
    message=st.sampled_from(["", "m"]),
    conditions=conditions,
    pod_ip=st.sampled_from(["", "10.0.0.1"]),
    pod_ips=addresses,
    host_ips=addresses,
    start_time=st.sampled_from([None, NOW, LATER]),
    container_statuses=statuses_of(("main", "side")),
    init_container_statuses=statuses_of(("first", "second")),
    allocated_resources=resources,
    resources=st.one_of(st.none(), st.builds(StatusResources, limits=resources, requests=resources)),
    qos_class=st.sampled_from(["", "Burstable"]),
)
pods = st.builds(
    make_pod,
    policy=st.sampled_from(["Always", "OnFailure", "Never"]),
    containers=st.just(("main", "side")),
    init=st.just(("first", "second")),
)


def timeless(status: PodStatus) -> PodStatus:
    """Drop what makes no difference: when conditions came to be, and their order."""
    found = copy.deepcopy(status)
    for one in found.conditions:
        one.last_transition_time = None
    found.conditions.sort(key=lambda one: one.type)
    return found


@given(pods, statuses, statuses, st.booleans())
def test_status_patch_applied_equals_merged_status(
    pod: Pod, theirs: PodStatus, ours: PodStatus, may_run: bool
) -> None:
    untouched = copy.deepcopy((theirs, ours))
    merged = merge(theirs, ours, pod=pod, may_run=may_run)
    assert (theirs, ours) == untouched
    answer = patched(theirs, merged)
    assert timeless(answer) == timeless(merged)
    # Saying it again says nothing, also of what the server then has.
    assert status_patch(answer, merged) == {}
    assert status_patch(answer, merge(answer, ours, pod=pod, may_run=may_run)) == {}


@given(pods, statuses, statuses, st.booleans())
def test_merged_status_any_input_never_reverts(
    pod: Pod, theirs: PodStatus, ours: PodStatus, may_run: bool
) -> None:
    merged = merge(theirs, ours, pod=pod, may_run=may_run)
    if theirs.phase in ("Succeeded", "Failed"):
        assert merged.phase == theirs.phase
    elif may_run:
        assert merged.phase not in ("Succeeded", "Failed")
    if theirs.start_time is not None:
        assert merged.start_time == theirs.start_time
    foreign = [c for c in theirs.conditions if c.type not in OWNED]
    assert merged.conditions[: len(foreign)] == foreign
    if merged.phase in ("Succeeded", "Failed"):
        assert not any(
            c.status == "True" for c in merged.conditions if c.type in ("Ready", "ContainersReady")
        )
    for before, after in zip(theirs.container_statuses, merged.container_statuses, strict=False):
        assert after.restart_count >= before.restart_count
        if before.state.terminated is not None and pod.spec.restart_policy == "Never":
            assert after.state.terminated is not None


# The last status


def test_final_status_pod_never_started_is_failed() -> None:
    final = final_status(make_pod(), make_status("Pending", container("main", waiting()), ready="False"))
    assert final.phase == "Failed"
    state = final.container_statuses[0].state.terminated
    assert state is not None
    assert (state.exit_code, state.reason) == (137, "ContainerStatusUnknown")


def test_final_status_terminal_pod_unchanged() -> None:
    done = make_status("Succeeded", container("main", ended(0)), ready="False")
    assert final_status(make_pod(), done) == done


@pytest.mark.parametrize(
    ("init", "main", "told"),
    [
        # Nothing began: only the first init container is said to have failed.
        ([waiting(), waiting()], waiting(), ["lost", "waiting", "waiting"]),
        ([ended(0), waiting()], waiting(), ["ended", "waiting", "waiting"]),
        ([ended(0), running()], waiting(), ["ended", "lost", "waiting"]),
        # The last init container is done, so the others were to run.
        ([ended(0), ended(0)], waiting(), ["ended", "ended", "lost"]),
        ([ended(0), ended(0)], running(), ["ended", "ended", "lost"]),
    ],
)
def test_final_status_init_incomplete_marks_reached_container_unknown(
    init: list[ContainerState], main: ContainerState, told: list[str]
) -> None:
    pod = make_pod(init=("first", "second"))
    status = make_status("Pending", container("main", main))
    status.init_container_statuses = [container("first", init[0]), container("second", init[1])]
    final = final_status(pod, status)

    def word(state: ContainerState) -> str:
        if state.terminated is None:
            return "waiting" if state.waiting is not None else "running"
        return "lost" if state.terminated.reason == "ContainerStatusUnknown" else "ended"

    found = [*final.init_container_statuses, *final.container_statuses]
    assert [word(one.state) for one in found] == told
    assert final.phase == "Failed"


@given(pods, statuses)
def test_final_status_any_input_is_terminal(pod: Pod, status: PodStatus) -> None:
    untouched = copy.deepcopy(status)
    final = final_status(pod, status)
    assert status == untouched
    assert final.phase in ("Succeeded", "Failed")
    assert final_status(pod, final) == final
