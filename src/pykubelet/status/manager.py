"""Brings pods' statuses to the API server: only what differs, one request per pod, the newest wins.

The sender hears of every status the node computes (`changed`) and of every change of what the API
server has (`seen`), and sends the difference between the two. What the API server has is the newer
of the watched object and the answer to the last request; a difference that the server answers to
without taking it (a field it does not know) is not sent again until something else changes.

- The statuses of a pod that is on its way are held back for a moment: a quick start is one
  request, and a slow one still shows what it waits for. Longer while many pods are being started:
  telling would take from the machine what they wait for. Longest where a status says nothing but that
  its pod waits for its start. What users wait for is sent at once.
- A request that fails is made again after growing pauses. While the API server is away nobody
  asks but one, and afterwards pods are told in the order in which they changed.
- A pod that the API server no longer has, or has anew under the same name, is let be.

`told` waits until the API server knows a pod's newest status, `remove` until it has let go of a
pod that has ended here: together the end of a deletion.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, Protocol

from prometheus_client import CollectorRegistry, Histogram

from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import PODS, Resource
from pykubelet.apiserver.errors import Conflict, Invalid, KubeError, NotFound, Unauthorized, Unreachable
from pykubelet.logs import get_logger
from pykubelet.status.compute import TERMINAL
from pykubelet.status.patch import Patch, merged_status, only_acknowledges, status_patch
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_STATUSES = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 20, 30, 45, 60)


class StatusMetrics:
    """How long the API server waits for pods' statuses."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._sent = Histogram(
            "kubelet_pod_status_sync_duration_seconds",
            "How long it took from a pod's first untold change to the API server knowing its status.",
            buckets=_STATUSES,
            registry=registry,
        )

    def sent(self, seconds: float) -> None:
        """Count a status that the API server took."""
        self._sent.observe(seconds)


HOLD_SECONDS = 1.0
"""How long a status that is likely to be replaced by a better one is held back."""
CROWDED_HOLD_SECONDS = 10.0
"""How long it is while pods wait for each other to start, or when nobody waits to hear it."""
QUEUED_HOLD_SECONDS = 30.0
"""Seconds for which a status is held back while many pods start that says nothing but that its pod waits."""
SLACK_SECONDS = 0.001
"""How early a look may be: event loops wake up to a tick before the moment they were asked for."""
AT_ONCE = 8
"""How many requests may be under way."""


class PodApi(Protocol):
    """What is asked of the API server's client (`kube.client.ApiClient`)."""

    async def get(self, resource: Resource[Pod], name: str, namespace: str = "") -> Pod:
        """Get a pod."""
        ...

    async def patch(
        self,
        resource: Resource[Pod],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
    ) -> Pod:
        """Change a pod's status; gives the pod as it is then."""
        ...

    async def delete(
        self,
        resource: Resource[Pod],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        """Delete this very pod."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """One pod's status on its way."""

    pod: Pod
    status: PodStatus
    due: float | None = None
    """When to look whether there is something to send; None when there is no reason to."""
    untold: float | None = None
    """When the first change came that the API server does not know."""
    taken: float = 0.0
    """When the look that is under way was due."""
    busy: bool = False
    answer: Pod | None = None
    """The pod as of the last answer, until the watch has caught up with it."""
    known: str = ""
    """The uid of the object that was sent a status before."""
    absent: str = ""
    """The uid of an object that the API server no longer has, whatever the watch says yet."""
    refused: Patch | None = None
    """What the API server was sent and did not take."""
    pauses: Backoff | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def release(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()


class StatusManager:
    """Sends statuses; all methods but the awaitable ones return at once.

    `object_of` gives what the API server was last seen to have of a pod: the pod itself, or the
    mirror of a static one. `may_run` says whether something of a pod could still run, `crowded`
    whether pods wait for each other to start.
    """

    def __init__(
        self,
        api: PodApi,
        *,
        object_of: Callable[[str], Pod | None],
        may_run: Callable[[str], bool],
        crowded: Callable[[], bool] = lambda: False,
        metrics: StatusMetrics | None = None,
        clock: Callable[[], datetime] = api_now,
    ) -> None:
        self._api = api
        self._object_of = object_of
        self._may_run = may_run
        self._crowded = crowded
        self._metrics = metrics or StatusMetrics()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._queue: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._held: dict[str, None] = {}
        """Uids of the pods whose statuses are held back while many pods start, the oldest first."""
        self._release_timer: asyncio.TimerHandle | None = None
        self._away = False
        self._outage = Backoff()
        self._complaints = ErrorLogLimiter(log, "Failed to send the status of a pod")
        self._refusals = ErrorLogLimiter(log, "Failed to remove a terminated pod from the API server")

    def changed(self, pod: Pod, status: PodStatus) -> None:
        """Take a pod's new status."""
        entry = self._entries.get(pod.uid)
        if entry is None:
            entry = self._entries[pod.uid] = _Entry(pod, status)
        entry.pod, entry.status = pod, status
        if entry.untold is None:
            entry.untold = asyncio.get_running_loop().time()
        self._schedule(entry, HOLD_SECONDS if is_passing(pod, status) else 0.0)

    def seen(self, uid: str) -> None:
        """Take note that what the API server has of a pod has changed, perhaps by our own doing."""
        entry, seen = self._entries.get(uid), self._object_of(uid)
        if entry is None:
            return
        answer = entry.answer
        if answer is not None and seen is not None and answer.uid == seen.uid:
            if _version(seen) < _version(answer):
                return
            entry.answer = None
            if _version(seen) == _version(answer):
                return
        # Whoever overwrites a status time and again must not be answered as fast as he can.
        overwritten = seen is not None and seen.uid == entry.known
        self._schedule(entry, HOLD_SECONDS if overwritten else 0.0)

    def check(self, uid: str) -> None:
        """Look at once whether the API server can be told more than it was."""
        entry = self._entries.get(uid)
        if entry is not None:
            self._schedule(entry, 0.0)

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone."""
        entry = self._entries.pop(uid, None)
        if entry is not None:
            entry.release()

    async def told(self, uid: str) -> None:
        """Wait until the API server knows the pod's newest status, or does not have the pod."""
        entry = self._entries.get(uid)
        if entry is None:
            return
        done = asyncio.get_running_loop().create_future()
        entry.waiting.append(done)
        self._schedule(entry, 0.0)
        await done

    async def remove(self, pod: Pod) -> None:
        """Remove a pod that has ended from the API server, or find it gone; tries until it is."""
        pauses, meta = Backoff(), pod.metadata
        while self._object_of(pod.uid) is not None:
            try:
                async with self._slots:
                    await self._api.delete(
                        PODS, meta.name, meta.namespace, grace_period_seconds=0, uid=meta.uid
                    )
            except NotFound:
                return
            except Conflict as err:
                if await self._is_other(pod):
                    return
                self._refusals.failed(err, asyncio.get_running_loop().time())
            except KubeError as err:
                self._refusals.failed(err, asyncio.get_running_loop().time())
            else:
                self._refusals.succeeded(asyncio.get_running_loop().time())
                log.v(3).info("Pod fully terminated and removed from etcd", pod=pod.full_name, podUID=pod.uid)
                return
            await self._api.pause(pauses.next(asyncio.get_running_loop().time()))

    async def run(self) -> NoReturn:
        """Send for ever."""
        loop = asyncio.get_running_loop()
        try:
            async with TaskScope() as requests:
                while True:
                    await self._slots.acquire()
                    try:
                        entry = await self._next()
                        if self._away:
                            await self._api.pause(self._outage.next(loop.time()))
                            self._away = False
                    except BaseException:
                        self._slots.release()
                        raise
                    requests.start(self._serve(entry), name=f"status-{entry.pod.uid}")
        finally:
            if self._release_timer is not None:
                self._release_timer.cancel()

    # Whose turn it is

    def _schedule(self, entry: _Entry, seconds: float) -> None:
        """Look at an entry after so many seconds at the latest."""
        due = asyncio.get_running_loop().time() + seconds
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        if not entry.busy:
            self._enqueue(entry, due)

    def _enqueue(self, entry: _Entry, due: float) -> None:
        heapq.heappush(self._queue, (due, next(self._order), entry.pod.uid))
        self._wake.set()

    async def _next(self) -> _Entry:
        """Wait for the entry that is due first, and take it."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            while self._queue and self._queue[0][0] <= loop.time() + SLACK_SECONDS:
                due, _, uid = heapq.heappop(self._queue)
                entry = self._entries.get(uid)
                # An entry that was hurried, or is being served, has another place in the queue.
                if entry is not None and entry.due == due and not entry.busy:
                    entry.busy, entry.taken, entry.due = True, due, None
                    return entry
            timer = loop.call_at(self._queue[0][0], self._wake.set) if self._queue else None
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _serve(self, entry: _Entry) -> None:
        again: float | None = None
        try:
            again = await self._send(entry)
        except Exception as err:  # the boundary of a task: one pod's status must not end all others'
            again = asyncio.get_running_loop().time() + HOLD_SECONDS
            log.exception(err, "Unexpected error while sending a status", pod=entry.pod.full_name)
        finally:
            entry.busy = False
            self._slots.release()
        if again is not None:
            entry.due = again
        if entry.due is not None:
            self._enqueue(entry, entry.due)
        else:
            entry.release()

    # Sending

    async def _send(self, entry: _Entry) -> float | None:
        """Bring the API server up to date; gives when to try again (the loop's time), None if it worked."""
        target = self._known(entry)
        if target is None:
            return None
        if (until := self._hold_in_crowd(entry)) is not None:
            return until
        patch = self._patch(entry, target.status)
        if not patch or patch == entry.refused:
            entry.untold = None
            return None
        meta, status, loop = target.metadata, entry.status, asyncio.get_running_loop()
        if (until := self._hold_until(entry, target.status, patch)) is not None:
            return until
        body = {"metadata": {"uid": meta.uid}, "status": patch}
        log.v(3).info("Patch status for pod", pod=entry.pod.full_name, podUID=entry.pod.uid, patch=body)
        try:
            answer = await self._api.patch(PODS, meta.name, body, meta.namespace, subresource="status")
        except NotFound:
            entry.absent = meta.uid
            return None
        except Conflict as err:
            if await self._is_other(target):
                entry.absent = meta.uid
                return None
            return self._failed(entry, err)
        except KubeError as err:
            return self._failed(entry, err)
        self._complaints.succeeded(loop.time())
        entry.answer, entry.known, entry.pauses = answer, answer.uid, None
        if entry.untold is not None:
            self._metrics.sent(loop.time() - entry.untold)
        entry.untold = None if entry.status is status else loop.time()
        if entry.status is not status:
            return None
        rest = self._patch(entry, answer.status)
        # What differs although it was not sent is of somebody whom the watch has not shown yet.
        refused = rest.keys() <= patch.keys()
        entry.refused = rest if rest and refused else None
        return None if refused else loop.time()

    def _hold_in_crowd(self, entry: _Entry) -> float | None:
        """Return the loop time until which a status is held back because many pods start; None if it is not.

        It is looked at again as soon as they have started. Nothing is computed before that: the cost of
        a pod that waits for its start must not grow with the time it waits.
        """
        if entry.untold is None:
            return None  # perhaps there is nothing to send
        return self._hold(entry, QUEUED_HOLD_SECONDS if is_queued(entry.status) else CROWDED_HOLD_SECONDS)

    def _hold_until(self, entry: _Entry, theirs: PodStatus, patch: Patch) -> float | None:
        """Return the loop time until which a status is held back that is worth little; None if it is not."""
        if entry.untold is None:
            entry.untold = asyncio.get_running_loop().time()
        if not only_acknowledges(theirs, patch):
            return self._hold_in_crowd(entry)
        until = self._longest_hold(entry, CROWDED_HOLD_SECONDS)
        return until if until is not None else self._hold(entry, QUEUED_HOLD_SECONDS)

    def _hold(self, entry: _Entry, seconds: float) -> float | None:
        """Return the loop time until which a status is held back while many pods start; None if it is not."""
        until = self._longest_hold(entry, seconds)
        if until is None or not self._crowded():
            return None
        self._held[entry.pod.uid] = None
        self._watch_crowd()
        return until

    def _longest_hold(self, entry: _Entry, seconds: float) -> float | None:
        """Return the loop time until which a status may be held back; None when it must be sent now."""
        if not is_passing(entry.pod, entry.status) or entry.waiting or entry.untold is None:
            return None
        until = entry.untold + seconds
        return until if asyncio.get_running_loop().time() < until - SLACK_SECONDS else None

    def _watch_crowd(self) -> None:
        """Look at the held statuses again when the crowd is over, with one timer for all of them."""
        if self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._release_held)

    def _release_held(self) -> None:
        self._release_timer = None
        if self._crowded():
            self._watch_crowd()
            return
        held, self._held = self._held, {}
        for uid in held:
            self.check(uid)

    def _known(self, entry: _Entry) -> Pod | None:
        """What the API server has of a pod, as far as is known; None when there is nothing to tell it."""
        seen, answer = self._object_of(entry.pod.uid), entry.answer
        if seen is None or seen.uid == entry.absent:
            return None
        newer = answer is not None and answer.uid == seen.uid and _version(seen) < _version(answer)
        return answer if newer else seen

    def _patch(self, entry: _Entry, theirs: PodStatus) -> Patch:
        may_run = self._may_run(entry.pod.uid)
        merged = merged_status(entry.pod, theirs, entry.status, may_run=may_run, now=self._clock())
        return status_patch(theirs, merged)

    def _failed(self, entry: _Entry, err: KubeError) -> float:
        now = asyncio.get_running_loop().time()
        self._complaints.failed(err, now)
        if isinstance(err, Unreachable | Unauthorized):
            # Nobody gets through: all wait, and this one keeps its turn.
            self._away = True
            return entry.taken
        if isinstance(err, Invalid):
            # Trying again may help, waiting for it does not: a pod must be able to end.
            entry.release()
        if entry.pauses is None:
            entry.pauses = Backoff()
        return now + entry.pauses.next(now)

    async def _is_other(self, pod: Pod) -> bool:
        """Whether the API server has another pod of this name, or none."""
        try:
            found = await self._api.get(PODS, pod.metadata.name, pod.metadata.namespace)
        except NotFound:
            return True
        except KubeError:
            return False
        return found.uid != pod.uid


def is_passing(pod: Pod, status: PodStatus) -> bool:
    """Whether a status is likely to be followed by a better one soon: the pod is coming, or going."""
    if status.phase in TERMINAL:
        return False
    return status.phase == "Pending" or pod.metadata.deletion_timestamp is not None


def is_queued(status: PodStatus) -> bool:
    """Return whether a status only says that the pod waits for its start."""
    if status.phase != "Pending":
        return False
    found = (*status.init_container_statuses, *status.container_statuses)
    return all(
        one.state.waiting is not None and one.state.waiting.reason in ("ContainerCreating", "PodInitializing")
        for one in found
    )


def _version(pod: Pod) -> int:
    """How new an object is; of servers whose versions are no numbers the watched one counts."""
    version = pod.metadata.resource_version
    return int(version) if version.isdecimal() else 0
