"""Pod lifecycle event generator (PLEG): reports changes of pods in the runtime.

It uses the best source of events that the runtime has: CRI container events, the event service of older
containerd versions, or a relist every second (also with `EventedPLEG=false`). Events can be lost, so every
mode relists slowly as well; without a stream, and for some seconds after a stream was reopened, it relists
fast, because a runtime does not report from when on it sends events, and a container that exited just before
may not be in the list yet.

An event only names the container and what happened to it; the worker reads the facts from CRI, and an event
without news is ignored. CRI may lag behind the events (both learn of an exit at the same time), so a worker
that was notified of an exit observes the pod until CRI reports it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.containerd import TaskEvent, task_events
from pykubelet.cri.events_tasks_pb2 import TaskExit, TaskOOM, TaskPaused, TaskResumed, TaskStart
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod, PodStates
from pykubelet.logs import get_logger
from pykubelet.podsync.contract import PodLifecycleEvent, What
from pykubelet.podworkers.metrics import PlegMetrics
from pykubelet.transport.errors import CriError, Unimplemented
from pykubelet.util.backoff import ExponentialDelay
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
FAST_RELIST, SLOW_RELIST = 1.0, 60.0
SHORTEST_RELIST = 0.2
"""Shortest seconds between relists: events of other clients' containers must not cause continuous relists."""
SETTLING_SECONDS = 3.0
"""Seconds after reopening an event stream during which relists stay fast."""
UNHEALTHY_SECONDS = 180.0
RECONNECT_SECONDS = (0.1, 5.0)
Mode = Literal["cri-events", "containerd-events", "relist"]
_CRI_EVENTS: dict[int, What] = {pb.CONTAINER_STARTED_EVENT: "started", pb.CONTAINER_STOPPED_EVENT: "ended"}
Listener = Callable[[PodLifecycleEvent], None]


class Pleg:
    """Generator of pod lifecycle events for its listeners."""

    def __init__(
        self,
        cri: RuntimeConnection,
        observer: Observer,
        metrics: PlegMetrics | None = None,
        *,
        events: bool = True,
        on_demand: bool = True,
    ) -> None:
        """Initialize; without `events` or `on_demand` it relists every second, whatever the runtime has."""
        self._metrics = metrics or PlegMetrics()
        self._cri = cri
        self._observer = observer
        self._events = events
        self._on_demand = on_demand
        self._listeners: list[Listener] = []
        self.mode: Mode = "relist"
        self.pods: dict[str, ObservedPod] = {}
        """Pods of the last relist, by uid."""
        self._named: dict[str, list[str]] = {}
        """Uids of the pods in the last relist by their full name."""
        self._seen: dict[str, PodStates] = {}
        self._owner_of: dict[str, str] = {}
        self._learned: dict[str, str] = {}
        """Owners that were learned while a relist was in progress: its list may be older than they are."""
        self._known: set[str] = set()
        """Uids of pods that the runtime has or may have."""
        self._last_relist: float | None = None
        self._listed_from = -math.inf
        """Loop time at which the last successful relist began."""
        self._relist_now = asyncio.Event()
        self._quick_until = math.inf
        """Loop time until which relists are fast; infinite without an event stream."""

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with each event; it must not block."""
        self._listeners.append(listener)

    def health(self) -> str | None:
        """Return the reason why the last relist is too old, or None."""
        if self._last_relist is None:
            return "pleg has yet to be successful"
        age = asyncio.get_running_loop().time() - self._last_relist
        if age > UNHEALTHY_SECONDS:
            return f"pleg was last seen active {age:.0f}s ago; threshold is 3m0s"
        return None

    def learn(self, uid: str, *ids: str) -> None:
        """Map sandboxes or containers to their pod, so that their events find it."""
        self._known.add(uid)
        for runtime_id in ids:
            self._owner_of[runtime_id] = self._learned[runtime_id] = uid

    def never_saw(self, uid: str) -> bool:
        """Return whether the runtime certainly has nothing of this pod."""
        return self._last_relist is not None and uid not in self._known

    def named(self, full_name: str) -> list[str]:
        """Return the uids of the pods with this `namespace/name` in the last relist."""
        return [uid for uid in self._named.get(full_name, ()) if uid in self.pods]

    def listed_since(self, uid: str, time: float) -> PodStates | None:
        """Return a pod's states in the last relist; None if that began before this loop time."""
        return self._seen.get(uid) if self._listed_from > time else None

    def drop_snapshot(self, uid: str) -> None:
        """Drop a finished pod from the last relist; the next relist contains what is left of it."""
        self.pods.pop(uid, None)
        self._seen.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Drop a removed pod, which the last relist still contains."""
        self.drop_snapshot(uid)
        self._known.discard(uid)

    async def run(self) -> None:
        """Run until cancelled."""
        async with TaskScope() as scope:
            if self._events:
                scope.start(self._listen(), name="pleg-events")
            await self._relist_forever()

    async def relist(self) -> None:
        """List all pods and report those that differ from the last relist."""
        clock, last = asyncio.get_running_loop().time, self._last_relist
        began = clock()
        self._metrics.listing(None if last is None else began - last)
        self._learned.clear()
        try:
            pods = await self._observer.list_pods()
        finally:
            self._metrics.listed(clock() - began)
        seen = {uid: pod.states for uid, pod in pods.items()}
        self._owner_of = {runtime_id: uid for uid, states in seen.items() for runtime_id, _ in states}
        self._owner_of |= self._learned
        changed = {uid for uid in seen.keys() | self._seen.keys() if seen.get(uid) != self._seen.get(uid)}
        self.pods, self._seen = pods, seen
        self._named = {}
        for uid, pod in pods.items():
            self._named.setdefault(pod.full_name, []).append(uid)
        self._known |= seen.keys()
        self._last_relist, self._listed_from = clock(), began
        self._metrics.seen()
        for uid in sorted(changed):
            self._notify(PodLifecycleEvent(uid, states=seen.get(uid)))

    def _notify(self, event: PodLifecycleEvent) -> None:
        for listener in self._listeners:
            listener(event)

    async def _relist_forever(self) -> None:
        delay = ExponentialDelay(*RECONNECT_SECONDS)
        while True:
            # Cleared before the list: a request that arrives during the list needs another one.
            self._relist_now.clear()
            try:
                await self.relist()
            except CriError as err:
                log.v(2).info("Relisting failed", err=err)
                await asyncio.sleep(delay.next())
                continue
            delay.reset()
            await asyncio.sleep(SHORTEST_RELIST)
            try:
                async with asyncio.timeout(self._pause()):
                    await self._relist_now.wait()
            except TimeoutError:
                continue

    def _pause(self) -> float:
        """Return the seconds until the next relist, unless one is requested before."""
        if asyncio.get_running_loop().time() < self._quick_until or not self._on_demand:
            return FAST_RELIST
        return SLOW_RELIST * random.uniform(0.9, 1.1)  # noqa: S311

    async def _listen(self) -> None:
        """Use the best event source of the runtime; only relists when it has none."""
        sources: list[tuple[Mode, Callable[[], AsyncGenerator[PodLifecycleEvent, None]]]] = [
            ("cri-events", self._cri_events),
            ("containerd-events", self._containerd_events),
        ]
        for mode, events in sources:
            if not await self._follow(mode, events):
                log.v(2).info("Container runtime does not have this event stream", mode=mode)
        self.mode = "relist"
        log.info("Container runtime has no event stream, relisting every second")

    async def _follow(
        self, mode: Mode, events: Callable[[], AsyncGenerator[PodLifecycleEvent, None]]
    ) -> bool:
        """Forward events, reconnecting as needed; return when the runtime does not implement the stream."""
        delay, settling = ExponentialDelay(*RECONNECT_SECONDS), 0.0
        while True:
            try:
                async with aclosing(events()) as stream:
                    if self.mode != mode:
                        log.info("Receiving events of the container runtime", mode=mode)
                        self.mode = mode
                    # A relist finds what happened before the stream was open.
                    self._quick_until = asyncio.get_running_loop().time() + settling
                    self._relist_now.set()
                    async for change in stream:
                        delay.reset()
                        self._notify(change)
            except Unimplemented:
                return False
            except CriError as err:
                log.v(2).info("Event stream of the container runtime broke, reconnecting", mode=mode, err=err)
            finally:
                self._quick_until, settling = math.inf, SETTLING_SECONDS
            await asyncio.sleep(delay.next())

    async def _cri_events(self) -> AsyncGenerator[PodLifecycleEvent, None]:
        async with aclosing(self._cri.runtime.container_events()) as events:
            async for event in events:
                uid = event.pod_sandbox_status.metadata.uid or self._owner_of.get(event.container_id, "")
                if uid:
                    yield PodLifecycleEvent(
                        uid, event.container_id, _CRI_EVENTS.get(event.container_event_type, "unknown")
                    )
                else:
                    self._relist_soon()

    async def _containerd_events(self) -> AsyncGenerator[PodLifecycleEvent, None]:
        async with aclosing(task_events(self._cri.runtime_channel)) as events:
            async for event in events:
                what = _what_happened(event)
                if what is None:
                    continue
                uid = self._owner_of.get(event.container_id)
                if uid is not None:
                    yield PodLifecycleEvent(uid, event.container_id, what)
                elif what != "started":
                    # Of another client, or created before the stream was open. An unknown start is
                    # our own, in progress: its sync observes it at the end.
                    self._relist_soon()

    def _relist_soon(self) -> None:
        """Relist now and again for some seconds: CRI may report an exit later than the event does."""
        if not self._on_demand:
            return
        self._quick_until = max(self._quick_until, asyncio.get_running_loop().time() + SETTLING_SECONDS)
        self._relist_now.set()


def _what_happened(event: TaskEvent) -> What | None:
    """Return what happened to the container itself; None for another process in it, such as a probe."""
    details = event.details
    if isinstance(details, TaskExit):
        return "ended" if details.id == event.container_id else None
    if isinstance(details, TaskStart):
        return "started"
    if isinstance(details, TaskOOM):
        return "oom"
    return "unknown" if isinstance(details, TaskPaused | TaskResumed) else None
