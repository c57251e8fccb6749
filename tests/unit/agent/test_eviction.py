"""Facts and actions of the eviction manager: statistics and pod workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pykubelet.agent.eviction import NodeEvents, NodeFacts, WorkerKiller, node_pressure
from pykubelet.api.pod_status import PodStatus
from pykubelet.eviction.admission import PressureConditions
from pykubelet.eviction.observations import DiskUsage
from pykubelet.node.conditions import NodePressure
from pykubelet.podconfig.pod_history import Event, PodHistory
from pykubelet.podworkers.workers import PodWorkerState
from pykubelet.stats.collector import NODE, Collector
from pykubelet.stats.cri.runtime_stats import ImageFilesystems, LayerUsage
from pykubelet.stats.samples import CgroupGone, Details, Limits, Target, Usage
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope
from tests.support.pods import make_pod
from tests.unit.stats import summary_facts


class Reader:
    """A cgroup whose usage counts the samples."""

    procs_file = None

    def __init__(self) -> None:
        self.samples = 0
        self.gone = False

    def read_usage(self, *, fresh: bool = False) -> Usage:
        if self.gone:
            raise CgroupGone("it is gone")
        self.samples += 1
        return Usage(time=float(self.samples), cpu=0, memory=2, working_set=self.samples)

    def refresh(self, details: Details) -> Details:
        return details

    def read_limits(self) -> Limits:
        return Limits(created=0.0, memory_limit=100)

    def read(self) -> tuple[Usage, Details]:
        return self.read_usage(), Details()

    def close(self) -> None: ...


class Runtime:
    """A runtime that reports the paths of images when it is up."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = 0

    async def image_filesystems(self) -> ImageFilesystems:
        self.calls += 1
        return ImageFilesystems(LayerUsage(0.0, self.path, 0, 0) if self.path else None)


@pytest.fixture
async def tasks() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


async def test_node_facts_measures_now_and_reuses_image_paths(tmp_path: Path, tasks: TaskScope) -> None:
    reader, runtime = Reader(), Runtime("")
    collector = Collector(lambda path: cast(Any, reader), tasks)
    collector.set_targets(NODE, [Target(path="/", kind="root")])
    statistics = SimpleNamespace(
        collector=collector, host_filesystems=Filesystems(tmp_path, tasks), runtime=runtime
    )
    facts = NodeFacts(cast(Any, statistics), tmp_path, "/kubepods")
    first = await facts.node()
    assert first.root is not None
    assert (first.root.usage, first.pods) == (Usage(time=1.0, cpu=0, memory=2, working_set=1), None)
    assert first.nodefs is not None
    assert (first.imagefs, first.disks()) == (None, None)
    runtime.path = str(tmp_path)
    second = await facts.node()
    assert second.root is not None
    assert second.root.usage is not None
    assert second.root.usage.time == 2.0
    assert second.disks() is not None
    assert second.nodefs is not None
    assert second.nodefs.time > first.nodefs.time
    await facts.node()
    assert runtime.calls == 2
    reader.gone = True
    assert (await facts.node()).root is None


async def test_node_facts_pods_only_requested_ones() -> None:
    inputs = summary_facts.node_inputs(pods=20)
    asked = []

    async def summary_inputs(only_cpu_and_memory: bool, *, detailed: bool) -> Any:
        asked.append(detailed)
        return inputs

    async def refresh_volumes(uids: Any) -> None:
        refreshed.append(uids)

    refreshed: list[Any] = []
    statistics = SimpleNamespace(summary_inputs=summary_inputs, refresh_volumes=refresh_volumes)
    facts = NodeFacts(cast(Any, statistics), Path("/"), "")
    uids = {record.target.pod_uid for record in inputs.records if record.target.kind == "container"}
    found = await facts.pods(uids, detailed=True)
    assert found.keys() == uids
    assert uids
    one = next(iter(found.values()))
    assert one.containers
    assert all(isinstance(part.logs, DiskUsage | None) for part in one.containers)
    assert not refreshed
    assert await facts.pods({"other"}, detailed=False, volumes=True) == {}
    assert (asked, refreshed) == ([True, False], [{"other"}])


class Worker:
    """A pod worker that ends when the test says so."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.state = PodWorkerState.TERMINATING


class Workers:
    """Workers of one pod."""

    def __init__(self) -> None:
        self.worker: Worker | None = Worker()
        self.terminated: list[tuple[str, int | None]] = []
        self.listener: Any = None

    def add_listener(self, listener: Any) -> None:
        self.listener = listener

    def get(self, uid: str) -> Worker | None:
        return self.worker

    def terminate(self, uid: str, grace: int | None = None, *, pod_status: Any = None) -> None:
        self.terminated.append((uid, grace))


def unchanged(status: PodStatus) -> PodStatus:
    return status


@pytest.mark.looptime
@pytest.mark.parametrize(("grace", "seconds"), [(1, 10), (30, 45)])
async def test_kill_pod_that_hangs_times_out_with_event(grace: int, seconds: int) -> None:
    workers, history = Workers(), PodHistory()
    killer = WorkerKiller(cast(Any, workers), history)
    started = asyncio.get_running_loop().time()
    assert not await killer.kill(make_pod(), grace, unchanged)
    assert asyncio.get_running_loop().time() - started == pytest.approx(seconds, abs=0.1)
    assert [event.reason for event in history.events("u1")] == ["ExceededGracePeriod"]
    assert workers.terminated == [("u1", grace)]


@pytest.mark.looptime
async def test_kill_pod_stops_then_finished() -> None:
    workers = Workers()
    worker = workers.worker
    assert worker is not None
    killer = WorkerKiller(cast(Any, workers), PodHistory())
    asyncio.get_running_loop().call_later(2, worker.stopped.set)
    assert await killer.kill(make_pod(), 1, unchanged)
    waiting = asyncio.create_task(killer.wait_finished({"u1"}))
    await asyncio.sleep(5)
    assert not waiting.done()
    worker.state = PodWorkerState.REMOVING
    workers.listener("u1")
    async with asyncio.timeout(1):
        await waiting


def test_pod_event_annotations_reach_listeners() -> None:
    history, heard = PodHistory(), list[Event]()
    history.add_listener(lambda pod, event: heard.append(event))
    events = NodeEvents(lambda kind, reason, message: None, history)
    events.pod_event(make_pod(), "Evicted", "low ", {"starved_resource": "memory"})
    assert [(event.reason, event.annotations) for event in heard] == [
        ("Evicted", {"starved_resource": "memory"})
    ]
    assert [entry.text for entry in history.timeline("u1")] == ["low"]


def test_node_pressure_conditions_are_mapped() -> None:
    conditions = PressureConditions()
    conditions.set(("DiskPressure", "PIDPressure"))
    assert node_pressure(conditions) == NodePressure(memory=False, disk=True, pids=True)
