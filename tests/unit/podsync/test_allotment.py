"""CPUs and memory from admission to the end of a pod: who waits for whom, what running containers hear."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection, DeferredResult, PodAdmitAttributes
from pykubelet.api.node import Node
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cpu.manager import CpuManager, RunningContainer
from pykubelet.cm.cpu.policy import StaticPolicy
from pykubelet.cm.cpu.state import FILE_NAME
from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.topology.hints import Hints, TopologyHint
from pykubelet.cm.topology.manager import AlignmentMetrics, TopologyManager, TopologyMetrics
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.options import UNRESTRICTED, CpusetAssigner, CpusetAssignment
from pykubelet.podsync.resource_allocator import LEAVING_SECONDS, ResourceAllocator, wants_devices
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import TaskScope
from tests.support.cpu_machines import machine
from tests.support.pod_resources import pod_of

MACHINE = machine(cores=2, threads=1)
GUARANTEED = {"limits": {"cpu": "1", "memory": "1Gi"}}
NOT_ENOUGH = AdmitRejection(
    "UnexpectedAdmissionError",
    "Allocate failed due to not enough cpus available to satisfy request: requested=1, available=0, "
    "which is unexpected",
)


@dataclass
class Dongles:
    """One who gives devices and has to ask for them: there is one dongle."""

    having: set[str] = field(default_factory=set)
    absent: bool = False
    """Whether their plugin has not registered yet."""

    @property
    def holders(self) -> AbstractSet[str]:
        return self.having

    def hints(self, pod: Pod, container: Container) -> Hints:
        return {}

    def pod_hints(self, pod: Pod) -> Hints:
        return {}

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None]:
        async def ask() -> None:
            await asyncio.sleep(1)
            self.having.add(pod.uid)

        return ask()

    def forget(self, uid: str) -> None:
        self.having.discard(uid)

    def awaited(self, pod: Pod) -> list[str]:
        return ["example.com/dongle"] if self.absent else []

    async def wait_registered(self, pod: Pod) -> None:
        await asyncio.sleep(100)
        self.absent = False


class Runtime:
    """Takes new CPUs of containers; `failures` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.told: list[tuple[str, str]] = []
        self._failures = list(failures)

    async def update(self, container_id: str, linux: pb.LinuxContainerResources) -> None:
        if self._failures:
            raise self._failures.pop(0)
        assert linux == pb.LinuxContainerResources(cpuset_cpus=linux.cpuset_cpus)
        self.told.append((container_id, linux.cpuset_cpus))


class Here:
    """A node with the CPUs 0 and 1, of which 0 is the system's."""

    def __init__(self, folder: Path, dongles: Dongles | None = None, *, static: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.file = folder / FILE_NAME
        policy = StaticPolicy(MACHINE, frozenset({0})) if static else None
        cpus = CpuManager(self.file, policy, online=lambda: MACHINE.all)
        memory = MemoryManager("None", folder / "memory_manager_state")
        topology = TopologyManager(
            "none",
            "container",
            {},
            (),
            (cpus, memory),
            plugin_provider=dongles,
            metrics=TopologyMetrics(self.registry, AlignmentMetrics(self.registry)),
        )
        devices: Any = dongles
        self.allotment = ResourceAllocator(cpus, memory, topology, devices)
        self.leaving: set[str] = set()
        self.allotment.start(lambda uid: uid in self.leaving)
        self.running: list[RunningContainer] = []

    def come(self, pod: Pod) -> object:
        return self.allotment.admit(PodAdmitAttributes(pod=pod, node=Node()))

    def run(self, pod: Pod, container_id: str) -> CpusetAssignment:
        """Make the pod's container as it is made on a node."""
        share = self.allotment.assignment_for(pod, pod.spec.containers[0])
        self.allotment.on_container_created(pod, pod.spec.containers[0], container_id, share.cpus)
        self.running.append(RunningContainer(pod.uid, "c0", container_id))
        return share

    @asynccontextmanager
    async def telling(self, runtime: Runtime) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.allotment.run(runtime.update, lambda: self.running, 10.0), name="cpus")
            await asyncio.sleep(0)
            yield


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


async def test_resource_allocator_cpus_checkpointed_and_released(here: Here) -> None:
    shares: CpusetAssigner = here.allotment
    mine, others = pod_of(GUARANTEED), pod_of({})
    assert shares.assignment_for(others, others.spec.containers[0]) == CpusetAssignment("0-1")
    assert here.come(mine) is None
    assert here.come(others) is None
    assert shares.has_exclusive(mine.uid)
    assert not shares.has_exclusive(others.uid)
    assert shares.assignment_for(mine, mine.spec.containers[0]) == CpusetAssignment("1", exclusive=True)
    assert shares.assignment_for(others, others.spec.containers[0]) == CpusetAssignment("0")
    assert json.loads(here.file.read_text())["entries"] == {mine.uid: {"c0": "1"}}
    # It is asked again after each restart.
    assert here.come(mine) is None
    assert here.come(pod_of(GUARANTEED)) == NOT_ENOUGH
    here.allotment.forget(mine.uid)
    assert "entries" not in json.loads(here.file.read_text())
    assert here.come(pod_of(GUARANTEED)) is None


async def test_resource_allocator_policy_none_cpus_unrestricted(tmp_path: Path) -> None:
    here = Here(tmp_path, static=False)
    pod = pod_of(GUARANTEED)
    assert here.come(pod) is None
    assert here.run(pod, "id") == UNRESTRICTED
    # Nobody has to be told anything, ever.
    await here.allotment.run(Runtime().update, lambda: here.running, 10.0)
    assert here.registry.get_sample_value("kubelet_topology_manager_admission_requests_total") == 1
    assert here.registry.get_sample_value("kubelet_topology_manager_admission_duration_ms_count") == 1


async def test_keep_only_removed_pod_resources_released(here: Here) -> None:
    stays, goes = pod_of(GUARANTEED), pod_of(GUARANTEED)
    assert here.come(goes) is None
    here.allotment.keep_only({goes.uid, stays.uid})
    assert here.allotment.has_exclusive(goes.uid)
    here.allotment.keep_only({stays.uid})
    assert not here.allotment.has_exclusive(goes.uid)


async def test_keep_only_retries_failed_checkpoint_write(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    caught_up: list[bool] = []
    monkeypatch.setattr(here.allotment.memory, "catch_up", lambda: caught_up.append(True))
    here.allotment.keep_only(set())
    assert caught_up == [True]


@pytest.mark.looptime
async def test_resource_allocator_admit_waits_for_terminating_pod(here: Here) -> None:
    old, new = pod_of(GUARANTEED), pod_of(GUARANTEED)
    assert here.come(old) is None
    here.leaving.add(old.uid)
    answer = here.come(new)
    assert isinstance(answer, DeferredResult)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_answer(answer))
        await asyncio.sleep(LEAVING_SECONDS - 1)
        assert not waiting.done()
        here.allotment.forget(old.uid)
    assert waiting.result() is None
    assert here.allotment.has_exclusive(new.uid)


@pytest.mark.looptime
async def test_resource_allocator_terminating_pod_wait_times_out(here: Here) -> None:
    old, new = pod_of(GUARANTEED), pod_of(GUARANTEED)
    assert here.come(old) is None
    here.leaving.add(old.uid)
    answer = here.come(new)
    assert isinstance(answer, DeferredResult)
    began = asyncio.get_running_loop().time()
    assert await answer.result() == NOT_ENOUGH
    assert asyncio.get_running_loop().time() - began == pytest.approx(LEAVING_SECONDS)


async def test_resource_allocator_terminating_pod_without_resources_not_waited_for(here: Here) -> None:
    assert here.come(pod_of(GUARANTEED)) is None
    here.leaving.add("somebody")
    assert here.come(pod_of(GUARANTEED)) == NOT_ENOUGH


@pytest.mark.looptime
async def test_resource_allocator_only_device_pods_deferred(tmp_path: Path) -> None:
    dongles = Dongles()
    here = Here(tmp_path, dongles)
    assert here.come(pod_of({"limits": {"cpu": "1"}})) is None
    wanting = pod_of({"limits": {"cpu": "1", "memory": "1Gi", "example.com/dongle": "1"}})
    answer = here.come(wanting)
    assert isinstance(answer, DeferredResult)
    assert not here.allotment.has_exclusive(wanting.uid)
    assert await answer.result() is None
    assert dongles.holders == {wanting.uid}
    assert here.allotment.has_exclusive(wanting.uid)
    # After a restart of the agent what runs does not wait.
    assert here.allotment.admit(PodAdmitAttributes(pod=wanting, node=Node(), running=True)) is None
    assert isinstance(here.come(wanting), DeferredResult)
    here.allotment.forget(wanting.uid)
    assert not dongles.holders


@pytest.mark.parametrize(
    ("limits", "wants"),
    [
        ({}, False),
        ({"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "2Mi", "ephemeral-storage": "1"}, False),
        ({"example.com/dongle": "1"}, True),
        ({"example.com/dongle": "0"}, False),
    ],
)
def test_wants_devices_extended_resource_limit_is_true(limits: dict[str, str], wants: bool) -> None:
    assert wants_devices(pod_of({"limits": limits})) == wants
    assert wants_devices(pod_of({}, init=[{"limits": limits}])) == wants


@pytest.mark.looptime
async def test_resource_allocator_shared_cpus_change_updates_containers(here: Here) -> None:
    sharing, mine = pod_of({}), pod_of(GUARANTEED)
    assert here.run(sharing, "sharing") == CpusetAssignment("0-1")
    runtime = Runtime()
    async with here.telling(runtime):
        assert here.come(mine) is None
        here.run(mine, "mine")
        await asyncio.sleep(0.1)
        assert runtime.told == [("sharing", "0")]
        here.running.pop()
        here.allotment.forget(mine.uid)
        await asyncio.sleep(0.1)
        assert runtime.told == [("sharing", "0"), ("sharing", "0-1")]
        await asyncio.sleep(100)
        assert len(runtime.told) == 2


@pytest.mark.looptime
async def test_resource_allocator_runtime_update_fails_is_retried(here: Here) -> None:
    sharing = pod_of({})
    here.run(sharing, "sharing")
    runtime = Runtime(CriError("Update", "Unavailable", "away"), NotFound("Update", "NotFound", "not yet"))
    async with here.telling(runtime):
        assert here.come(pod_of(GUARANTEED)) is None
        await asyncio.sleep(11)
        assert runtime.told == []
        await asyncio.sleep(10)
        assert runtime.told == [("sharing", "0")]


async def _answer(later: DeferredResult) -> object:
    return await later.result()


@pytest.mark.looptime
async def test_admit_device_plugin_not_registered_waits_apart_and_again(tmp_path: Path) -> None:
    dongles = Dongles(absent=True)
    here = Here(tmp_path, dongles)
    pod = pod_of({"limits": {"example.com/dongle": "1"}})
    later = here.come(pod)
    assert isinstance(later, DeferredResult)
    assert (later.apart, later.again) == (True, True)
    assert later.why == "waiting up to 5m0s for the device plugin of example.com/dongle"
    # A pod that runs since before the kubelet started has its devices.
    running = here.allotment.admit(PodAdmitAttributes(pod=pod, node=Node(), running=True))
    assert not isinstance(running, DeferredResult) or not running.again
    assert await later.result() is None
    assert not dongles.having
    given = here.come(pod)
    assert isinstance(given, DeferredResult)
    assert not given.again
    assert await given.result() is None
    assert dongles.having == {pod.uid}
