from typing import Literal

import pytest

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.kuberuntime.observed import ObservedContainer
from pykubelet.probes.results import health, restored_state
from pykubelet.probes.types import Health, Kind, Result
from tests.support.probes import EPOCH, exec_probe, exited, observed, pod, running

PROBE = exec_probe("x")
Verdicts = dict[tuple[Kind, str], Result]


def judge(
    asked: Pod, *containers: ObservedContainer, verdicts: Verdicts | None = None, older: bool = False
) -> dict[str, Health]:
    def verdict(kind: Kind, container_id: str) -> Result | None:
        return (verdicts or {}).get((kind, container_id))

    return health(asked, observed(*containers), verdict, lambda name, found: older)


def app(*probes: Literal["startup", "readiness", "liveness"], policy: str | None = None) -> Container:
    return Container(
        name="app",
        restart_policy=policy,
        startup_probe=PROBE if "startup" in probes else None,
        readiness_probe=PROBE if "readiness" in probes else None,
        liveness_probe=PROBE if "liveness" in probes else None,
    )


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize(
    ("probes", "verdicts", "expected"),
    [
        ((), {}, (True, True)),
        (("liveness",), {"liveness": "failure"}, (True, True)),
        (("readiness",), {}, (True, False)),
        (("readiness",), {"readiness": "failure"}, (True, False)),
        (("readiness",), {"readiness": "success"}, (True, True)),
        (("startup",), {}, (False, False)),
        (("startup",), {"startup": "unknown"}, (False, False)),
        (("startup",), {"startup": "failure"}, (False, False)),
        (("startup",), {"startup": "success"}, (True, True)),
        (("startup", "readiness"), {"startup": "success"}, (True, False)),
        (("startup", "readiness"), {"startup": "unknown", "readiness": "success"}, (False, False)),
        (("startup", "readiness"), {"startup": "success", "readiness": "success"}, (True, True)),
    ],
)
def test_health_running_container_follows_probe_results(
    sidecar: bool, probes: tuple[Kind, ...], verdicts: dict[Kind, Result], expected: tuple[bool, bool]
) -> None:
    container = app(*probes, policy="Always" if sidecar else None)
    asked = pod(init=(container,)) if sidecar else pod(container)
    known: Verdicts = {(kind, "c1"): verdict for kind, verdict in verdicts.items()}
    assert judge(asked, running("app", "c1", EPOCH), verdicts=known) == {"app": expected}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (None, (False, False)),
        (exited("app", "c1", 0), (False, False)),
        (ObservedContainer(id="c1", name="app", phase="created"), (False, False)),
        (ObservedContainer(id="c1", name="app", phase="unknown"), (False, False)),
    ],
)
def test_health_container_not_running_is_not_ready(
    seen: ObservedContainer | None, expected: tuple[bool, bool]
) -> None:
    verdicts: Verdicts = {("readiness", "c1"): "success"}
    found = judge(pod(app("readiness")), *([seen] if seen else []), verdicts=verdicts)
    assert found == {"app": expected}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (running("app", "c1", EPOCH), (True, False)),
        (exited("app", "c1", 0), (False, True)),
        (exited("app", "c1", 1), (False, False)),
    ],
)
def test_health_init_container_exited_zero_is_ready(
    seen: ObservedContainer, expected: tuple[bool, bool]
) -> None:
    assert judge(pod(init=(app(),)), seen) == {"app": expected}


def with_status(asked: Pod, *, ready: bool, started: bool, id: str = "c1") -> Pod:
    status = ContainerStatus(name="app", ready=ready, started=started, container_id=f"containerd://{id}")
    asked.status.container_statuses = [status]
    return asked


@pytest.mark.parametrize(
    ("ready", "started", "id", "expected"),
    [
        (True, True, "c1", (True, True)),
        (False, True, "c1", (True, False)),
        (False, False, "c1", (False, False)),
        (True, True, "another", (False, False)),  # this one was started and never judged
    ],
)
def test_health_after_kubelet_restart_uses_last_status(
    ready: bool, started: bool, id: str, expected: tuple[bool, bool]
) -> None:
    asked = with_status(pod(app("startup", "readiness")), ready=ready, started=started, id=id)
    assert judge(asked, running("app", "c1", EPOCH), older=True) == {"app": expected}
    assert judge(asked, running("app", "c1", EPOCH), older=False) == {"app": expected}


def test_health_older_container_without_status_is_ready_until_probed() -> None:
    asked, seen = pod(app("startup", "readiness")), running("app", "c1", EPOCH)
    assert judge(asked, seen, older=True) == {"app": (True, True)}
    assert judge(asked, seen, older=False) == {"app": (False, False)}
    startup, readiness = (restored_state(asked, kind, "app", "c1", True) for kind in ("startup", "readiness"))
    begun: Verdicts = {("startup", "c1"): startup.result, ("readiness", "c1"): readiness.result}
    assert judge(asked, seen, verdicts=begun, older=True) == {"app": (True, True)}
    # Its own presumption, written as a status meanwhile, changes nothing ...
    with_status(asked, ready=True, started=True)
    assert judge(asked, seen, verdicts=begun, older=True) == {"app": (True, True)}
    # ... but what the probes find does.
    assert judge(asked, seen, verdicts=begun | {("startup", "c1"): "failure"}, older=True) == {
        "app": (False, False)
    }
    found = begun | {("startup", "c1"): "success", ("readiness", "c1"): "failure"}
    assert judge(asked, seen, verdicts=found, older=True) == {"app": (True, False)}
