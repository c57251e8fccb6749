"""The stage that delays a start: what wakes a waiting pod, and which pods do not wait again."""

from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition, PodStatus
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.observed import ObservedPod, ObservedSandbox
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.wait_for import WAIT_FOR_ANNOTATION
from pykubelet.podsync.contract import PodSyncState, StartDelayed
from pykubelet.podsync.stages.base import PodStart
from pykubelet.podsync.stages.wait_for import CHECK_SECONDS, WaitForStage
from pykubelet.util.backoff import KeyedBackoff
from tests.unit.podconfig.making import static
from tests.unit.podsync.test_apply import doer_with

READY = PodStatus(phase="Running", conditions=[PodCondition(type="Ready", status="True")])
UNUSED: Any = None


class Node:
    """The stage with pods and statuses as told."""

    def __init__(self) -> None:
        self.app, self.db = static("app"), static("db")
        self.app.metadata.annotations[WAIT_FOR_ANNOTATION] = "db"
        self.pods = [self.app, self.db]
        self.statuses: dict[str, PodStatus] = {}
        self.woken: list[str] = []
        self.history = PodHistory()
        self.stage = WaitForStage(
            lambda: self.pods, self.statuses.get, lambda *_: None, self.woken.append, self.history
        )

    async def prepare(self, pod: Pod, *, sandbox: bool = False) -> str:
        observed = ObservedPod(
            uid=pod.uid,
            sandboxes=(ObservedSandbox(id="s", ready=True, attempt=0, created_at=1, ips=()),)
            if sandbox
            else (),
        )
        try:
            await self.stage.prepare(PodStart(pod, observed, UNUSED, UNUSED))
        except StartDelayed as err:
            return err.reason if err.retry_after == CHECK_SECONDS else f"{err.retry_after} s"
        return "started"

    def report(self, pod: Pod, status: PodStatus) -> None:
        self.statuses[pod.uid] = status
        self.stage.handle_status(pod, status, None)


async def test_prepare_waits_until_ready_and_is_woken_by_statuses() -> None:
    node = Node()
    assert await node.prepare(node.db) == "started"
    assert await node.prepare(node.app) == "WaitingForPods"
    node.report(node.app, PodStatus(phase="Pending"))
    assert node.woken == [], "its own status does not wake it"
    node.report(node.db, READY)
    assert node.woken == [node.app.uid]
    assert await node.prepare(node.app) == "started"
    node.report(node.db, PodStatus(phase="Running"))
    assert node.woken == [node.app.uid], "no pod waits any more"
    assert await node.prepare(node.app) == "started", "a started pod does not wait again"


async def test_prepare_pod_with_sandbox_has_started_before() -> None:
    node = Node()
    assert await node.prepare(node.app, sandbox=True) == "started"


async def test_prepare_records_each_reason_once_as_event() -> None:
    node = Node()
    node.pods = [node.app]
    assert [await node.prepare(node.app) for _ in range(3)] == ["WaitForMissing"] * 3
    node.pods = [node.app, node.db]
    assert await node.prepare(node.app) == "WaitingForPods"
    events = [(event.kind, event.reason, event.count) for event in node.history.events(node.app.uid)]
    assert events == [("Warning", "WaitForMissing", 1), ("Normal", "WaitingForPods", 1)]


@pytest.mark.parametrize("ended", ["release", "forget"])
async def test_forgotten_pod_waits_again_and_is_not_woken(ended: str) -> None:
    node = Node()
    await node.prepare(node.app)
    if ended == "release":
        await node.stage.release(node.app.uid, None)
    else:
        node.stage.forget(node.app.uid)
    node.report(node.db, READY)
    assert node.woken == []
    assert await node.prepare(node.app) == "started"
    node.stage.forget(node.app.uid)
    node.statuses.clear()
    assert await node.prepare(node.app) == "WaitingForPods"


async def test_apply_delayed_start_is_the_waiting_reason_of_the_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    doer = doer_with(lambda _: None, node.history, KeyedBackoff(1, 1))
    monkeypatch.setattr(doer, "_stages", node.stage)
    monkeypatch.setattr(doer._sandbox, "check_network", lambda _: None)
    state = PodSyncState(1)
    actions = Actions(create_sandbox=True, start=["main"])
    assert await doer.apply(node.app, ObservedPod(uid=node.app.uid), actions, state) == CHECK_SECONDS
    assert state.failures["main"].reason == "WaitingForPods"
    node.report(node.db, READY)
    assert await doer.apply(node.app, ObservedPod(uid=node.app.uid), actions, state) == 0
    assert state.failures == {}, "the status of the next sync, before the pull, has no reason of the wait"
