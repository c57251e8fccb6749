"""The PLEG against a scripted runtime: which pods it reports, and when it lists."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.labels import POD_NAME, POD_NAMESPACE, POD_UID
from pykubelet.kuberuntime.observe import Observer
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podworkers.pleg import Pleg
from pykubelet.transport.errors import Unavailable, Unimplemented
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime


class Runtime:
    """Lists what it is told, and streams events from a queue; `None` in the queue breaks the stream."""

    def __init__(self, *, events: bool) -> None:
        self.sandboxes: dict[str, str] = {}
        self.ready: set[str] = set()
        self.lists = 0
        self.down = False
        self.events: asyncio.Queue[pb.ContainerEventResponse | None] = asyncio.Queue()
        self._has_events = events

    def run(self, sandbox: str, uid: str) -> None:
        self.sandboxes[sandbox] = uid
        self.ready.add(sandbox)

    async def list_pod_sandbox(self, filter: object = None) -> list[pb.PodSandbox]:
        self.lists += 1
        if self.down:
            raise Unavailable("ListPodSandbox", "Unavailable", "gone")
        return [
            pb.PodSandbox(
                id=id,
                state=pb.SANDBOX_READY if id in self.ready else pb.SANDBOX_NOTREADY,
                labels={POD_UID: uid, POD_NAME: uid, POD_NAMESPACE: "default"},
            )
            for id, uid in self.sandboxes.items()
        ]

    async def list_containers(self, filter: object = None) -> list[pb.Container]:
        return []

    async def container_events(self) -> AsyncGenerator[pb.ContainerEventResponse, None]:
        if not self._has_events:
            raise Unimplemented("GetContainerEvents", "Unimplemented", "no")
        while (event := await self.events.get()) is not None:
            yield event
        raise Unavailable("GetContainerEvents", "Unavailable", "broken")


class NoChannel:
    """A runtime that is not containerd."""

    def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        async def nothing() -> AsyncGenerator[Any, None]:
            raise Unimplemented("Subscribe", "Unimplemented", "no")
            yield

        return nothing()


def pleg_of(
    runtime: Runtime,
    on_change: Callable[[PodLifecycleEvent], None],
    *,
    events: bool = True,
    on_demand: bool = True,
) -> Pleg:
    cri: Any = SimpleNamespace(runtime=runtime, runtime_channel=NoChannel())
    pleg = Pleg(cri, Observer(cri), events=events, on_demand=on_demand)
    pleg.add_listener(on_change)
    return pleg


def started(uid: str, container: str) -> pb.ContainerEventResponse:
    return pb.ContainerEventResponse(
        container_id=container,
        container_event_type=pb.CONTAINER_STARTED_EVENT,
        pod_sandbox_status=pb.PodSandboxStatus(metadata=pb.PodSandboxMetadata(uid=uid)),
    )


READY = PodLifecycleEvent("pod-1", states=(("s1", "ready"),))
STOPPED = PodLifecycleEvent("pod-1", states=(("s1", "stopped"),))


async def test_pleg_no_event_stream_relists_each_second_and_reports_changes() -> None:
    runtime = Runtime(events=False)
    changes: list[PodLifecycleEvent] = []
    pleg = pleg_of(runtime, changes.append)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(10)
        assert pleg.mode == "relist"
        assert 7 <= runtime.lists <= 12
        runtime.run("s1", "pod-1")
        await asyncio.sleep(2)
        assert changes == [READY]
        runtime.ready.clear()
        await asyncio.sleep(2)
        runtime.sandboxes.clear()
        await asyncio.sleep(2)
    assert changes == [READY, STOPPED, PodLifecycleEvent("pod-1")]


async def test_pleg_events_disabled_relists_each_second_although_runtime_has_events() -> None:
    runtime = Runtime(events=True)
    pleg = pleg_of(runtime, lambda change: None, events=False)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(10)
    assert pleg.mode == "relist"
    assert 7 <= runtime.lists <= 12


@pytest.mark.parametrize("on_demand", [True, False])
async def test_pleg_event_of_unknown_container_relists_immediately_only_with_gate(on_demand: bool) -> None:
    runtime = Runtime(events=True)
    pleg = pleg_of(runtime, lambda change: None, on_demand=on_demand)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(60)
        assert (runtime.lists > 40) != on_demand, "without it the period is short"
        before = runtime.lists
        for _ in range(20):
            await runtime.events.put(started("", "unknown"))
            await asyncio.sleep(0.2)
        assert pleg.mode == "cri-events"
        assert runtime.lists > before
        if not on_demand:
            # The events asked for nothing: as many as in four other seconds.
            assert runtime.lists - before <= 5


async def test_pleg_event_stream_open_relists_rarely() -> None:
    runtime = Runtime(events=True)
    changes: list[PodLifecycleEvent] = []
    pleg = pleg_of(runtime, changes.append)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(5)
        assert runtime.lists <= 2, "at its start, and when it listens"
        before = runtime.lists
        await runtime.events.put(started("pod-1", "c1"))
        await asyncio.sleep(0.1)
        assert changes == [PodLifecycleEvent("pod-1", "c1", "started")]
        await asyncio.sleep(600)
    assert pleg.mode == "cri-events"
    assert 8 <= runtime.lists - before <= 13


async def test_pleg_stream_broken_missed_events_found_by_relist() -> None:
    runtime = Runtime(events=True)
    changes: list[PodLifecycleEvent] = []
    async with TaskScope() as scope:
        scope.start(pleg_of(runtime, changes.append).run(), name="pleg")
        await asyncio.sleep(5)
        runtime.run("s1", "pod-1")
        await runtime.events.put(None)
        await asyncio.sleep(2)
    assert READY in changes


async def test_pleg_stream_broken_late_change_found_by_second_relist() -> None:
    runtime = Runtime(events=True)
    runtime.run("s1", "pod-1")
    changes: list[PodLifecycleEvent] = []
    pleg = pleg_of(runtime, changes.append)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(10)
        changes.clear()
        before = runtime.lists
        await runtime.events.put(None)
        # It ended meanwhile, and its event came before anybody listened again; the first list is as old.
        await asyncio.sleep(1)
        assert runtime.lists > before
        assert changes == []
        runtime.ready.clear()
        await asyncio.sleep(3)
        assert changes == [STOPPED]
        settled = runtime.lists
        await asyncio.sleep(40)
        assert runtime.lists == settled


async def test_pleg_stream_cannot_be_opened_relists_each_second() -> None:
    runtime = Runtime(events=True)
    pleg = pleg_of(runtime, lambda _: None)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(30)
        before = runtime.lists
        for _ in range(50):
            await runtime.events.put(None)
        await asyncio.sleep(60)
        assert runtime.lists - before >= 40


async def test_pleg_health_relist_fails_reports_error_after_three_minutes() -> None:
    runtime = Runtime(events=True)
    pleg = pleg_of(runtime, lambda change: None)
    assert "yet to be successful" in (pleg.health() or "")
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(5)
        assert pleg.health() is None
        runtime.down = True
        await asyncio.sleep(170)
        assert pleg.health() is None
        await asyncio.sleep(80)
        assert "threshold is 3m0s" in (pleg.health() or "")
        runtime.down = False
        await asyncio.sleep(10)
        assert pleg.health() is None


async def test_pleg_never_saw_pod_unknown_after_relist_returns_true() -> None:
    runtime = Runtime(events=True)
    pleg = pleg_of(runtime, lambda change: None)
    assert not pleg.never_saw("pod-1")
    runtime.run("s1", "pod-1")
    await pleg.relist()
    assert not pleg.never_saw("pod-1")
    assert pleg.never_saw("pod-2")
    pleg.learn("pod-2", "s2")
    assert not pleg.never_saw("pod-2")
    pleg.forget("pod-2")
    assert pleg.never_saw("pod-2")


def stopped(container: str) -> pb.ContainerEventResponse:
    """Return an exit event that does not name its pod."""
    return pb.ContainerEventResponse(container_id=container, container_event_type=pb.CONTAINER_STOPPED_EVENT)


async def test_pleg_sandbox_created_during_relist_keeps_its_owner() -> None:
    runtime = Runtime(events=True)
    changes: list[PodLifecycleEvent] = []
    pleg = pleg_of(runtime, changes.append)
    listing, may_finish = asyncio.Event(), asyncio.Event()

    async def slow_list(filter: object = None) -> list[pb.Container]:
        listing.set()
        await may_finish.wait()
        return []

    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(5)
        runtime.list_containers = slow_list  # type: ignore[method-assign]
        await listing.wait()
        # The list of sandboxes is complete without this one.
        runtime.run("s1", "pod-1")
        pleg.learn("pod-1", "s1")
        may_finish.set()
        await asyncio.sleep(5)
        await runtime.events.put(stopped("s1"))
        await asyncio.sleep(0.1)
    assert PodLifecycleEvent("pod-1", "s1", "ended") in changes


async def test_pleg_unknown_container_exits_before_cri_reports_it_relists_again() -> None:
    runtime = Runtime(events=True)
    runtime.run("s1", "pod-1")
    changes: list[PodLifecycleEvent] = []
    pleg = pleg_of(runtime, changes.append)
    async with TaskScope() as scope:
        scope.start(pleg.run(), name="pleg")
        await asyncio.sleep(10)
        changes.clear()
        await runtime.events.put(stopped("unknown"))
        await asyncio.sleep(0.5)
        assert changes == []
        runtime.ready.clear()
        await asyncio.sleep(3)
        assert changes == [STOPPED]
        await asyncio.sleep(3)
        settled = runtime.lists
        await asyncio.sleep(40)
        assert runtime.lists == settled


async def test_listed_since_relist_began_before_time_returns_nothing() -> None:
    runtime = Runtime(events=True)
    runtime.run("s1", "pod-1")
    pleg, loop = pleg_of(runtime, lambda _: None), asyncio.get_running_loop()
    assert pleg.listed_since("pod-1", loop.time()) is None
    await asyncio.sleep(1)
    await pleg.relist()
    assert pleg.listed_since("pod-1", loop.time() - 1) == (("s1", "ready"),)
    assert pleg.listed_since("pod-2", loop.time() - 1) is None
    await asyncio.sleep(1)
    observed_at = loop.time()
    assert pleg.listed_since("pod-1", observed_at) is None
    runtime.down = True
    with pytest.raises(Unavailable):
        await pleg.relist()
    assert pleg.listed_since("pod-1", observed_at) is None
