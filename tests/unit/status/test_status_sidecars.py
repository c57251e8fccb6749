"""Pods whose sidecars restart: what was reached once is not taken back."""

from typing import Any

import pytest

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.probes.types import Health
from pykubelet.status.compute import compute_status
from pykubelet.status.containers import StartFailure, StatusInputs
from tests.support.pods import NOW, condition, make_pod

FINE = Health(started=True, ready=True)
COMING = Health(started=False, ready=False)
BACK_OFF = {"main": StartFailure("CrashLoopBackOff", "back-off")}


def a_pod() -> Pod:
    pod = make_pod(init=("side",))
    pod.spec.init_containers = [Container(name="side", restart_policy="Always")]
    return pod


def one(name: str, phase: ContainerPhase, box: str = "box", attempt: int = 0) -> ObservedContainer:
    return ObservedContainer(
        id=f"{name}-{attempt}",
        name=name,
        phase=phase,
        sandbox_id=box,
        attempt=attempt,
        exit_code=1 if phase == "exited" else 0,
        started_at=1,
        finished_at=2 if phase == "exited" else 0,
    )


def picture(*containers: ObservedContainer, ready: bool = True) -> ObservedPod:
    box = ObservedSandbox(id="box", ready=ready, created_at=1, ips=("10.0.0.2",))
    return ObservedPod(uid="u1", sandboxes=(box,), containers=containers)


def status(observed: ObservedPod, *, main: Health = COMING, side: Health = COMING, **view: Any) -> PodStatus:
    health = {"main": main, "side": side}
    return compute_status(StatusInputs(pod=a_pod(), observed=observed, health=health, **view), NOW)


def initialized(found: PodStatus) -> tuple[str, object]:
    (told,) = [c for c in found.conditions if c.type == "Initialized"]
    return told.status, told.reason or ""


@pytest.mark.parametrize(
    ("main", "box", "phase"),
    [
        # It runs, or crashed in this very sandbox: the pod was initialized.
        ("running", "box", "Running"),
        ("exited", "box", "Running"),
        # It is of a sandbox before a reboot, say: initialization begins anew.
        ("exited", "old", "Pending"),
        (None, "", "Pending"),
    ],
)
def test_compute_status_sidecar_restarts_initialized_pod_stays_running(
    main: ContainerPhase | None, box: str, phase: str
) -> None:
    containers = [one("side", "running", attempt=1)]
    if main is not None:
        containers.append(one("main", main, box))
    assert status(picture(*containers), failures=BACK_OFF if main == "exited" else {}).phase == phase


def test_compute_status_initialized_stays_true() -> None:
    coming = picture(one("side", "running"))
    first = status(coming)
    assert initialized(first) == ("False", "ContainersNotInitialized")
    # A container that runs but has not passed its startup probe has begun all the same.
    assert initialized(status(picture(one("main", "running"), one("side", "running")))) == ("True", "")
    before = PodStatus(phase="Running", conditions=[condition("Initialized")])
    crashed = picture(one("main", "exited"), one("side", "running", attempt=1))
    assert initialized(status(crashed, failures=BACK_OFF, previous=before)) == ("True", "")
    assert initialized(status(picture(ready=False), previous=before)) == ("True", "")


def test_compute_status_init_rerun_without_gate_initialized_is_false() -> None:
    """Verify that without RestartAllContainersOnContainerExits a new sandbox takes `Initialized` back."""
    before = PodStatus(phase="Running", conditions=[condition("Initialized")])
    fresh = picture(one("main", "exited", "old"), one("side", "running", attempt=1))
    gone: dict[str, Any] = {"failures": BACK_OFF, "previous": before}
    assert initialized(status(fresh, **gone, stays_initialized=False)) == (
        "False",
        "ContainersNotInitialized",
    )
    assert initialized(status(fresh, **gone, stays_initialized=True)) == ("True", "")
