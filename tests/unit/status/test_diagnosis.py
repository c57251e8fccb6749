"""Why a pod does not run: the failing step, the reason, and what to do about it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pykubelet.podconfig.pod_history import Event
from pykubelet.status.diagnosis import STEPS, Diagnosis, diagnose, node_sentence, summary_status
from pykubelet.status.remedies import remedy
from tests.support.pod_view import pod_of

NOW = datetime(2026, 1, 2, 3, 10, 0, tzinfo=UTC)
READY = [{"type": kind, "status": "True"} for kind in ("PodReadyToStartContainers", "Initialized", "Ready")]
SANDBOX = READY[:2]


def container(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "main", "image": "i", "state": state, "ready": False, **fields}


def running(**fields: Any) -> dict[str, Any]:
    return container({"running": {"startedAt": "2026-01-02T03:05:00Z"}}, **fields)


def waiting(reason: str, message: str = "", **fields: Any) -> dict[str, Any]:
    return container({"waiting": {"reason": reason, "message": message}}, **fields)


def ended(code: int, reason: str = "Error", at: str = "2026-01-02T03:09:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


def event(reason: str, message: str = "m", where: str = "", at: datetime = NOW) -> Event:
    kind = "Normal" if reason in ("Pulling", "Pulled") else "Warning"
    return Event(kind, reason, message, where, at.timestamp(), at.timestamp())  # type: ignore[arg-type]


def found(status: dict[str, Any], *events: Event, state: str = "syncing", **spec: Any) -> Diagnosis:
    return diagnose(pod_of("web", "u1", status=status, spec=spec), state, events, NOW)


def failing(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the failing step and the reason; all steps before are done and all after wait."""
    (step,) = (step for step in diagnosis.steps if step.state in ("failed", "active"))
    at = STEPS.index(step.name)
    assert [s.state for s in diagnosis.steps[:at]] == ["done"] * at
    assert {s.state for s in diagnosis.steps[at + 1 :]} <= {"waiting"}
    assert diagnosis.problem is step.problem
    assert diagnosis.problem is not None
    return step.name, diagnosis.problem.reason


def test_diagnose_ready_pod_has_no_problem() -> None:
    diagnosis = found({"containerStatuses": [running(ready=True, started=True)], "conditions": READY})
    assert diagnosis.problem is None
    assert not diagnosis.needs_attention
    assert {step.state for step in diagnosis.steps} == {"done"}


@pytest.mark.parametrize(
    ("status", "events", "expected"),
    [
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "few"}, [], ("admission", "OutOfcpu")),
        ({"phase": "Pending"}, [event("AdmissionWaiting")], ("admission", "AdmissionWaiting")),
        ({"phase": "Pending"}, [event("FailedMount")], ("volumes", "FailedMount")),
        ({"phase": "Pending"}, [event("FailedCreatePodSandBox")], ("sandbox", "FailedCreatePodSandBox")),
        (
            {"phase": "Pending", "containerStatuses": [waiting("ImagePullBackOff")]},
            [],
            ("image", "ImagePullBackOff"),
        ),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [
                    waiting("CrashLoopBackOff", lastState=ended(3)) | {"name": "setup"}
                ],
                "containerStatuses": [waiting("PodInitializing")],
                "conditions": SANDBOX[:1],
            },
            [],
            ("init", "CrashLoopBackOff"),
        ),
        (
            {"containerStatuses": [waiting("CreateContainerConfigError")], "conditions": SANDBOX},
            [],
            ("containers", "CreateContainerConfigError"),
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [container(ended(137, "OOMKilled"))],
                "conditions": SANDBOX,
            },
            [],
            ("containers", "OOMKilled"),
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "containerStatuses": [container(ended(137))]},
            [],
            ("containers", "Evicted"),
        ),
        (
            {"containerStatuses": [running()], "conditions": SANDBOX},
            [event("Unhealthy", "Readiness probe failed", "spec.containers{main}")],
            ("probes", "Unhealthy"),
        ),
        (
            {
                "containerStatuses": [running(ready=True, started=True, lastState=ended(2))],
                "conditions": READY,
            },
            [],
            ("containers", "Restarted"),
        ),
    ],
)
def test_diagnose_each_failure_names_step_and_reason(
    status: dict[str, Any], events: list[Event], expected: tuple[str, str]
) -> None:
    diagnosis = found(status, *events, initContainers=[{"name": "setup", "image": "i"}])
    assert failing(diagnosis) == expected
    assert diagnosis.needs_attention
    assert diagnosis.problem is not None
    assert diagnosis.problem.remedy


@pytest.mark.parametrize(
    ("status", "events", "expected"),
    [
        ({"phase": "Pending"}, [], ("admission", "Pending")),
        ({"phase": "Pending"}, [event("Scheduled")], ("sandbox", "ContainerCreating")),
        (
            {
                "phase": "Pending",
                "conditions": SANDBOX[:1],
                "containerStatuses": [waiting("ContainerCreating")],
            },
            [event("Pulling", where="spec.containers{main}")],
            ("image", "Pulling"),
        ),
        ({"containerStatuses": [running()], "conditions": SANDBOX}, [], ("probes", "NotReady")),
        (
            {"containerStatuses": [running(started=False)], "conditions": SANDBOX},
            [event("Unhealthy", "Startup probe failed: no", "spec.containers{main}")],
            ("probes", "Unhealthy"),
        ),
    ],
)
def test_diagnose_starting_pod_needs_no_attention(
    status: dict[str, Any], events: list[Event], expected: tuple[str, str]
) -> None:
    diagnosis = found(status, *events)
    assert failing(diagnosis) == expected
    assert not diagnosis.needs_attention


def test_diagnose_failures_of_the_past_are_no_problem() -> None:
    long_ago = NOW - timedelta(hours=1)
    status = {
        "containerStatuses": [
            running(ready=True, started=True, lastState=ended(2, at="2026-01-02T02:00:00Z"))
        ],
        "conditions": READY,
    }
    old = [
        event(reason, where="spec.containers{main}", at=long_ago) for reason in ("FailedMount", "Unhealthy")
    ]
    assert found(status, *old).problem is None


def test_diagnose_crash_loop_tells_exit_code_and_delay_without_names() -> None:
    status = {
        "containerStatuses": [
            waiting(
                "CrashLoopBackOff",
                "back-off 40s restarting failed container=main pod=x",
                lastState=ended(127),
            )
        ],
        "conditions": SANDBOX,
    }
    problem = found(status).problem
    assert problem is not None
    assert problem.message == "exited with code 127; back-off 40s"
    assert "does not exist in the image" in problem.remedy


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("401 Unauthorized", "pull secret"),
        ("unexpected status from HEAD request: 403", "pull secret"),
        ("unexpected status code 404: x", "name and tag"),
        (
            "a.example:4030/i@sha256:0401f403: dial tcp 10.0.4.401:403: connection refused",
            "DNS and the network",
        ),
        ("manifest unknown", "name and tag"),
        ("dial tcp: lookup reg: no such host", "DNS"),
        ("x509: certificate signed by unknown authority", "CA"),
        ("write /x: no space left on device", "full"),
        ("", "name and tag"),
    ],
)
def test_remedy_of_failed_pull_depends_on_message(message: str, word: str) -> None:
    assert word in remedy("ErrImagePull", message)


def test_node_sentence_names_problems_and_at_most_three_pods() -> None:
    assert node_sentence([], []) == "Healthy"
    assert node_sentence([], ["a"]) == "1 pod needs attention: a"
    many = node_sentence(["DiskPressure is set"], ["a", "b", "c", "d", "e"])
    assert many == "DiskPressure is set; 5 pods need attention: a, b, c and 2 more"


def test_summary_status_of_failing_pod_is_its_reason() -> None:
    pod = pod_of("web", "u1", status={"phase": "Pending"})
    diagnosis = diagnose(pod, "syncing", [event("FailedMount")], NOW)
    assert summary_status(pod, "syncing", diagnosis) == ("FailedMount", "bad")


def test_diagnose_failed_pod_of_completed_job_needs_no_attention() -> None:
    status = {"phase": "Failed", "containerStatuses": [container(ended(3))], "conditions": SANDBOX}
    pod = pod_of("once", "u1", status=status)
    failed = diagnose(pod, "terminated", [], NOW)
    assert failed.needs_attention
    assert summary_status(pod, "terminated", failed) == ("Error", "bad")
    past = diagnose(pod, "terminated", [], NOW, job_completed=True)
    assert failing(past) == ("containers", "Error")
    assert not past.needs_attention
    assert past.problem is not None
    assert past.problem.message == "exited with code 3; its Job has completed since"
    assert past.problem.remedy == ""
    assert summary_status(pod, "terminated", past) == ("Error", "off")
    crashing = pod_of("web", "u2", status={"phase": "Pending"})
    assert diagnose(crashing, "syncing", [event("FailedMount")], NOW, job_completed=True).needs_attention


@pytest.mark.parametrize(
    ("reason", "attention"), [("WaitingForPods", False), ("WaitForMissing", True), ("WaitForFailedJob", True)]
)
def test_diagnose_pod_that_waits_for_others_has_not_started_a_step(reason: str, attention: bool) -> None:
    status = {"phase": "Pending", "containerStatuses": [waiting(reason, "waits for pod db to be ready")]}
    diagnosis = found(status, event(reason))
    assert failing(diagnosis) == ("admission", reason)
    assert diagnosis.needs_attention is attention
