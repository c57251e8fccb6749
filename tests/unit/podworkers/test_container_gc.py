"""Dead containers: which pods keep theirs, and when the others lose them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.gc import LogCollector
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podworkers.container_gc import ContainerDeletor, ContainerGC, exited_beyond, is_evicted
from pykubelet.transport.errors import CriError, Unavailable
from pykubelet.util.tasks import TaskScope
from tests.support.pods import make_pod
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.scripted_node import UID, ScriptedNode, container
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["cgroups", "v2"]

pytestmark = pytest.mark.looptime
GONE = Unavailable("ListContainers", "Unavailable", "gone")


@pytest.fixture
async def node(tmp_path: Path, cgroups: Cgroups) -> ScriptedNode:
    return ScriptedNode(tmp_path / "root", cgroups)


def evict(status: PodStatus) -> PodStatus:
    return msgspec.structs.replace(status, phase="Failed", reason="Evicted", message="too big")


@pytest.mark.parametrize(
    ("phase", "reason", "expected"),
    [
        ("Failed", "Evicted", True),
        ("Failed", "Preempting", True),
        ("Failed", "NodeShutdown", False),
        ("Running", "Evicted", False),
    ],
)
def test_is_evicted_status_phase_and_reason_decide(phase: str, reason: str, expected: bool) -> None:
    assert is_evicted(PodStatus(phase=phase, reason=reason)) is expected
    assert not is_evicted(None)


def dead(name: str, at: int, phase: ContainerPhase = "exited") -> ObservedContainer:
    return ObservedContainer(id=f"{name}@{at}", name=name, phase=phase, created_at=at)


def test_exited_beyond_newest_of_each_name_are_retained() -> None:
    observed = ObservedPod(
        uid="u",
        containers=(
            dead("a", 1),
            dead("a", 3),
            dead("a", 2),
            dead("a", 4, "running"),
            dead("b", 1),
            dead("c", 9, "created"),
            dead("c", 8, "unknown"),
        ),
    )
    assert [c.id for c in exited_beyond(observed, 1)] == ["a@2", "a@1"]
    assert [c.id for c in exited_beyond(observed, 2)] == ["a@1"]
    assert sorted(c.id for c in exited_beyond(observed, 0)) == ["a@1", "a@2", "a@3", "b@1"]


async def test_container_deletor_crash_loop_retains_newest_exited_container(node: ScriptedNode) -> None:
    node.runtime.exits["main"] = [(1, 1)] * 4
    async with node.running():
        node.api.put(containers=[container()])
        # The fourth run ends 34 s after the first: before the second collection of garbage.
        await node.until(lambda: node.runtime.log.count("start main") == 4, 50)
        await asyncio.sleep(4)
        assert node.runtime.log.count("remove main") == 3
        assert node.runtime.names(running=False) == ["main"]
        assert node.api.container("main")["restartCount"] == 3


async def test_container_deletor_removal_fails_next_event_retries(node: ScriptedNode) -> None:
    node.runtime.exits["main"] = [(1, 1)] * 4
    node.runtime.failures["remove main"] = [CriError("RemoveContainer", "Internal", "the disk is broken")]
    async with node.running():
        node.api.put(containers=[container()])
        await node.until(lambda: node.runtime.log.count("start main") == 4, 50)
        await asyncio.sleep(4)
        assert node.runtime.names(running=False) == ["main"]


async def test_container_deletor_unknown_pod_and_starts_are_ignored() -> None:
    removed = list[str]()

    async def remove(container_id: str) -> None:
        removed.append(container_id)

    pods = {"u": ObservedPod(uid="u", containers=(dead("a", 1), dead("a", 2)))}
    async with TaskScope() as scope:
        deletor = ContainerDeletor(remove, pods.get, lambda uid: False, 0)
        scope.start(deletor.run(), name="deletor")
        deletor.handle_event(PodLifecycleEvent("u", "a@3", "started"))
        deletor.handle_event(PodLifecycleEvent("other", "x", "ended"))
        deletor.handle_status(make_pod("u"), PodStatus(phase="Failed"), None)
        await asyncio.sleep(10)
        assert removed == []
        # A relist only names the pod. One is retained even if the policy is to retain none.
        deletor.handle_event(PodLifecycleEvent("u"))
        await asyncio.sleep(10)
        assert removed == ["a@1"]


async def test_container_gc_evicted_pod_loses_containers_sandbox_and_status_stays(node: ScriptedNode) -> None:
    async with node.running() as rig:
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.status()["phase"] == "Running")
        rig.engine.workers.terminate(UID, 1, pod_status=evict)
        await node.until(lambda: not node.runtime.names(running=False), 10)
        await node.until(lambda: node.runtime.is_empty, 70)
        status = node.api.status()
        assert (status["phase"], status["reason"]) == ("Failed", "Evicted")
        assert "terminated" in node.api.container("main")["state"]
    async with node.running():
        await asyncio.sleep(120)
        assert node.runtime.is_empty, "an evicted pod does not run again"
        assert node.api.status()["reason"] == "Evicted"


async def test_delete_all_unused_containers_terminated_pod_loses_its_containers(node: ScriptedNode) -> None:
    node.runtime.exits["main"] = [(1, 0)]
    async with node.running() as rig:
        node.api.put(containers=[container()], restartPolicy="Never")
        node.api.put("other", uid=UID[:-1] + "b", containers=[container("runs")])
        await node.until(lambda: node.api.status()["phase"] == "Succeeded")
        await node.until(lambda: node.api.status("other")["phase"] == "Running")
        await asyncio.sleep(130)
        assert sorted(node.runtime.names(running=False)) == ["main", "runs"]
        await rig.engine.delete_all_unused_containers()
        assert node.runtime.names(running=False) == ["runs"]
        assert node.runtime.log.count("remove sandbox") == 1
        assert node.api.container("main")["state"]["terminated"]["exitCode"] == 0
    async with node.running():
        await asyncio.sleep(60)
        assert node.runtime.log.count("start main") == 1, "a terminated pod does not run again"
        assert node.api.status()["phase"] == "Succeeded"


async def test_delete_all_unused_containers_crashing_pod_keeps_exit_code(node: ScriptedNode) -> None:
    node.runtime.exits["main"] = [(1, 1)] * 4
    async with node.running() as rig:
        node.api.put(containers=[container()])
        await node.until(lambda: node.api.waiting() == "CrashLoopBackOff")
        await rig.engine.delete_all_unused_containers()
        await asyncio.sleep(5)
        status = node.api.container("main")
        assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (2, 1)


async def test_delete_all_unused_containers_runtime_down_raises(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> Any:
        raise GONE

    async with node.running() as rig:
        await asyncio.sleep(5)
        with monkeypatch.context() as patch:
            patch.setattr(node.runtime, "list_containers", fail)
            with pytest.raises(Unavailable):
                await rig.engine.delete_all_unused_containers()
        await rig.engine.delete_all_unused_containers()


class Collector:
    """A collector whose collections take a minute and fail when they are told to."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.collections: list[bool] = []
        self.active = 0

    async def collect(self, *, evict_all: bool, **_: object) -> None:
        self.collections.append(evict_all)
        self.active += 1
        assert self.active == 1, "one collection at a time"
        try:
            await asyncio.sleep(60)
            failure = self.failures.pop(0) if self.failures else None
            if failure is not None:
                raise failure
        finally:
            self.active -= 1


def container_gc(collector: Collector, events: list[tuple[str, str, str]]) -> ContainerGC:
    pods: Any = SimpleNamespace(
        should_content_be_removed=None, should_runtime_be_removed=None, all_sources_ready=True
    )
    subject: Any = collector
    return ContainerGC(subject, pods, lambda *event: events.append(event))


async def test_container_gc_concurrent_requests_run_one_after_the_other() -> None:
    collector = Collector()
    subject = container_gc(collector, [])
    async with TaskScope() as scope:
        scope.start(subject.run_once(), name="periodic")
        await asyncio.sleep(1)
        scope.start(subject.run_once(), name="overlapping")
        scope.start(subject.delete_all_unused_containers(), name="eviction")
        await asyncio.sleep(130)
    assert collector.collections == [False, True]


async def test_container_gc_cancelled_collection_releases_the_lock() -> None:
    collector = Collector()
    subject = container_gc(collector, [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await subject.delete_all_unused_containers()
    await subject.run_once()
    assert collector.collections == [True, False]


async def test_container_gc_pod_logs_unreadable_event_has_upstream_message(tmp_path: Path) -> None:
    class Logs(Collector):
        async def collect(self, *, evict_all: bool, **_: object) -> None:
            await LogCollector(cast(Any, None), tmp_path / "pods", None).remove_log_dirs(lambda uid: True)

    (tmp_path / "pods").touch()
    events = list[tuple[str, str, str]]()
    await container_gc(Logs(), events).run_once()
    message = f'failed to read podLogsDirectory "{tmp_path}/pods": open {tmp_path}/pods: not a directory'
    assert events == [("Warning", "ContainerGCFailed", message)]


async def test_container_gc_each_failure_is_a_node_event() -> None:
    events = list[tuple[str, str, str]]()
    missing = PermissionError(13, "Permission denied", "/var/log/pods")
    subject = container_gc(Collector(GONE, missing, None), events)
    for _ in range(4):
        await subject.run_once()
    assert [event[:2] for event in events] == [("Warning", "ContainerGCFailed")] * 2
    assert [event[2] for event in events] == ["rpc error: code = Unavailable desc = gone", str(missing)]
