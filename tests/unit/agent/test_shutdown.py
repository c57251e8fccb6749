"""Node shutdowns with the real pod engine, a runtime and an API server in memory, by loop time."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.eviction import WorkerKiller
from pykubelet.agent.shutdown import EnginePods, build_shutdown
from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.errors import Unreachable
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.eviction.messages import evicted_status
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.linux.logind import PrepareForShutdown
from pykubelet.node import shutdown_state
from pykubelet.node.shutdown_drain import PodDrain
from pykubelet.node.shutdown_groups import ShutdownPeriod
from pykubelet.node.shutdown_manager import NodeShutdownManager
from pykubelet.node.shutdown_state import STATUSES_FILE, FinalStatuses, NodeShutdownState, ShutdownAdmission
from pykubelet.podconfig.mux import PodChange
from pykubelet.podworkers.engine import PodEngine
from pykubelet.util.tasks import TaskScope
from tests.support.pods import NOW, make_pod
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.scripted_node import ScriptedApi, ScriptedNode, ScriptedRuntime, container
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["cgroups", "v2"]

pytestmark = pytest.mark.looptime
T = TypeVar("T")
PERIODS = (ShutdownPeriod(0, 20), ShutdownPeriod(1000, 10), ShutdownPeriod(2000, 5))
MESSAGE = "Pod was terminated in response to imminent node shutdown."


async def _at_once(work: Callable[[], T]) -> T:
    """Loop time would pass while a thread works."""
    return work()


class SlowRuntime(ScriptedRuntime):
    """A runtime whose containers take their time to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stop_seconds: dict[str, float] = {}
        self.stopped_at: dict[str, float] = {}

    async def stop_container(self, container_id: str, grace_seconds: int) -> None:
        name = self._containers[container_id].metadata.name
        await asyncio.sleep(min(self.stop_seconds.get(name, 0.0), grace_seconds))
        if self.stop_seconds.get(name) == float("inf"):
            await asyncio.sleep(3600)
        await super().stop_container(container_id, grace_seconds)
        self.stopped_at[name] = asyncio.get_running_loop().time()


class OutageApi(ScriptedApi):
    """An API server that may be unreachable for patches."""

    is_down = False

    async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
        if isinstance(obj, Pod):
            raise Unreachable("server", "it has no mirror pods")
        return await super().create(resource, obj, namespace)

    async def patch(self, *arguments: Any, **options: Any) -> Any:
        if self.is_down:
            raise Unreachable("server", "it is down")
        return await super().patch(*arguments, **options)


@dataclasses.dataclass
class Rig:
    engine: PodEngine
    drain: PodDrain
    final: FinalStatuses
    state: NodeShutdownState

    async def shut_down(self) -> float:
        """Drain the node, and return how long that took."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self.state.set(True)
        await self.drain.run(PERIODS)
        return clock() - began


class ShutdownNode(ScriptedNode):
    def __init__(self, root: Path, cgroups: Cgroups) -> None:
        super().__init__(root, cgroups)
        self.runtime: SlowRuntime = SlowRuntime()
        self.api: OutageApi = OutageApi()

    @asynccontextmanager
    async def with_drain(self) -> AsyncIterator[Rig]:
        self.root.mkdir(parents=True, exist_ok=True)
        final, state = FinalStatuses(self.root), NodeShutdownState()
        async with (
            self.running(final=final, shutdown=ShutdownAdmission(state)) as rig,
            TaskScope() as scope,
        ):
            pods = EnginePods(rig.engine, final, lambda uid: False, clustered=True)
            drain = PodDrain(pods, final)
            scope.start(drain.deliver(), name="deliver")
            yield Rig(rig.engine, drain, final, state)

    def put_pod(self, name: str, priority: int = 0, **spec: Any) -> None:
        self.api.put(name, uid=f"uid-{name}", priority=priority, containers=[container(name)], **spec)

    async def until_running(self, *names: str) -> None:
        await self.until(lambda: all(self.api.status(name)["phase"] == "Running" for name in names))


@pytest.fixture
async def node(tmp_path: Path, cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> ShutdownNode:
    monkeypatch.setattr(shutdown_state, "finish_in_thread", _at_once)
    return ShutdownNode(tmp_path / "root", cgroups)


async def test_shutdown_three_priorities_each_has_its_period_and_final_status(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        node.put_pod("low")
        node.put_pod("middle", 1500)
        node.put_pod("high", 5000, terminationGracePeriodSeconds=2)
        await node.until_running("low", "middle", "high")
        node.runtime.stop_seconds |= {"low": 15, "middle": 60, "high": 60}
        taken = await rig.shut_down()
        stops = [call for call in node.runtime.log if call.startswith("stop ") and "sandbox" not in call]
        assert stops == ["stop low 20", "stop middle 10", "stop high 2"]
        at = node.runtime.stopped_at
        assert at["low"] < at["middle"] < at["high"]
        assert 26 < taken < 32
        for name in ("low", "middle", "high"):
            status = node.api.status(name)
            assert (status["phase"], status["reason"], status["message"]) == ("Failed", "Terminated", MESSAGE)
            assert node.api.condition("DisruptionTarget", name) == "True"
            assert node.api.condition("Ready", name) == "False"
            assert node.api.container(name, name)["state"]["terminated"]
        assert not rig.final
        assert not (node.root / STATUSES_FILE).exists()


async def test_shutdown_new_pod_is_rejected(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        rig.state.set(True)
        node.put_pod("late")
        await node.until(lambda: node.api.status("late")["phase"] == "Failed")
        assert node.api.status("late")["reason"] == "NodeShutdown"
        rejected = "Pod was rejected as the node is shutting down."
        assert rejected in node.api.status("late")["message"]
        assert "create late" not in node.runtime.log
        await node.until(lambda: ("NodeShutdown", rejected) in node.api.recorded)


async def test_shutdown_api_server_down_status_is_reported_after_boot(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        node.put_pod("web")
        await node.until_running("web")
        node.api.is_down = True
        taken = await rig.shut_down()
        assert taken < 15
        assert node.api.status("web")["phase"] == "Running"
        assert set(rig.final) == {"uid-web"}
    starts = node.runtime.log.count("start web")
    node.runtime.lose_sandboxes()
    node.api.is_down = False
    async with node.with_drain() as rig:
        await node.until(lambda: node.api.status("web")["phase"] == "Failed")
        assert node.api.status("web")["reason"] == "Terminated"
        assert node.api.condition("DisruptionTarget") == "True"
        assert node.api.container("web", "web")["state"]["terminated"]
        await node.until(lambda: not (node.root / STATUSES_FILE).exists())
        await asyncio.sleep(120)
        assert node.runtime.log.count("start web") == starts
        assert node.api.status("web")["phase"] == "Failed"


async def test_shutdown_runtime_lost_containers_status_from_disk_is_reported(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        node.put_pod("web")
        await node.until_running("web")
        node.api.is_down = True
        await rig.shut_down()
    node.runtime.lose_everything()
    node.api.is_down = False
    async with node.with_drain():
        await node.until(lambda: node.api.status("web")["phase"] == "Failed")
        ended = node.api.container("web", "web")["state"]["terminated"]
        assert ended["reason"] != "ContainerStatusUnknown"
        assert ended["containerID"]


async def test_shutdown_kubelet_killed_during_it_next_one_terminates_only_begun_pods(
    node: ShutdownNode,
) -> None:
    async with node.with_drain() as rig:
        node.put_pod("low")
        node.put_pod("high", 5000)
        await node.until_running("low", "high")
        node.runtime.stop_seconds["low"] = float("inf")
        task = asyncio.ensure_future(rig.shut_down())
        await node.until(lambda: "uid-low" in rig.final)
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
    node.runtime.stop_seconds.clear()
    async with node.with_drain():
        await node.until(lambda: node.api.status("low")["phase"] == "Failed")
        assert node.api.status("low")["reason"] == "Terminated"
        await asyncio.sleep(60)
        assert node.api.status("high")["phase"] == "Running"
        assert "low" not in node.runtime.names()


async def test_shutdown_pod_that_cannot_be_killed_next_group_follows(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        node.put_pod("stuck")
        node.put_pod("high", 5000)
        await node.until_running("stuck", "high")
        node.runtime.stop_seconds["stuck"] = float("inf")
        taken = await rig.shut_down()
        assert 20 < taken < 32
        assert node.api.status("high")["reason"] == "Terminated"
        assert node.api.status("stuck")["phase"] == "Running"
        assert set(FinalStatuses(node.root)) == {"uid-stuck"}
        await node.until(lambda: "ExceededGracePeriod" in [reason for reason, _ in node.api.recorded])


async def test_shutdown_during_pod_start_pod_ends_failed(node: ShutdownNode) -> None:
    node.runtime.exits["first"] = [(3600, 0)]
    async with node.with_drain() as rig:
        node.api.put("slow", uid="uid-slow", initContainers=[container("first")], containers=[container()])
        await node.until(lambda: "start first" in node.runtime.log)
        await rig.shut_down()
        status = node.api.status("slow")
        assert (status["phase"], status["reason"]) == ("Failed", "Terminated")
        assert "start main" not in node.runtime.log
        assert node.runtime.names() == []


async def test_shutdown_deleted_pod_is_not_waited_for_without_api_server(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        node.put_pod("web")
        await node.until_running("web")
        node.runtime.stop_seconds["web"] = 8
        node.api.delete_pod("web")
        await node.until(lambda: rig.engine.state("uid-web") == "terminating")
        node.api.is_down = True
        taken = await rig.shut_down()
        assert taken < 12
        assert not rig.final


async def test_shutdown_cancelled_static_pods_start_again(node: ShutdownNode) -> None:
    async with node.with_drain() as rig:
        static = make_pod("static", "static", containers=("agent",))
        static.metadata.annotations = {"kubernetes.io/config.source": "file"}
        for one in static.spec.containers:
            one.image = "busybox"
        rig.engine.loop.pods([PodChange("ADD", static, "file")])
        await node.until(lambda: "agent" in node.runtime.names())
        await rig.shut_down()
        assert node.runtime.names() == []
        assert not rig.final
        status = rig.engine.statuses.get("static")
        assert status is not None
        assert status.reason == "Terminated"
        rig.state.set(False)
        rig.engine.restart_static_pods("Terminated")
        await node.until(lambda: "agent" in node.runtime.names())
        await node.until(lambda: rig.engine.statuses.get("static").phase == "Running")  # type: ignore[union-attr]


async def test_shutdown_cancelled_before_static_pod_is_observed_it_starts_again(node: ShutdownNode) -> None:
    """Verify that a static pod starts again whose status does not show the termination yet."""
    async with node.with_drain() as rig:
        static = make_pod("static", "static", containers=("agent",))
        static.metadata.annotations = {"kubernetes.io/config.source": "file"}
        for one in static.spec.containers:
            one.image = "busybox"
        rig.engine.loop.pods([PodChange("ADD", static, "file")])
        await node.until(lambda: "agent" in node.runtime.names())
        await node.until(lambda: rig.engine.statuses.get("static").phase == "Running")  # type: ignore[union-attr]
        before = node.runtime.names()
        rig.drain._pods.terminate(static, 5)
        status = rig.engine.statuses.get("static")
        assert status is not None
        assert status.phase == "Running"
        rig.engine.restart_static_pods("Terminated")
        await node.until(lambda: "agent" in node.runtime.stopped_at)
        await node.until(lambda: node.runtime.names() == before)
        await node.until(lambda: rig.engine.state("static") == "syncing")


def evict(rig: Rig, name: str) -> asyncio.Task[bool]:
    """Evict a pod as the eviction manager does for a hard threshold."""
    pod = rig.engine.store.get(f"uid-{name}")
    assert pod is not None

    def status(before: PodStatus) -> PodStatus:
        return evicted_status(pod, before, "The node was low on resource: memory.", NOW, disrupted=True)

    killer = WorkerKiller(rig.engine.workers, rig.engine.history)
    return asyncio.ensure_future(killer.kill(pod, 1, status))


@pytest.mark.parametrize(
    ("when", "reason"), [("before", "Evicted"), ("while it is recorded", "Evicted"), ("after", "Terminated")]
)
async def test_shutdown_pod_evicted_as_drain_begins_first_reason_stays_and_next_group_follows(
    node: ShutdownNode, monkeypatch: pytest.MonkeyPatch, when: str, reason: str
) -> None:
    async with node.with_drain() as rig:
        node.put_pod("hog")
        node.put_pod("high", 5000)
        await node.until_running("hog", "high")
        node.runtime.stop_seconds |= {"hog": 15}
        kills: list[asyncio.Task[bool]] = []
        if when == "before":
            kills.append(evict(rig, "hog"))
            await node.until(lambda: rig.engine.state("uid-hog") == "terminating")
        elif when == "while it is recorded":

            async def evict_meanwhile(work: Callable[[], T]) -> T:
                if not kills:
                    kills.append(evict(rig, "hog"))
                    # The drain goes on before the worker has reported the eviction.
                    await asyncio.sleep(0)
                    assert rig.engine.state("uid-hog") == "terminating"
                return work()

            monkeypatch.setattr(shutdown_state, "finish_in_thread", evict_meanwhile)
        drained = asyncio.ensure_future(rig.shut_down())
        if when == "after":
            await node.until(lambda: rig.engine.statuses.get("uid-hog").reason == "Terminated")  # type: ignore[union-attr]
            kills.append(evict(rig, "hog"))
        assert await drained < 15
        (kill,) = kills
        assert await kill
        status = node.api.status("hog")
        assert (status["phase"], status["reason"]) == ("Failed", reason)
        assert node.api.condition("DisruptionTarget", "hog") == "True"
        assert node.api.status("high")["reason"] == "Terminated"
        assert node.runtime.stopped_at["hog"] < node.runtime.stopped_at["high"]
        assert not rig.final
    assert not (node.root / STATUSES_FILE).exists()


class ScriptedLogind:
    """A logind that announces one shutdown."""

    def __init__(self) -> None:
        self.is_shutting_down = asyncio.Event()
        self.inhibited = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        yield self

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Any]:
        yield self

    async def next(self) -> PrepareForShutdown:
        await self.is_shutting_down.wait()
        self.next = asyncio.Event().wait  # type: ignore[assignment,method-assign]
        return PrepareForShutdown(True)

    async def is_preparing(self) -> bool:
        return self.is_shutting_down.is_set()

    async def max_delay(self) -> float:
        return 1000.0

    async def inhibit(self, who: str, why: str) -> Any:
        self.inhibited += 1
        return SimpleNamespace(is_held=True, release=lambda: None)


@asynccontextmanager
async def with_logind(node: ShutdownNode, logind: ScriptedLogind) -> AsyncIterator[Rig]:
    """A kubelet that watches logind."""
    async with node.with_drain() as rig, TaskScope() as scope:
        manager = NodeShutdownManager(
            PERIODS, rig.drain, rig.state, lambda *_: None, scope, connect=logind.connect
        )
        scope.start(manager.run(), name="shutdown-manager")
        yield rig


async def test_shutdown_kubelet_replaced_during_drain_next_one_continues_it(node: ShutdownNode) -> None:
    logind = ScriptedLogind()
    async with with_logind(node, logind) as rig:
        node.put_pod("low")
        node.put_pod("high", 5000)
        await node.until_running("low", "high")
        assert logind.inhibited == 1
        node.runtime.stop_seconds["low"] = float("inf")
        logind.is_shutting_down.set()
        await node.until(lambda: rig.engine.state("uid-low") == "terminating")
        assert "uid-low" in rig.final
    assert node.api.status("high")["phase"] == "Running"
    node.runtime.stop_seconds.clear()
    async with with_logind(node, logind) as rig:
        await node.until(lambda: rig.state.active)
        node.put_pod("late")
        for name in ("low", "high", "late"):
            await node.until(lambda name=name: node.api.status(name).get("phase") == "Failed")  # type: ignore[misc]
        reasons = {name: node.api.status(name)["reason"] for name in ("low", "high", "late")}
        assert reasons == {"low": "Terminated", "high": "Terminated", "late": "NodeShutdown"}
        assert node.runtime.stopped_at["low"] < node.runtime.stopped_at["high"]
        assert node.runtime.names() == []
        await node.until(lambda: not (node.root / STATUSES_FILE).exists())
    # The second kubelet does not delay a shutdown that has begun.
    assert logind.inhibited == 1


@pytest.mark.parametrize(
    ("gates", "period", "has_manager", "has_metrics"),
    [
        ({}, "30s", True, True),
        ({}, "0s", False, True),
        ({"GracefulNodeShutdownBasedOnPodPriority": False}, "30s", True, False),
        ({"GracefulNodeShutdown": False}, "0s", False, False),
    ],
)
async def test_build_shutdown_follows_periods_and_gates(
    node: ShutdownNode, gates: dict[str, bool], period: str, has_manager: bool, has_metrics: bool
) -> None:
    registry = CollectorRegistry()
    config = KubeletConfiguration(shutdown_grace_period=Duration.parse(period))
    settings = AgentSettings(
        KubeletFlags(root_dir=str(node.root)),
        config,
        FeatureGates().with_overrides(gates, str),
        "n1",
    )
    async with node.running() as rig, TaskScope() as scope:
        found = build_shutdown(
            settings,
            NodeShutdownState(),
            FinalStatuses(node.root),
            rig.engine,
            lambda uid: False,
            lambda *_: None,
            registry,
            scope,
        )
    assert (found.manager is not None) == has_manager
    value = registry.get_sample_value("kubelet_graceful_shutdown_start_time_seconds")
    assert (value is not None) == has_metrics
