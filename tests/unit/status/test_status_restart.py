"""What a pod's status says before, while and after all of its containers restart in place."""

from typing import Any

import msgspec
import pytest

from pykubelet.api.pod import Container, ExitCodes, Pod, RestartRule
from pykubelet.api.pod_status import ContainerStatus, PodCondition, PodStatus
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.status.compute import compute_status
from pykubelet.status.containers import StartFailure, StatusInputs, has_restart_condition
from pykubelet.status.patch import merged_status
from tests.support.pods import LATER, NOW, condition, container, ended, make_pod, running, waiting

KIND = "AllContainersRestarting"
ALL_ON_3 = [RestartRule(action="RestartAllContainers", exit_codes=ExitCodes(operator="In", values=[3]))]


def a_pod(policy: str = "Never", **fields: Any) -> Pod:
    pod = make_pod(policy=policy, containers=("main", "other"), init=("first",), **fields)
    pod.spec.containers[0] = Container(name="main", restart_policy="Never", restart_policy_rules=ALL_ON_3)
    return pod


def one(name: str, phase: ContainerPhase, code: int = 0, attempt: int = 0) -> ObservedContainer:
    return ObservedContainer(
        id=f"{name}-{attempt}",
        name=name,
        phase=phase,
        sandbox_id="box",
        exit_code=code,
        restart_count=attempt,
        created_at=1,
        started_at=1_000_000_000,
        finished_at=2_000_000_000 if phase == "exited" else 0,
    )


def picture(*containers: ObservedContainer) -> ObservedPod:
    box = ObservedSandbox(id="box", ready=True, created_at=1, ips=("10.0.0.2",))
    return ObservedPod(uid="u1", sandboxes=(box,), containers=containers)


RAN = (one("main", "running"), one("other", "running"), one("first", "exited"))
ASKED = (one("main", "exited", 3), one("other", "running"), one("first", "exited"))


def status(
    *containers: ObservedContainer, previous: PodStatus | None = None, of: Pod | None = None, **view: Any
) -> PodStatus:
    facts = StatusInputs(
        pod=of or a_pod(), observed=picture(*containers), previous=previous or PodStatus(), **view
    )
    return compute_status(facts, LATER if previous else NOW)


def restarting(found: PodStatus) -> PodCondition | None:
    return next((one for one in found.conditions if one.type == KIND), None)


def states(found: PodStatus) -> dict[str, tuple[str, object, int]]:
    """Each container's state, why, and how often it was restarted."""

    def told(one: ContainerStatus) -> tuple[str, object, int]:
        if one.state.waiting is not None:
            return "waiting", one.state.waiting.reason, one.restart_count
        if one.state.terminated is not None:
            return "ended", one.state.terminated.exit_code, one.restart_count
        return "running", "", one.restart_count

    return {one.name: told(one) for one in (*found.init_container_statuses, *found.container_statuses)}


def test_compute_status_restart_all_reports_each_stage() -> None:
    before = status(*RAN)
    told = restarting(before)
    assert told is not None
    assert before.conditions[-1] is told
    # The reference tells no generation here.
    assert (told.status, told.reason, told.observed_generation) == ("False", msgspec.UNSET, msgspec.UNSET)
    assert told.last_transition_time == NOW

    asked = status(*ASKED, previous=before)
    told = restarting(asked)
    assert told is not None
    assert (told.status, told.reason, told.last_transition_time) == (
        "True",
        "RestartAllContainersStarted",
        LATER,
    )
    assert asked.phase == "Running"
    assert states(asked) == {"first": ("ended", 0, 0), "main": ("ended", 3, 0), "other": ("running", "", 0)}

    # Its agent stopped half way: what is gone waits, and what asked for it is not told twice.
    halfway = status(one("main", "exited", 3), previous=asked)
    gone = ("waiting", "RestartingAllContainers", 1)
    assert has_restart_condition(halfway)
    assert states(halfway) == {"first": gone, "main": ("ended", 3, 0), "other": gone}
    assert halfway.phase == "Running"
    still = status(one("main", "exited", 3), previous=halfway)
    initializing = ("waiting", "PodInitializing", 1)
    assert states(still) == {"first": initializing, "main": ("ended", 3, 0), "other": initializing}

    clean = status(previous=asked)
    assert not has_restart_condition(clean)
    assert states(clean) == dict.fromkeys(("first", "main", "other"), gone)
    assert clean.phase == "Running"
    for container_status in (*clean.init_container_statuses, *clean.container_statuses):
        last = container_status.last_state.terminated
        assert last is not None
        assert (last.exit_code, last.reason) == (137, "RestartingAllContainers")
    # Initialized once is initialized for good.
    assert [one.status for one in clean.conditions if one.type == "Initialized"] == ["True"]

    again = status(one("first", "running", attempt=1), previous=clean)
    assert not has_restart_condition(again)
    assert states(again) == {"first": ("running", "", 1), "main": initializing, "other": initializing}
    assert again.phase == "Pending"

    up = status(
        one("main", "running", attempt=1),
        one("other", "running", attempt=1),
        one("first", "exited", attempt=1),
        previous=again,
    )
    assert up.phase == "Running"
    assert not has_restart_condition(up)
    assert {name: state[2] for name, state in states(up).items()} == {"first": 1, "main": 1, "other": 1}


def test_compute_status_kubelet_restarted_keeps_restart_condition() -> None:
    # Whatever removed the container that asked for it: the others must not go on with their old lives.
    said = PodStatus(phase="Running", conditions=[condition(KIND, "True", "RestartAllContainersStarted")])
    assert has_restart_condition(status(one("other", "running"), previous=said))
    assert not has_restart_condition(status(previous=said))


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ({"of": a_pod(deleting=True)}, msgspec.UNSET),
        ({"previous": PodStatus(phase="Failed")}, "PodFailed"),
        ({"previous": PodStatus(phase="Succeeded")}, "PodCompleted"),
        ({"terminal": True}, "PodFailed"),
    ],
)
def test_compute_status_pod_terminating_restart_condition_is_false(
    view: dict[str, Any], reason: object
) -> None:
    parts = ASKED if "terminal" not in view else (one("main", "exited", 3), one("other", "exited", 143))
    told = restarting(status(*parts, **view))
    assert told is not None
    assert (told.status, told.reason) == ("False", reason)


def test_compute_status_no_restart_all_rule_has_no_restart_condition() -> None:
    plain = make_pod(containers=("main", "other"), init=("first",))
    found = status(*ASKED, of=plain)
    assert restarting(found) is None
    # Nobody's business but the node's: what was said of it once goes.
    plain.status.conditions = [condition(KIND)]
    assert restarting(status(*RAN, of=plain)) is None


def test_compute_status_start_fails_after_restart_all_shows_waiting_reason() -> None:
    failures = {"other": StartFailure("ErrImagePull", "no such image")}
    clean = status(previous=status(*ASKED, previous=status(*RAN)))
    found = status(
        one("main", "running", attempt=1),
        one("first", "exited", attempt=1),
        previous=clean,
        failures=failures,
    )
    assert states(found)["other"] == ("waiting", "ErrImagePull", 1)
    assert found.phase == "Running"
    # Nor has the pod failed while nothing of it runs, for a policy that it has not come to.
    found = status(one("first", "exited", attempt=1), previous=clean, failures=failures)
    assert found.phase == "Running"


@pytest.mark.parametrize("rules", [False, True])
def test_merged_status_restart_all_rule_terminated_may_become_waiting(rules: bool) -> None:
    pod = a_pod() if rules else make_pod(policy="Never", containers=("main", "other"))
    theirs = PodStatus(phase="Running", container_statuses=[container("other", ended(0))])
    ours = PodStatus(phase="Running", container_statuses=[container("other", waiting())])
    merged = merged_status(pod, theirs, ours, may_run=True, now=NOW)
    assert (merged.container_statuses[0].state.waiting is not None) == rules


def test_compute_status_container_unknown_during_restart_all_is_terminated() -> None:
    old = PodStatus(
        phase="Running",
        conditions=[condition(KIND)],
        container_statuses=[container("other", running(), container_id="containerd://other-0")],
    )
    found = status(one("other", "unknown"), previous=old)
    (other,) = [one for one in found.container_statuses if one.name == "other"]
    assert other.state.terminated is not None
    assert (other.state.terminated.reason, other.restart_count) == ("RestartingAllContainers", 1)
