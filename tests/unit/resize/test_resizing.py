"""Wishes for other resources from their coming to their end, with everybody else played by the test."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection, AdmitResult, DeferredResult, Preempt
from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cm.resize import open_allocation_state
from pykubelet.kuberuntime.decide import Actions, Resize
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.resize import ResizeError, Resizer
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.resize.allocation_manager import (
    RETRY_SECONDS,
    AllocationManager,
    PodResizeStep,
    ResizeCollaborators,
)
from pykubelet.resize.feasibility import IN_PROGRESS, PENDING, ResizeMetrics, ResizeRules
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime

FULL = AdmitRejection("OutOfcpu", "no room")


def make_pod(uid: str, cpu: str, generation: int = 1, **spec: Any) -> Pod:
    document = {
        "metadata": {"name": uid, "namespace": "default", "uid": uid, "generation": generation},
        "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}], **spec},
    }
    return from_document(Pod, document)


def running(uid: str) -> ObservedPod:
    return ObservedPod(uid=uid, containers=(ObservedContainer(id="c", name="main", phase="running"),))


@dataclass
class World:
    """A node with some pods; `room` says what becomes of a wish."""

    folder: Path
    scope: TaskScope | None = None
    room: Callable[[Pod], AdmitResult | DeferredResult] = lambda pod: None
    ready: bool = True
    rules: ResizeRules = field(default_factory=ResizeRules)
    pods: dict[str, Pod] = field(default_factory=dict)
    woken: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    queue: list[Callable[[], None]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin as a new agent that finds what an old one has written."""
        self.registry = CollectorRegistry()
        self.journal = PodHistory()
        self.resizing = AllocationManager(
            self.journal,
            open_allocation_state(self.folder),
            self.rules,
            scope=self.scope,
            metrics=ResizeMetrics(self.registry),
        )
        self.resizing.start(
            ResizeCollaborators(
                pod=self.pods.get,
                evaluate=self._judge,
                preempt=self._preempt,
                wake=self.woken.append,
                is_ready=lambda: self.ready,
                later=self.queue.append,
            )
        )

    def _judge(self, pod: Pod) -> AdmitResult | DeferredResult:
        self.judged.append(pod.uid)
        return self.room(pod)

    async def _preempt(self, pod: Pod, room: Preempt) -> None:
        await asyncio.sleep(1)
        self.ended += [victim.uid for victim in room.victims]

    def turn(self) -> None:
        """Work off what was to be done later."""
        queue, self.queue[:] = list(self.queue), []
        for call in queue:
            call()

    def add(self, pod: Pod) -> None:
        """A pod comes and its container starts."""
        self.resizing.update_pod(pod, None)
        self.pods[pod.uid] = pod
        shown = self.resizing.allocated(pod)
        self.resizing.starting(shown, shown.spec.containers[0])

    def wish(self, uid: str, cpu: str) -> Pod:
        before = self.pods[uid]
        priority = before.spec.priority
        after = make_pod(
            uid, cpu, before.metadata.generation + 1, **({"priority": priority} if priority else {})
        )
        self.pods[uid] = after
        self.resizing.update_pod(after, before)
        self.turn()
        return after

    def cpu(self, uid: str) -> str:
        """What a pod was promised."""
        return str(self.resizing.allocated(self.pods[uid]).spec.containers[0].resources.requests["cpu"])

    def step(self, uid: str) -> None:
        """Do what a worker does: resize the container, and look."""
        pod = self.resizing.allocated(self.pods[uid])
        if self.resizing.plan(pod, running(uid)):
            main = pod.spec.containers[0]
            self.resizing.resized(pod, main, main.resources)
        self.resizing.observe(pod, running(uid))

    def shown(self, uid: str) -> dict[str, object]:
        return {one.type: one.reason or "" for one in self.resizing.status_conditions(uid)}

    def events(self, uid: str) -> list[str]:
        return [event.reason for event in self.journal.events(uid)]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kubelet_{name}", labels)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_resize_fits_is_allocated_and_completed(world: World) -> None:
    world.add(make_pod("a", "100m"))
    wished = world.wish("a", "200m")
    assert world.cpu("a") == "200m"
    assert world.resizing.allocated(wished) is wished
    assert world.shown("a") == {IN_PROGRESS: ""}
    assert world.resizing.status_conditions("a")[0].observed_generation == 2
    assert (world.woken, world.events("a")) == (["a"], ["ResizeStarted"])
    assert world.sample("pod_in_progress_resizes") == 1
    requested = {"resource": "cpu", "requirement": "requests", "operation": "increase"}
    assert world.sample("container_requested_resizes_total", **requested) == 1
    world.step("a")
    assert world.shown("a") == {}
    assert world.events("a") == ["ResizeStarted", "ResizeCompleted"]
    assert world.sample("pod_in_progress_resizes") == 0


async def test_resize_deferred_accepted_after_pod_removed(world: World) -> None:
    for uid in ("a", "b"):
        world.add(make_pod(uid, "100m"))
    world.room = lambda pod: FULL
    world.wish("a", "200m")
    assert (world.cpu("a"), world.shown("a")) == ("100m", {PENDING: "Deferred"})
    assert world.events("a") == ["ResizeDeferred"]
    assert world.journal.events("a")[0].message.startswith('Pod resize OutOfcpu: {"containers"')
    assert world.sample("pod_pending_resizes", reason="deferred") == 1
    world.resizing.on_pod_terminated("b")
    world.turn()
    assert world.events("a") == ["ResizeDeferred"]  # said once
    world.room = lambda pod: None
    world.resizing.on_pod_removed("b")
    world.turn()
    assert (world.cpu("a"), world.shown("a")) == ("200m", {IN_PROGRESS: ""})
    assert world.sample("pod_deferred_accepted_resizes_total", retry_trigger="pods_removed") == 1
    assert world.sample("pod_pending_resizes", reason="deferred") is None


async def test_resize_infeasible_is_not_retried(world: World) -> None:
    world.rules = ResizeRules(may_swap=lambda pod, container: True)
    world.start()
    before = make_pod("a", "100m")
    before.spec.containers[0].resources.requests |= make_pod("x", "1").spec.containers[0].resources.requests
    world.add(before)
    after = make_pod("a", "100m", 2)
    after.spec.containers[0].resources.requests["memory"] = after.spec.containers[0].resources.requests["cpu"]
    world.pods["a"] = after
    world.resizing.update_pod(after, before)
    world.turn()
    assert world.shown("a") == {PENDING: "Infeasible"}
    assert world.events("a") == ["ResizeInfeasible"]
    world.resizing.on_pod_terminated("b")
    world.turn()
    assert world.judged == []
    assert world.sample("pod_infeasible_resizes_total", reason_detail="swap_limitation") == 1


async def test_resize_deferred_pods_evaluated_by_urgency(world: World) -> None:
    world.room = lambda pod: FULL
    for uid, priority in (("low", 1), ("high", 9), ("less", 0)):
        world.add(make_pod(uid, "100m", priority=priority))
    for uid, cpu in (("low", "200m"), ("high", "200m"), ("less", "50m")):
        world.wish(uid, cpu)
    world.judged.clear()
    world.resizing.on_pod_terminated("other")
    world.turn()
    assert world.judged == ["less", "high", "low"]


async def test_resize_deferred_accepted_by_periodic_retry(world: World) -> None:
    world.room = lambda pod: FULL
    world.add(make_pod("a", "100m"))
    world.wish("a", "200m")
    world.resizing.tidy({"a"})
    world.turn()
    assert len(world.judged) == 1
    await asyncio.sleep(RETRY_SECONDS)
    world.room = lambda pod: None
    world.resizing.tidy({"a"})
    world.turn()
    assert world.cpu("a") == "200m"
    assert world.sample("pod_deferred_accepted_resizes_total", retry_trigger="periodic_retry") == 1


async def test_resize_deferred_request_reverted_clears_condition(world: World) -> None:
    world.room = lambda pod: FULL
    world.add(make_pod("a", "100m"))
    world.wish("a", "200m")
    world.wish("a", "100m")
    assert world.shown("a") == {}
    world.room = lambda pod: None
    world.resizing.on_pod_terminated("b")
    world.turn()
    assert world.cpu("a") == "100m"
    assert "ResizeStarted" not in world.events("a")


async def test_resize_actuation_fails_sets_error_until_success(world: World) -> None:
    world.add(make_pod("a", "100m"))
    world.wish("a", "200m")
    pod = world.resizing.allocated(world.pods["a"])
    for _ in range(2):
        world.resizing.failed(pod, "the runtime says no")
        world.resizing.observe(pod, running("a"))
    assert world.shown("a") == {IN_PROGRESS: "Error"}
    assert [event.count for event in world.journal.events("a") if event.reason == "ResizeError"] == [1]
    world.step("a")
    assert world.shown("a") == {}


async def test_observe_older_allocation_keeps_resize_in_progress(world: World) -> None:
    world.add(make_pod("a", "100m"))
    old = world.resizing.allocated(world.pods["a"])
    world.wish("a", "200m")
    world.resizing.observe(old, running("a"))
    assert world.shown("a") == {IN_PROGRESS: ""}


async def test_counted_decrease_not_actuated_returns_old_request(world: World) -> None:
    world.add(make_pod("a", "500m"))
    world.wish("a", "100m")

    def counted() -> str:
        found = world.resizing.counted(world.pods["a"])
        return str(found.spec.containers[0].resources.requests["cpu"])

    assert (world.cpu("a"), counted()) == ("100m", "500m")
    world.step("a")
    assert counted() == "100m"


async def test_allocation_manager_kubelet_restarted_resumes_resizes(world: World) -> None:
    world.room = lambda pod: FULL
    world.add(make_pod("waits", "100m"))
    world.add(make_pod("works", "100m"))
    world.wish("waits", "200m")
    world.room = lambda pod: None if pod.uid == "works" else FULL
    world.wish("works", "200m")
    for uid in ("waits", "works"):
        status = msgspec.structs.replace(
            world.pods[uid].status, conditions=world.resizing.status_conditions(uid)
        )
        world.pods[uid] = msgspec.structs.replace(world.pods[uid], status=status)
    since = world.resizing.conditions.waiting_since("waits")
    world.room = lambda pod: FULL
    world.resizing.state.actuated.write()
    world.ready = False
    world.start()
    for pod in list(world.pods.values()):
        world.resizing.update_pod(pod, None)
    world.turn()
    # As long as not all pods are known nobody is given anything.
    assert world.shown("waits") == {PENDING: "Deferred"}
    assert world.cpu("waits") == "100m"
    assert world.resizing.conditions.waiting_since("waits") == since
    assert (world.cpu("works"), world.shown("works")) == ("200m", {IN_PROGRESS: ""})
    assert world.resizing.plan(world.pods["works"], running("works")).containers.keys() == {"main"}
    world.ready, world.room = True, lambda pod: None
    world.resizing.tidy({"waits", "works"})
    world.turn()
    assert world.cpu("waits") == "200m"


async def test_resize_no_container_running_sets_pod_cgroup(world: World) -> None:
    nothing = ObservedPod(uid="a")
    world.resizing.update_pod(pod := make_pod("a", "100m"), None)
    world.pods["a"] = pod
    world.resizing.on_cgroup_created(pod)
    assert not world.resizing.plan(pod, nothing)
    larger = world.wish("a", "200m")
    world.resizing.on_cgroup_created(
        larger
    )  # as with each container that is started: the cgroup stays as it is
    world.resizing.observe(larger, nothing)
    assert world.resizing.plan(larger, nothing).pod
    assert world.shown("a") == {IN_PROGRESS: ""}
    world.resizing.on_cgroup_set(larger)
    world.resizing.observe(larger, nothing)
    assert not world.resizing.plan(larger, nothing)
    assert world.shown("a") == {}
    assert world.events("a") == ["ResizeStarted", "ResizeCompleted"]


@dataclass
class Hands:
    """Sets pods' cgroups, or cannot; keeps in which sandboxes."""

    problem: str = ""
    sandboxes: list[str] = field(default_factory=list)

    async def apply(self, pod: Pod, sandbox_id: str, resize: Resize) -> None:
        self.sandboxes.append(sandbox_id)
        if self.problem:
            raise ResizeError(self.problem)


@pytest.mark.parametrize("renewed", [False, True])
async def test_pod_resize_step_cgroup_update_fails_is_retried(world: World, renewed: bool) -> None:
    world.add(pod := make_pod("a", "100m"))
    world.resizing.on_cgroup_created(pod)
    larger, hands = world.wish("a", "200m"), Hands("busy")
    doing = PodResizeStep(world.resizing, cast(Resizer, hands))
    actions = Actions(create_sandbox=renewed, sandbox_id="box", resize=Resize(pod=True))
    # Its container is started in the meantime, for whatever reason.
    world.resizing.starting(larger, larger.spec.containers[0])
    assert not await doing.apply(larger, actions)
    assert world.resizing.plan(larger, running("a")).pod
    assert world.shown("a") == {IN_PROGRESS: "Error"}
    hands.problem = ""
    assert await doing.apply(larger, actions)
    world.resizing.observe(larger, running("a"))
    assert not world.resizing.plan(larger, running("a"))
    assert world.shown("a") == {}
    # The old sandbox is no more when a new one is about to be made.
    assert hands.sandboxes == ([""] if renewed else ["box"]) * 2
    assert world.sample("pod_resize_duration_milliseconds_count", success="false") == 1


async def test_plan_cgroup_recreated_needs_no_resize(world: World) -> None:
    world.add(pod := make_pod("a", "100m"))
    world.resizing.on_cgroup_created(pod)
    world.resizing.on_pod_terminated("a")
    larger = world.wish("a", "200m")
    world.resizing.on_cgroup_created(larger)
    assert not world.resizing.plan(larger, ObservedPod(uid="a"))


async def test_resize_checkpoint_write_fails_keeps_old_allocation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add(make_pod("a", "100m"))

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.resizing.state.allocated, "write", full)
    world.wish("a", "200m")
    assert (world.cpu("a"), world.shown("a")) == ("100m", {})
    monkeypatch.undo()
    world.resizing.on_pod_terminated("b")
    world.turn()
    assert world.cpu("a") == "200m"


async def test_resize_critical_pod_preempts_victim_once(tmp_path: Path) -> None:
    async with TaskScope() as scope:
        world = World(tmp_path, scope)
        world.add(make_pod("a", "100m"))
        victim = make_pod("v", "1")
        world.room = lambda pod: None if "v" in world.ended else Preempt([victim], "cpu")
        world.wish("a", "200m")
        world.resizing.on_pod_terminated("other")
        world.turn()  # it is not made twice
        assert world.cpu("a") == "100m"
        await asyncio.sleep(2)
        world.turn()
        assert world.ended == ["v"]
        assert world.cpu("a") == "200m"


@pytest.mark.parametrize("answer", [None, FULL])
async def test_resize_deferred_result_applied_when_available(tmp_path: Path, answer: AdmitResult) -> None:
    async def late() -> AdmitResult:
        await asyncio.sleep(1)
        return answer

    async with TaskScope() as scope:
        world = World(tmp_path, scope)
        world.add(make_pod("a", "100m"))
        world.room = lambda pod: DeferredResult(late)
        world.wish("a", "200m")
        assert world.cpu("a") == "100m"
        await asyncio.sleep(2)
        assert world.cpu("a") == ("200m" if answer is None else "100m")
        assert world.shown("a") == ({IN_PROGRESS: ""} if answer is None else {PENDING: "Deferred"})


async def test_starting_actuated_state_written_only_on_changed_resources(world: World) -> None:
    two = make_pod("a", "100m")
    two.spec.containers.append(msgspec.structs.replace(two.spec.containers[0], name="second"))
    world.resizing.update_pod(two, None)
    for container in two.spec.containers:
        world.resizing.starting(two, container)
        world.resizing.starting(two, container)  # a crash later
    assert list(world.folder.iterdir()) == []
    other = make_pod("a", "300m").spec.containers[0]
    world.resizing.starting(two, other)
    found = open_allocation_state(world.folder).actuated.get("a")
    assert found is not None
    assert found.containers["main"] == other.resources
