"""The clock jumps by an hour, forth and back: nothing is restarted for it, and nothing waits an hour.

The machine's clock cannot be set here, so it is the agent's view of it that jumps
(`clock/sitecustomize.py`): for everything that happened before, the two look the same. That a runtime
with a clock that was set back makes newer containers look older is tested on the agent's eyes alone.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.observe import Observer
from tests.support.manifests import container, pod
from tests.support.node import Node, is_ready, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime

PAUSE = 2
DEADLINE = 15
HOUR = 3600


@pytest.fixture
def node(runtime: RunningRuntime, tmp_path: Path) -> Iterator[Node]:
    env = {
        "PYTHONPATH": str(Path(__file__).parents[2] / "support/clock"),
        "PYKUBELET_TEST_CLOCK": str(tmp_path / "ahead"),
    }
    settings: dict[str, Any] = {
        "crashLoopBackOff": {"maxContainerRestartPeriod": f"{PAUSE}s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
    }
    with running(kubelet_node(runtime, env=env, **settings)) as started:
        yield started
        started.clear()


@pytest.mark.machine
def test_kubelet_wall_clock_jumps_restarts_and_deadlines_unaffected(node: Node, tmp_path: Path) -> None:
    alive = {
        "exec": {"command": ["true"]},
        "periodSeconds": 1,
        "initialDelaySeconds": 1,
        "timeoutSeconds": 10,  # a busy machine is no reason for a restart
    }
    node.write(pod("steady", container(livenessProbe=alive, readinessProbe=alive, startupProbe=alive)))
    node.write(pod("crashes", container(command=["sh", "-c", "exit 7"])))
    node.wait_ready("steady-n1")
    node.wait_pod("crashes-n1", "to be in back-off", lambda it: restarts(it) >= 1)
    began = time.monotonic()
    node.write(pod("timed", activeDeadlineSeconds=DEADLINE))
    node.wait_ready("timed-n1")
    (steady,) = node.truth.running("steady-n1")
    for ahead in (HOUR, 0, -HOUR):
        (tmp_path / "ahead").write_text(str(ahead))
        before = restarts(node.pod("crashes-n1") or {})
        node.wait_pod("crashes-n1", "to be tried again", lambda it: restarts(it) > before)  # noqa: B023
        node.start_pod(pod(f"new{abs(ahead)}{ahead < 0}".lower()))
        now = node.pod("steady-n1") or {}
        assert is_ready(now)
        assert [one.id for one in node.truth.running("steady-n1")] == [steady.id]
        if ahead == HOUR:
            phase = (node.pod("timed-n1") or {})["status"]["phase"]
            # On a busy machine all this may take so long.
            is_over = time.monotonic() - began > DEADLINE - 1
            assert phase == "Running" or is_over, f"its {DEADLINE} seconds are not over"
    node.wait_phase("timed-n1", "Failed")
    time.sleep(1.5)
    assert is_ready(node.pod("steady-n1") or {})
    assert [one.id for one in node.truth.running("steady-n1")] == [steady.id]
    # An agent that starts now finds containers that will be started in an hour.
    node.kill()
    node.start()
    node.wait_ready("steady-n1")
    assert [one.id for one in node.truth.running("steady-n1")] == [steady.id]
    before = restarts(
        node.wait_pod("crashes-n1", "to be seen", lambda it: it["status"].get("containerStatuses"))
    )
    node.wait_pod("crashes-n1", "to be tried again", lambda it: restarts(it) > before)


def restarts(found: dict[str, Any]) -> int:
    count: int = status_of(found, "main")["restartCount"]
    return count


async def test_observer_newer_attempt_with_older_created_at_is_latest() -> None:
    labels = {
        "io.kubernetes.pod.uid": "u",
        "io.kubernetes.pod.name": "p",
        "io.kubernetes.container.name": "main",
    }
    dead = pb.Container(
        id="dead", state=pb.CONTAINER_EXITED, created_at=HOUR * 10**9, labels=labels,
        metadata=pb.ContainerMetadata(name="main", attempt=0),
    )  # fmt: skip
    alive = pb.Container(
        id="alive", state=pb.CONTAINER_RUNNING, created_at=1, labels=labels,
        metadata=pb.ContainerMetadata(name="main", attempt=1),
    )  # fmt: skip
    old = pb.PodSandbox(
        id="old", state=pb.SANDBOX_NOTREADY, created_at=HOUR * 10**9, labels=labels,
        metadata=pb.PodSandboxMetadata(attempt=0),
    )  # fmt: skip
    new = pb.PodSandbox(
        id="new",
        state=pb.SANDBOX_READY,
        created_at=1,
        labels=labels,
        metadata=pb.PodSandboxMetadata(attempt=1),
    )

    async def containers() -> list[pb.Container]:
        return [dead, alive]

    async def sandboxes() -> list[pb.PodSandbox]:
        return [old, new]

    cri: Any = SimpleNamespace(
        runtime=SimpleNamespace(list_containers=containers, list_pod_sandbox=sandboxes)
    )
    seen = (await Observer(cri).list_pods())["u"]
    latest = seen.latest("main")
    assert latest is not None
    assert latest.id == "alive"
    assert [box.id for box in seen.sandboxes] == ["new", "old"]
