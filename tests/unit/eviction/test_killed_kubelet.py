"""A kubelet that is killed between the steps of an eviction, and the one that is started after it.

Eviction manager, admission, workers, syncer, status manager and checkpoints are the real ones, below one root
directory and with one runtime and one API server. SIGKILL is a call to one of these two that never returns:
neither it nor any later one of that kubelet has an effect.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pykubelet.agent.eviction import NodeEvents, WorkerKiller
from pykubelet.api.pod import Pod
from pykubelet.api.stats import RlimitStats
from pykubelet.eviction.admission import PressureAdmission, PressureConditions
from pykubelet.eviction.manager import EvictionManager, EvictionSettings, NodeReclaim
from pykubelet.eviction.observations import NodeMeasurements, PodUsage
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.util.tasks import TaskScope
from tests.support.eviction import cgroup, disk, threshold, usage
from tests.unit.cm.test_cgroup_v2 import v2
from tests.unit.podworkers.scripted_node import ScriptedNode, ScriptedRuntime, container
from tests.unit.podworkers.test_cost_per_pod import cgroups

__all__ = ["cgroups", "v2"]

pytestmark = pytest.mark.looptime
UIDS = {
    "other": "00000000-0000-0000-0000-00000000aaaa",
    "hog": "00000000-0000-0000-0000-00000000bbbb",
}
MEMORY_MI = {"other": 500, "hog": 700}
"""Usage of the container of each pod; the pods together are above what the threshold leaves them."""
TOTAL_MI, THRESHOLD_MI = 2048, 1024
MESSAGE = (
    "The node was low on resource: memory. Threshold quantity: 1Gi, available: 848Mi. Container hog was "
    "using 700Mi, request is 0, has larger consumption of memory. "
)


class Measured:
    """Memory that the running containers use."""

    def __init__(self, runtime: ScriptedRuntime) -> None:
        self._runtime = runtime

    @property
    def available_mi(self) -> int:
        return TOTAL_MI - sum(MEMORY_MI[name] for name in self._runtime.names())

    async def node(self) -> NodeMeasurements:
        nodefs = disk("50Gi")
        return NodeMeasurements(
            root=cgroup(f"{self.available_mi}Mi"),
            nodefs=nodefs,
            imagefs=nodefs,
            containerfs=nodefs,
            rlimit=RlimitStats(time=None, maxpid=1000, curproc=100),
            rlimit_time=time.time(),
        )

    async def pods(
        self, uids: Collection[str], *, detailed: bool, volumes: bool = False
    ) -> Mapping[str, PodUsage]:
        found = {}
        for name in self._runtime.names():
            if UIDS[name] in uids:
                used = usage(f"{MEMORY_MI[name]}Mi")
                found[UIDS[name]] = replace(used, containers=(replace(used.containers[0], name=name),))
        return found


class Sigkill:
    """Death of the kubelet at a call to the runtime or the API server, before or after its effect."""

    def __init__(self, call: str, when: Literal["before", "after"]) -> None:
        self._call, self._when = call, when
        self.happened = asyncio.Event()
        self._over = asyncio.Event()

    def guard(self, patch: pytest.MonkeyPatch, node: ScriptedNode) -> None:
        """Let the calls of the kubelet that runs now pass through this."""
        runtime, api = node.runtime, node.api

        def of_container(verb: str) -> Callable[..., str]:
            return lambda id_, *_, **__: f"{verb} {_name(runtime._containers, id_)}"

        def of_sandbox(verb: str) -> Callable[..., str]:
            return lambda id_, *_, **__: f"{verb} sandbox of {_name(runtime._sandboxes, id_)}"

        def of_status(resource: Any, name: str, change: Mapping[str, Any], *_: Any, **__: Any) -> str:
            return f"report {name} {change.get('status', {}).get('phase', '')}"

        for target, method, describe in (
            (runtime, "run_pod_sandbox", lambda *_, **__: ""),
            (runtime, "create_container", lambda *_, **__: ""),
            (runtime, "start_container", of_container("start")),
            (runtime, "stop_container", of_container("stop")),
            (runtime, "remove_container", of_container("remove")),
            (runtime, "stop_pod_sandbox", of_sandbox("stop")),
            (runtime, "remove_pod_sandbox", of_sandbox("remove")),
            (api, "patch", of_status),
            (api, "create", lambda *_, **__: ""),
            (api, "delete", lambda *_, **__: ""),
        ):
            patch.setattr(target, method, self._guarded(getattr(target, method), describe))

    async def choose(self, kill: Callable[[], Awaitable[bool]]) -> bool:
        """Pass through the kill of the pod that the manager has chosen."""
        return await self._guarded(kill, lambda: "choose")()  # type: ignore[no-any-return]

    def bury(self) -> None:
        """End calls that no cancellation reaches."""
        self._over.set()

    def _guarded(self, call: Callable[..., Awaitable[Any]], describe: Callable[..., str]) -> Any:
        async def guarded(*args: Any, **options: Any) -> Any:
            is_step = not self.happened.is_set() and describe(*args, **options) == self._call
            if is_step and self._when == "before":
                self.happened.set()
            await self._end_if_dead()
            result = await call(*args, **options)
            if is_step:
                self.happened.set()
            await self._end_if_dead()
            return result

        return guarded

    async def _end_if_dead(self) -> None:
        if self.happened.is_set():
            await self._over.wait()
            raise asyncio.CancelledError


def _name(known: Mapping[str, Any], id_: str) -> str:
    return known[id_].metadata.name if id_ in known else ""


class Killer(WorkerKiller):
    """The killer of the node, whose calls end with the kubelet."""

    death: Sigkill

    async def kill(self, pod: Pod, grace: int, status: Any) -> bool:
        return await self.death.choose(lambda: WorkerKiller.kill(self, pod, grace, status))


async def nothing() -> None: ...


@asynccontextmanager
async def kubelet(node: ScriptedNode, evicted: list[str], death: Sigkill) -> AsyncIterator[None]:
    """Run a kubelet with its eviction manager until the block is left; `evicted` are the chosen pods."""
    with pytest.MonkeyPatch.context() as patch:
        death.guard(patch, node)
        conditions, measured = PressureConditions(), Measured(node.runtime)
        if measured.available_mi < THRESHOLD_MI:
            # As after a round before the API server has returned the pods, which run already.
            conditions.set(("MemoryPressure",))
        pressure = PressureAdmission(conditions, comparing=False, pod_level=True)
        async with node.running(checkpoints=True, pressure=pressure) as rig, TaskScope() as scope:
            killer = Killer(rig.engine.workers, rig.engine.history)
            killer.death = death
            rig.engine.history.add_listener(
                lambda pod, event: evicted.append(pod.metadata.name) if event.reason == "Evicted" else None
            )
            manager = EvictionManager(
                EvictionSettings(thresholds=(threshold("memory.available", "1Gi"),)),
                measured,
                rig.engine.running_pods,
                killer,
                NodeReclaim(nothing, nothing),
                NodeEvents(lambda *_: None, rig.engine.history),
                conditions,
            )
            scope.start(manager.run(), name="eviction")
            try:
                yield
            finally:
                death.bury()


@pytest.fixture
async def node(tmp_path: Path, cgroups: Cgroups) -> ScriptedNode:
    return ScriptedNode(tmp_path / "root", cgroups)


@pytest.mark.parametrize(
    ("call", "when", "is_reported"),
    [
        ("choose", "before", False),
        ("stop hog", "before", False),
        ("stop hog", "after", False),
        ("stop sandbox of hog", "before", False),
        ("stop sandbox of hog", "after", False),
        ("report hog Failed", "before", False),
        ("report hog Failed", "after", True),
        ("remove hog", "before", True),
        ("remove hog", "after", True),
        ("remove sandbox of hog", "before", True),
        ("remove sandbox of hog", "after", True),
    ],
)
async def test_eviction_kubelet_killed_evicts_no_other_pod_and_status_survives(
    node: ScriptedNode, call: str, when: Literal["before", "after"], is_reported: bool
) -> None:
    """Verify that the pod is evicted by the next kubelet if its status was not reported, and no other one."""
    evicted, death = list[str](), Sigkill(call, when)
    async with kubelet(node, evicted, death):
        for name, uid in UIDS.items():
            node.api.put(name, uid=uid, containers=[container(name)])
        async with asyncio.timeout(300):
            await death.happened.wait()
    assert evicted == ["hog"]
    reported = node.api.status("hog")
    assert (reported["phase"] == "Failed") == is_reported
    for _ in range(2):
        async with kubelet(node, evicted, Sigkill("never", "before")):
            await node.until(lambda: node.api.status("hog")["phase"] == "Failed")
            await asyncio.sleep(200)
            status = node.api.status("hog")
            assert (status["reason"], status["message"]) == ("Evicted", MESSAGE)
            assert node.api.condition("DisruptionTarget", "hog") == "True"
            assert not is_reported or status == reported
            assert node.runtime.names(running=False) == ["other"]
            assert node.api.status("other")["phase"] == "Running"
            assert node.api.container("other", "other")["restartCount"] == 0
    assert set(evicted) == {"hog"}
    assert not [entry for entry in node.runtime.log if entry.startswith(("stop other", "remove other"))]
    assert not is_reported or node.runtime.log.count("start hog") == 1
