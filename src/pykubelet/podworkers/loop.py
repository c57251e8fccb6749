"""Main loop of the kubelet: dispatches pod changes, runtime events, probe results and ticks to workers.

The loop never blocks: the workers do the work. Without events it ticks every two seconds, for housekeeping.
While the runtime is unhealthy it dispatches nothing and waits, from 100 ms doubling to 5 s; its queue keeps
all events.

`/healthz/syncloop` fails when no iteration started for two minutes (or two resync periods), so that a
supervisor can restart a stuck kubelet.

`PodEventHandlers` are the handlers: a changed pod is rejected, ended, passed to admission, or to its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.podconfig.mux import PodChange
from pykubelet.podconfig.static_pods import is_mirror_pod, is_static_pod
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.podworkers.api_server_sync import ApiServerSync
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.pod_admission import PodAdmission
from pykubelet.podworkers.pod_fates import PodFates
from pykubelet.podworkers.pod_metrics import EngineMetrics
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.status.compute import TERMINAL, has_external_change
from pykubelet.util.backoff import ExponentialDelay
from pykubelet.util.tasks import seconds_to_tick

log = get_logger(__name__)
HOUSEKEEPING_SECONDS = 2.0
"""Seconds between rounds of housekeeping, and the longest iteration of the loop without events."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
STUCK_SECONDS = 120.0


QueuedCall = Callable[["PodEventHandlers"], None]
"""An event in the queue: calls its handler."""


class SyncLoop:
    """The main loop and its health."""

    def __init__(self, runtime_errors: Callable[[], list[str]], resync: Duration) -> None:
        """Initialize; `runtime_errors` returns the reasons why no pod can be synced now."""
        self._runtime_errors = runtime_errors
        self.set_resync(resync)
        self._began: float | None = None
        self._queue: asyncio.Queue[QueuedCall] = asyncio.Queue()
        self._tick: asyncio.TimerHandle | None = None
        """Timer that ends an iteration without events."""
        self._logged_errors: list[str] = []

    def set_resync(self, resync: Duration) -> None:
        """Change the resync period, on which the longest healthy iteration depends."""
        self._longest_round = max(STUCK_SECONDS, 2 * resync.seconds)

    # Producers of events call these at any time; they never block.

    def pods(self, changes: Sequence[PodChange]) -> None:
        """Queue changes of the desired pods, in their order."""
        for change in changes:
            self._queue.put_nowait(_pod_changed(change))

    def runtime(self, change: PodLifecycleEvent) -> None:
        """Queue a change in the runtime."""
        self._queue.put_nowait(lambda handlers: handlers.runtime_changed(change))

    def probe(self, uid: str) -> None:
        """Queue a new probe result."""
        self._queue.put_nowait(lambda handlers: handlers.probe_changed(uid))

    def after(self, call: Callable[[], None]) -> None:
        """Queue a call that runs when all earlier events have been dispatched."""
        self._queue.put_nowait(lambda _: call())

    async def run(self, handlers: PodEventHandlers) -> None:
        """Dispatch events to the handlers until cancelled."""
        clock = asyncio.get_running_loop().time
        delay, housekeeping = ExponentialDelay(FIRST_PAUSE, LONGEST_PAUSE), clock()
        try:
            while True:
                self._began = clock()
                if self._runtime_is_down():
                    await asyncio.sleep(delay.next())
                    continue
                delay.reset()
                if clock() >= housekeeping:
                    await self._guarded(handlers.housekeep())
                    housekeeping = clock() + seconds_to_tick(HOUSEKEEPING_SECONDS)
                self._schedule_tick(housekeeping)
                await self._dispatch(handlers)
        finally:
            if self._tick is not None:
                self._tick.cancel()
                self._tick = None

    def health(self) -> str | None:
        """Return the reason why the loop counts as stuck, or None."""
        if self._began is None:
            return None
        age = asyncio.get_running_loop().time() - self._began
        if age > self._longest_round:
            return f"sync loop took longer than expected: the last round began {age:.0f} s ago"
        return None

    def _runtime_is_down(self) -> bool:
        errors = self._runtime_errors()
        if errors and errors != self._logged_errors:
            log.error("; ".join(errors), "Skipping pod synchronization")
        self._logged_errors = errors
        return bool(errors)

    def _schedule_tick(self, due: float) -> None:
        """Queue a tick at the loop time `due`, unless one is scheduled: a timeout per wait costs more."""
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_at(due, self._queue.put_nowait, self._on_tick)

    def _on_tick(self, _: PodEventHandlers) -> None:
        self._tick = None

    async def _dispatch(self, handlers: PodEventHandlers) -> None:
        """Dispatch all queued events; wait for the first, which is a tick if there is no other."""
        call = await self._queue.get()
        while True:
            self._guarded_call(call, handlers)
            if self._queue.empty():
                return
            call = self._queue.get_nowait()

    def _guarded_call(self, call: QueuedCall, handlers: PodEventHandlers) -> None:
        try:
            call(handlers)
        except Exception as err:  # one failing handler must not stop the kubelet
            log.exception(err, "Unexpected error in the sync loop")

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as err:  # the same for housekeeping
            log.exception(err, "Unexpected error while housekeeping")


def _pod_changed(change: PodChange) -> QueuedCall:
    return lambda handlers: handlers.pod_changed(change)


class PodEventHandlers:
    """Handlers of the main loop's events on a node."""

    def __init__(
        self,
        *,
        records: PodRecords,
        workers: PodWorkers,
        syncer: NodePodSyncer,
        fates: PodFates,
        admission: PodAdmission,
        housekeeping: Housekeeping,
        api_server: ApiServerSync | None,
        metrics: EngineMetrics,
    ) -> None:
        """Initialize; `api_server` is None on a standalone node."""
        self._records = records
        self._workers = workers
        self._syncer = syncer
        self._fates = fates
        self._admission = admission
        self._housekeeping = housekeeping
        self._api_server = api_server
        self._metrics = metrics

    def pod_changed(self, change: PodChange) -> None:
        """Handle a change of the desired pods."""
        pod, reconcile = change.pod, change.op == "RECONCILE"
        log.v(4 if reconcile else 2).info(
            f"SyncLoop {change.op}", source=change.source, pod=pod.full_name, podUID=pod.uid
        )
        self._records.store.apply(change)
        if self._api_server is not None:
            if change.source == "api" and is_mirror_pod(pod):
                self._api_server.mirror_changed(pod)
                return
            self._api_server.pod_changed(pod)
        self._metrics.shown(change)
        if reconcile:
            self._reconcile(pod)
            return
        self._records.history.note(pod.uid, "source", f"{change.op} from {change.source}")
        if change.op == "REMOVE":
            self._remove(pod)
        elif is_static_pod(pod) or self._is_to_run(change):
            self._admission.admit(pod)

    def _is_to_run(self, change: PodChange) -> bool:
        """Return whether a pod of the API server is to be synced; terminate one that is being deleted."""
        pod = change.pod
        worker, status = self._workers.get(pod.uid), self._records.statuses.get(pod.uid)
        if self._fates.has_departed(pod.uid):
            return False
        if worker is None and status is None and pod.status.phase not in TERMINAL:
            final = self._records.final.get(pod.uid)
            if final is not None:
                self._end_again(pod, final)
                return False
        if pod.metadata.deletion_timestamp is not None:
            self._workers.end(pod, pod.metadata.deletion_grace_period_seconds)
            return False
        if worker is None:
            return status is None or status.phase not in TERMINAL
        if change.op == "UPDATE" and worker.state is not PodWorkerState.SYNCING:
            # It has terminated by itself; an update does not start it again.
            worker.set_pod(pod)
            return False
        return True

    def _end_again(self, pod: Pod, final: PodStatus) -> None:
        """Terminate a pod that a previous kubelet process terminated without reporting its status."""
        log.info("Pod was terminated by a node shutdown", pod=pod.full_name, podUID=pod.uid)
        self._records.history.note(
            pod.uid, "shutdown", "its final status was not reported before the node went down"
        )
        self._records.statuses.set(pod, final)
        self._workers.end(pod, pod.metadata.deletion_grace_period_seconds)

    def _remove(self, pod: Pod) -> None:
        if self._fates.has_departed(pod.uid):
            self._fates.left_source(pod.uid)
        else:
            self._workers.end(pod)

    def _reconcile(self, pod: Pod) -> None:
        """Handle a changed pod status in the API server, which other components may have written."""
        worker = self._workers.get(pod.uid)
        before = worker.pod if worker is not None else None
        self._workers.set_pod(pod)
        if before is not None and has_external_change(before, pod):
            self._workers.wake(pod.uid)

    def runtime_changed(self, change: PodLifecycleEvent) -> None:
        """Handle a runtime event, unless it is known already."""
        if self._syncer.take(change):
            self._workers.wake(change.uid)

    def probe_changed(self, uid: str) -> None:
        """Handle a new probe result."""
        worker = self._workers.get(uid)
        if worker is not None and worker.state is PodWorkerState.TERMINATING and worker.pod is not None:
            # Its worker is busy until everything has stopped; report the result now.
            self._syncer.probed(worker.pod)
        self._workers.wake(uid)

    async def housekeep(self) -> None:
        """Run housekeeping: orphaned pods in the runtime and on disk, and garbage collection."""
        self._housekeeping.run_once()
