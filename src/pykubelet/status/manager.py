"""Status manager: sends each pod's latest status to the API server as a patch, one request per pod at a time.

It is notified of every status that the kubelet computes (`set_status`) and of every change of the object in
the API server (`handle_object_update`), and sends the difference. The API server's object is the newer one of
the watched object and the response to the last patch; a difference that the server does not apply (an unknown
field) is not sent again until something else changes. All state is in memory; after a restart the statuses
are computed and compared again.

- The status of a starting or terminating pod is delayed by HOLD_SECONDS: a quick start is one request, and a
  slow one still shows what it waits for. During a burst of pod starts it is delayed longer, because requests
  would take CPU time from the starts, and longest if it only reports that the pod waits for its start. All
  other statuses are sent immediately, and so is a delayed one when a warning about the pod is recorded: who
  sees the event must find the status that it is about.
- A failed request is retried with exponential back-off. While the API server is unreachable only one request
  is tried at a time; afterwards statuses are sent in the order of their changes.
- A pod that the API server no longer has, or that was recreated under the same name, is skipped.

At the end of a deletion the caller awaits `wait_reported` until the API server has the pod's latest status,
then `remove` until the terminated pod is deleted.
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
_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 20, 30, 45, 60)


class StatusMetrics:
    """Metrics of status updates."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._sent = Histogram(
            "kubelet_pod_status_sync_duration_seconds",
            "Seconds from the first unreported change of a pod's status until the API server has it.",
            buckets=_BUCKETS,
            registry=registry,
        )

    def sent(self, seconds: float) -> None:
        """Observe the seconds from a pod's first unreported change to the successful patch."""
        self._sent.observe(seconds)


HOLD_SECONDS = 1.0
"""Seconds by which the status of a starting or terminating pod is delayed."""
BURST_HOLD_SECONDS = 10.0
"""Seconds by which it is delayed during a burst of pod starts, or if it only acknowledges a generation."""
QUEUED_HOLD_SECONDS = 30.0
"""Seconds by which it is delayed during a burst of pod starts if it only reports that the pod waits."""
SLACK_SECONDS = 0.001
"""Seconds by which an entry may be early: event loops wake up to one clock tick before a deadline."""
MAX_CONCURRENT_REQUESTS = 8
"""Maximum number of concurrent requests."""


class PodApi(Protocol):
    """Interface of the API client (`apiserver.client.ApiClient`)."""

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
        """Patch a pod's status; return the resulting pod."""
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
        """Delete the pod with this uid."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before a retry, or until the API server is reachable again."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """Status of one pod and the state of its reporting."""

    pod: Pod
    status: PodStatus
    due: float | None = None
    """Loop time at which to check for something to send; None if nothing changed."""
    unreported_since: float | None = None
    """Loop time of the first change that is not reported yet."""
    is_urgent: bool = False
    """Whether the unreported status is not delayed any more."""
    current_due: float = 0.0
    """Loop time at which the check in progress was due."""
    busy: bool = False
    response: Pod | None = None
    """Pod of the last response, until the watch has caught up with it."""
    patched_uid: str = ""
    """Uid of the last object that was patched."""
    absent_uid: str = ""
    """Uid of an object that the API server no longer has, even if the watch still shows it."""
    unapplied_patch: Patch | None = None
    """Patch that the API server accepted without applying it."""
    backoff: Backoff | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def release(self) -> None:
        for future in self.waiters:
            if not future.done():
                future.set_result(None)
        self.waiters.clear()


class StatusManager:
    """Reporter of pod statuses to the API server; all methods except coroutines return immediately.

    `get_object` returns the watched object of a pod: the pod itself, or the mirror pod of a static one.
    `may_run` returns whether a container of a pod may still run, `in_burst` whether a burst of pods starts.
    """

    def __init__(
        self,
        api: PodApi,
        *,
        get_object: Callable[[str], Pod | None],
        may_run: Callable[[str], bool],
        in_burst: Callable[[], bool] = lambda: False,
        metrics: StatusMetrics | None = None,
        clock: Callable[[], datetime] = api_now,
    ) -> None:
        self._api = api
        self._get_object = get_object
        self._may_run = may_run
        self._in_burst = in_burst
        self._metrics = metrics or StatusMetrics()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._queue: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._held: dict[str, None] = {}
        """Uids of the pods whose statuses are delayed by a burst of pod starts, the oldest first."""
        self._release_timer: asyncio.TimerHandle | None = None
        self._unreachable = False
        self._outage = Backoff()
        self._error_log = ErrorLogLimiter(log, "Failed to send the status of a pod")
        self._remove_error_log = ErrorLogLimiter(log, "Failed to remove a terminated pod from the API server")

    def set_status(self, pod: Pod, status: PodStatus, _: PodStatus | None = None) -> None:
        """Set a pod's new status and schedule its patch; the previous one, of a listener, is not needed."""
        entry = self._entries.get(pod.uid)
        if entry is None:
            entry = self._entries[pod.uid] = _Entry(pod, status)
        entry.pod, entry.status = pod, status
        if entry.unreported_since is None:
            entry.unreported_since = asyncio.get_running_loop().time()
        self._schedule(entry, HOLD_SECONDS if is_transient(pod, status) else 0.0)

    def handle_object_update(self, uid: str) -> None:
        """Handle a change of the pod's object in the watch, which may be the result of an own patch."""
        entry, seen = self._entries.get(uid), self._get_object(uid)
        if entry is None:
            return
        response = entry.response
        if response is not None and seen is not None and response.uid == seen.uid:
            if _version(seen) < _version(response):
                return
            entry.response = None
            if _version(seen) == _version(response):
                return
        # Delay the patch: another writer may keep overwriting this status.
        overwritten = seen is not None and seen.uid == entry.patched_uid
        self._schedule(entry, HOLD_SECONDS if overwritten else 0.0)

    def check(self, uid: str) -> None:
        """Schedule an immediate check for a difference, such as a phase that can be reported now."""
        entry = self._entries.get(uid)
        if entry is not None:
            self._schedule(entry, 0.0)

    def expedite(self, uid: str) -> None:
        """Send a pod's status now, if it is delayed."""
        entry = self._entries.get(uid)
        if entry is not None and entry.unreported_since is not None:
            entry.is_urgent = True
            self._schedule(entry, 0.0)

    def forget(self, uid: str) -> None:
        """Remove a pod and release its waiters."""
        entry = self._entries.pop(uid, None)
        if entry is not None:
            entry.release()

    async def wait_reported(self, uid: str) -> None:
        """Wait until the API server has the pod's latest status, or does not have the pod."""
        entry = self._entries.get(uid)
        if entry is None:
            return
        done = asyncio.get_running_loop().create_future()
        entry.waiters.append(done)
        self._schedule(entry, 0.0)
        await done

    async def remove(self, pod: Pod) -> None:
        """Delete a terminated pod from the API server; retry until it no longer exists."""
        backoff, meta = Backoff(), pod.metadata
        while self._get_object(pod.uid) is not None:
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
                self._remove_error_log.failed(err, asyncio.get_running_loop().time())
            except KubeError as err:
                self._remove_error_log.failed(err, asyncio.get_running_loop().time())
            else:
                self._remove_error_log.succeeded(asyncio.get_running_loop().time())
                log.v(3).info("Pod fully terminated and removed from etcd", pod=pod.full_name, podUID=pod.uid)
                return
            await self._api.pause(backoff.next(asyncio.get_running_loop().time()))

    async def run(self) -> NoReturn:
        """Send statuses until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with TaskScope() as requests:
                while True:
                    await self._slots.acquire()
                    try:
                        entry = await self._next()
                        if self._unreachable:
                            await self._api.pause(self._outage.next(loop.time()))
                            self._unreachable = False
                    except BaseException:
                        self._slots.release()
                        raise
                    requests.start(self._serve(entry), name=f"status-{entry.pod.uid}")
        finally:
            if self._release_timer is not None:
                self._release_timer.cancel()

    # Queue

    def _schedule(self, entry: _Entry, seconds: float) -> None:
        """Schedule the check of an entry in at most this many seconds."""
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
        """Wait for the next entry that is due, mark it as busy and return it."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            while self._queue and self._queue[0][0] <= loop.time() + SLACK_SECONDS:
                due, _, uid = heapq.heappop(self._queue)
                entry = self._entries.get(uid)
                # An entry that was rescheduled, or is being processed, has another item in the queue.
                if entry is not None and entry.due == due and not entry.busy:
                    entry.busy, entry.current_due, entry.due = True, due, None
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
        except Exception as err:  # task boundary: a failure of one pod must not stop the others
            again = asyncio.get_running_loop().time() + HOLD_SECONDS
            log.exception(err, "Failed to send pod status with an unexpected error", pod=entry.pod.full_name)
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
        """Send the patch, if any; return the loop time of the next attempt, or None if no retry is needed."""
        target = self._target(entry)
        if target is None:
            return None
        if (until := self._hold_in_burst(entry)) is not None:
            return until
        patch = self._patch(entry, target.status)
        if not patch or patch == entry.unapplied_patch:
            entry.unreported_since, entry.is_urgent = None, False
            return None
        meta, status, loop = target.metadata, entry.status, asyncio.get_running_loop()
        if (until := self._hold_until(entry, target.status, patch)) is not None:
            return until
        body = {"metadata": {"uid": meta.uid}, "status": patch}
        log.v(3).info("Patch status for pod", pod=entry.pod.full_name, podUID=entry.pod.uid, patch=body)
        try:
            response = await self._api.patch(PODS, meta.name, body, meta.namespace, subresource="status")
        except NotFound:
            entry.absent_uid = meta.uid
            return None
        except Conflict as err:
            if await self._is_other(target):
                entry.absent_uid = meta.uid
                return None
            return self._failed(entry, err)
        except KubeError as err:
            return self._failed(entry, err)
        self._error_log.succeeded(loop.time())
        entry.response, entry.patched_uid, entry.backoff = response, response.uid, None
        entry.is_urgent = False
        if entry.unreported_since is not None:
            self._metrics.sent(loop.time() - entry.unreported_since)
        entry.unreported_since = None if entry.status is status else loop.time()
        if entry.status is not status:
            return None
        rest = self._patch(entry, response.status)
        # A difference outside the patch is a change by another writer that the watch has not shown yet.
        is_unapplied = rest.keys() <= patch.keys()
        entry.unapplied_patch = rest if rest and is_unapplied else None
        return None if is_unapplied else loop.time()

    def _hold_in_burst(self, entry: _Entry) -> float | None:
        """Return the loop time until which a burst of pod starts delays a status; None if it does not.

        The status is checked again as soon as the burst is over. Nothing is computed before that: the cost
        of a pod that waits for its start must not grow with the time it waits.
        """
        if entry.unreported_since is None:
            return None  # there may be nothing to send
        return self._hold(entry, QUEUED_HOLD_SECONDS if is_queued(entry.status) else BURST_HOLD_SECONDS)

    def _hold_until(self, entry: _Entry, theirs: PodStatus, patch: Patch) -> float | None:
        """Return the loop time until which a status of low priority is delayed; None to send it now."""
        if entry.unreported_since is None:
            entry.unreported_since = asyncio.get_running_loop().time()
        if not only_acknowledges(theirs, patch):
            return self._hold_in_burst(entry)
        until = self._longest_hold(entry, BURST_HOLD_SECONDS)
        return until if until is not None else self._hold(entry, QUEUED_HOLD_SECONDS)

    def _hold(self, entry: _Entry, seconds: float) -> float | None:
        """Return the loop time until which a status is delayed if a burst of pods starts, else None."""
        until = self._longest_hold(entry, seconds)
        if until is None or not self._in_burst():
            return None
        self._held[entry.pod.uid] = None
        self._schedule_release()
        return until

    def _longest_hold(self, entry: _Entry, seconds: float) -> float | None:
        """Return the loop time until which a status may be delayed; None if it must be sent now."""
        if entry.is_urgent or entry.waiters or entry.unreported_since is None:
            return None
        if not is_transient(entry.pod, entry.status):
            return None
        until = entry.unreported_since + seconds
        return until if asyncio.get_running_loop().time() < until - SLACK_SECONDS else None

    def _schedule_release(self) -> None:
        """Schedule the check whether the burst is over, with one timer for all delayed statuses."""
        if self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._release_held)

    def _release_held(self) -> None:
        self._release_timer = None
        if self._in_burst():
            self._schedule_release()
            return
        held, self._held = self._held, {}
        for uid in held:
            self.check(uid)

    def _target(self, entry: _Entry) -> Pod | None:
        """Return the newest known object of a pod in the API server; None if no object can be patched."""
        seen, response = self._get_object(entry.pod.uid), entry.response
        if seen is None or seen.uid == entry.absent_uid:
            return None
        newer = response is not None and response.uid == seen.uid and _version(seen) < _version(response)
        return response if newer else seen

    def _patch(self, entry: _Entry, theirs: PodStatus) -> Patch:
        may_run = self._may_run(entry.pod.uid)
        merged = merged_status(entry.pod, theirs, entry.status, may_run=may_run, now=self._clock())
        return status_patch(theirs, merged)

    def _failed(self, entry: _Entry, err: KubeError) -> float:
        now = asyncio.get_running_loop().time()
        self._error_log.failed(err, now)
        if isinstance(err, Unreachable | Unauthorized):
            # The API server is unreachable: all requests wait, and this entry keeps its position.
            self._unreachable = True
            return entry.current_due
        if isinstance(err, Invalid):
            # A retry may succeed, but waiters are released: termination must not depend on it.
            entry.release()
        if entry.backoff is None:
            entry.backoff = Backoff()
        return now + entry.backoff.next(now)

    async def _is_other(self, pod: Pod) -> bool:
        """Return whether the API server has another pod of this name, or no pod."""
        try:
            found = await self._api.get(PODS, pod.metadata.name, pod.metadata.namespace)
        except NotFound:
            return True
        except KubeError:
            return False
        return found.uid != pod.uid


def is_transient(pod: Pod, status: PodStatus) -> bool:
    """Return whether another status is likely to follow soon, because the pod is starting or terminating."""
    if status.phase in TERMINAL:
        return False
    return status.phase == "Pending" or pod.metadata.deletion_timestamp is not None


def is_queued(status: PodStatus) -> bool:
    """Return whether a status only reports that the pod waits for its start."""
    if status.phase != "Pending":
        return False
    found = (*status.init_container_statuses, *status.container_statuses)
    return all(
        container.state.waiting is not None
        and container.state.waiting.reason in ("ContainerCreating", "PodInitializing")
        for container in found
    )


def _version(pod: Pod) -> int:
    """Return the resourceVersion as a number; 0 if it is not numeric, so that the watched object wins."""
    version = pod.metadata.resource_version
    return int(version) if version.isdecimal() else 0
