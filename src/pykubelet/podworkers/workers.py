"""Pod workers: one task per pod, with the states syncing → terminating → terminated → removing → gone.

A worker is woken by a new spec, a runtime event, a probe result or a due retry, and runs one step of its
state; wake-ups during a step cause one more step. States only advance. A request to terminate interrupts a
running sync: cancelling is safe, because the next step observes the runtime first. A failed step is retried
with back-off. No failure of a pod ends its worker, and no failure of a worker ends the kubelet.

After the terminated step the pod is finished: its volumes are unmounted and the API server may have deleted
it. Removing what is left of it in the runtime and on disk is retried until it succeeds, and only another pod
with the same uid waits for it. A restarted kubelet finds such remnants during housekeeping.

`PodWorkers` has them all. A static pod waits for its predecessor: an edited static pod is a new pod (its uid
is a hash of its content) with the same name. Two pods of one name must never run concurrently, so the new
one's worker starts when the old one is finished; after several edits only the latest pod counts. A pod of the
API server starts immediately, because its predecessor was deleted by force in order not to wait.

A finished pod whose remnants are being removed keeps its worker, so that nothing else removes them, but it
counts neither as a pod nor as the owner of its name.

`PodChurn` detects bursts of starting or terminating pods, during which normal events and intermediate
statuses are delayed: the API server often shares the host with the pods, which would wait for it. The burst
lasts until 1.5 s after the last start, so that its last pods are served as fast as the first.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.contract import (
    KillPodOptions,
    Outcome,
    PodStatusFunc,
    PodSyncer,
    Remnants,
    SyncError,
)
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podworkers.metrics import WorkerMetrics
from pykubelet.podworkers.startup_latency import first_seen
from pykubelet.status.compute import TERMINAL
from pykubelet.util.backoff import exponential_delay
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
RETRY_SECONDS = (1.0, 10.0)
"""Back-off delay after a failed step, in seconds: the first and the longest."""
RESYNC_JITTER = 0.5
"""A pod is synced again after the resync period and a random part of it, at most so much of it."""
MANY = 4
"""Number of concurrently terminating pods above which they count as a burst."""
CALM_SECONDS = 1.5
"""Seconds after the last start until a burst is over."""
TERMINATING_SECONDS = 10.0
"""Seconds after which a terminating pod no longer counts: it waits for something else than the host."""


class PodWorkerState(Enum):
    """State of a pod worker."""

    SYNCING = "syncing"
    TERMINATING = "terminating"
    TERMINATED = "terminated"
    REMOVING = "removing"
    GONE = "gone"


_FINISHED = (PodWorkerState.REMOVING, PodWorkerState.GONE)


def effective_grace(pod: Pod | None, current: int | None, requested: int | None) -> int | None:
    """Return the grace period of a terminating pod: the shortest requested so far, else the pod's own.

    At least 1 second, so that preStop hooks run. None for an orphan without a requested grace period.
    """
    deletion = pod.metadata.deletion_grace_period_seconds if pod is not None else None
    known = [seconds for seconds in (current, deletion, requested) if seconds is not None]
    if known:
        return max(1, min(known))
    return max(1, pod.spec.termination_grace_period_seconds or 0) if pod is not None else None


class PodWorker:
    """Worker of one pod; `run` ends when the pod is gone."""

    def __init__(
        self,
        uid: str,
        life: PodSyncer,
        pod: Pod | None,
        resync_seconds: float,
        name: str = "",
        *,
        ending: KillPodOptions | None = None,
        metrics: WorkerMetrics | None = None,
        on_state: Callable[[PodWorker], None] = lambda worker: None,
        on_finished: Callable[[PodWorker], None] = lambda worker: None,
        is_superseded: Callable[[str], bool] = lambda uid: False,
    ) -> None:
        """Initialize with the pod, None for an orphan; `ending` for a pod that is only terminated.

        `on_state` is called after each change of the state, `on_finished` after the terminated step;
        `is_superseded` returns whether a new pod with this uid waits for the worker.
        """
        self.uid = uid
        self.name = pod.full_name if pod is not None else name
        """`namespace/name`; empty for an orphan whose name is unknown."""
        self.pod = pod
        self._state = (
            PodWorkerState.TERMINATING if ending is not None or pod is None else PodWorkerState.SYNCING
        )
        self._on_state = on_state
        self.stopped = asyncio.Event()
        """Set as soon as no container of the pod runs; its remnants may still exist."""
        self.gone = asyncio.Event()
        self._life = life
        self._resync = resync_seconds
        self._grace: int | None = None
        """Grace period in seconds, once termination has been requested."""
        self._pod_status: PodStatusFunc | None = None
        self._on_finished = on_finished
        self._is_superseded = is_superseded
        self._remnants: Remnants | None = None
        if ending is not None:
            self._grace = effective_grace(pod, None, ending.grace)
            self._pod_status = ending.pod_status
        self._wake = asyncio.Event()
        self._wake.set()
        self._step_scope: asyncio.Timeout | None = None
        self._failures = 0
        self._is_resync = False
        """Whether only the resync period ends the wait for the next step."""
        self._metrics = metrics or WorkerMetrics()
        self._cause = "create"
        """Cause of the next sync, as a label of the metrics."""
        self._log = log.bind(pod=self.name, podUID=uid)

    @property
    def state(self) -> PodWorkerState:
        """State of the pod in its lifecycle."""
        return self._state

    @state.setter
    def state(self, state: PodWorkerState) -> None:
        self._state = state
        self._on_state(self)

    def update(self, pod: Pod) -> None:
        """Set a new version of the pod and sync it; ignored when the pod is terminating."""
        if self.state is PodWorkerState.SYNCING:
            self.pod = pod
            self._cause = "update" if self._cause != "create" else self._cause
            self.wake()

    def set_pod(self, pod: Pod) -> None:
        """Set a new version of the pod without a sync."""
        if self.pod is not None:
            self.pod = pod

    def wake(self) -> None:
        """Request another step."""
        self._wake.set()

    def killed_status(self, status: PodStatus) -> PodStatus:
        """Return a status as it will be after the requested termination, unchanged if none is requested."""
        if self._pod_status is None or status.phase in TERMINAL:
            return status
        return self._pod_status(status)

    def terminate(self, grace: int | None = None, pod_status: PodStatusFunc | None = None) -> None:
        """Terminate the pod; the shortest grace period and the last status function count."""
        before = self._grace
        self._grace = effective_grace(self.pod, before, grace)
        self._pod_status = pod_status or self._pod_status
        shortened = before is not None and self._grace is not None and self._grace < before
        if self.state is PodWorkerState.SYNCING or (self.state is PodWorkerState.TERMINATING and shortened):
            self.state = PodWorkerState.TERMINATING
            self._cut_short()
        self.wake()

    def set_resync(self, seconds: float) -> None:
        """Change the resync period; a sync follows immediately, and the next one after the new period."""
        self._resync = seconds
        self.wake()

    async def run(self) -> None:
        """Run steps until the pod is gone."""
        pause: float | None = None
        clock = asyncio.get_running_loop().time
        while self.state is not PodWorkerState.GONE:
            self._is_resync = not await self._sleep(pause) and self._is_resync
            operation, began = self._operation(), clock()
            try:
                pause = await self._step()
                self._failures = 0
            except SyncError as err:
                pause = self._after_failure()
                pause = pause if err.retry_after is None else err.retry_after
                self._log.error(err, "Error syncing pod, retrying", retrySeconds=pause)
                if self.state is PodWorkerState.REMOVING and self._is_superseded(self.uid):
                    # The next pod with this uid finds the remnants; it must not wait for them.
                    self.state = PodWorkerState.GONE
            except Exception as err:  # a bug in one pod's handling must not end the others
                pause = self._after_failure()
                self._log.exception(err, "Unexpected error while syncing pod", retrySeconds=pause)
            if operation is not None:
                self._metrics.worked(operation, clock() - began)
        self.gone.set()

    async def _sleep(self, seconds: float | None) -> bool:
        """Wait until woken, at most for so many seconds; 0 starts the next step immediately.

        Return whether it was woken.
        """
        try:
            async with asyncio.timeout(wait_seconds(seconds) if seconds else seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def _operation(self) -> str | None:
        """Return the label of the next step in the metrics; None for a finished pod, which is not counted."""
        if self.state is PodWorkerState.SYNCING:
            cause, self._cause = self._cause, "sync"
            return cause
        if self.state is PodWorkerState.REMOVING:
            return None
        return "kill" if self.state is PodWorkerState.TERMINATING else "terminated"

    def _after_failure(self) -> float:
        self._failures += 1
        return exponential_delay(*RETRY_SECONDS, self._failures)

    async def _step(self) -> float | None:
        if self.state is PodWorkerState.SYNCING:
            assert self.pod is not None
            resync, self._is_resync = self._is_resync, False
            finished, again = await self._interruptible(self._life.sync(self.pod, resync=resync))
            if finished and self.state is PodWorkerState.SYNCING:
                self.state = PodWorkerState.TERMINATING
                return 0
            # Pods that started together are not synced together for ever.
            period = self._resync * (1 + RESYNC_JITTER * random.random())  # noqa: S311 - no secret
            self._is_resync = again is None or period < again
            return period if again is None else min(again, period)
        if self.state is PodWorkerState.TERMINATING:
            await self._interruptible(self._ending())
            return 0
        if self._remnants is None:
            self._remnants = await self._life.clean_up(self.uid, self.pod)
            self.state = PodWorkerState.GONE if self._remnants is None else PodWorkerState.REMOVING
            self._on_finished(self)
            return 0
        await self._life.remove(self._remnants)
        self.state = PodWorkerState.GONE
        return None

    async def _ending(self) -> Outcome:
        if self._grace is None:
            self._grace = effective_grace(self.pod, None, None)
        await self._life.terminate(self.uid, self.pod, KillPodOptions(self._grace, self._pod_status))
        self.state = PodWorkerState.TERMINATED
        self.stopped.set()
        return True, None

    async def _interruptible(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Run a step that `_cut_short` may interrupt; another follows an interrupted step immediately."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._step_scope = scope
                try:
                    return await work
                finally:
                    self._step_scope = None
        except TimeoutError:
            if not scope.expired():
                raise
            return False, 0

    def _cut_short(self) -> None:
        if self._step_scope is not None:
            self._step_scope.reschedule(asyncio.get_running_loop().time())


class PodChurn:
    """Detection of bursts of starting or terminating pods."""

    def __init__(self, limiter: StartLimiter | None = None) -> None:
        """Initialize with the limiter of starting pods, for which pods wait during a burst."""
        self.limiter = limiter or StartLimiter()
        self._terminating: dict[str, float] = {}
        """Loop time at which each pod began to terminate, by uid, the latest last."""
        self._last_burst = -math.inf

    def terminating(self, uid: str) -> None:
        """Record that a pod begins to terminate, or still does."""
        self._terminating.setdefault(uid, asyncio.get_running_loop().time())

    def finished(self, uid: str) -> None:
        """Record that a pod has left its worker."""
        self._terminating.pop(uid, None)

    def is_bursting(self) -> bool:
        """Return whether there is a burst, or was one within the last `CALM_SECONDS`."""
        now = asyncio.get_running_loop().time()
        if self.limiter.has_waiters or self._many_terminate(now - TERMINATING_SECONDS):
            self._last_burst = now
        return now - self._last_burst < CALM_SECONDS

    def _many_terminate(self, oldest: float) -> bool:
        """Return whether more than `MANY` pods began to terminate after the loop time `oldest`."""
        latest = itertools.islice(reversed(self._terminating.values()), MANY + 1)
        return sum(began > oldest for began in latest) > MANY


class PodWorkers:
    """All pod workers; their tasks belong to `scope`."""

    def __init__(
        self,
        scope: TaskScope,
        resync_seconds: float,
        churn: PodChurn | None = None,
        metrics: WorkerMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize; `start` must be called before the first pod is synced."""
        self._syncer: PodSyncer | None = None
        self._churn = churn
        self._metrics = metrics or WorkerMetrics()
        self._clock = clock
        self._scope = scope
        self._resync = resync_seconds
        self._changes = 0
        self._workers: dict[str, PodWorker] = {}
        self._successors: dict[str, Pod] = {}
        """By full name: the pod that waits until its predecessor is gone."""
        self._named: dict[str, dict[str, PodWorker]] = {}
        """Workers by full name and uid."""
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose worker or successor changed; it must not block."""
        self._listeners.append(listener)

    def set_resync(self, seconds: float) -> None:
        """Change the resync period; every pod is synced once, and then with the new period."""
        self._resync = seconds
        for worker in self._workers.values():
            worker.set_resync(seconds)

    def start(self, syncer: PodSyncer) -> None:
        """Set the syncer that the workers call; it uses parts that need the workers."""
        self._syncer = syncer

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, uid: str) -> PodWorker | None:
        """Return the worker of a pod."""
        return self._workers.get(uid)

    def pod(self, uid: str) -> Pod | None:
        """Return the pod with this uid from its worker, also a terminating one."""
        worker = self._workers.get(uid)
        return worker.pod if worker is not None and worker.state not in _FINISHED else None

    @property
    def changes(self) -> int:
        """Number of workers started and removed so far: while it is the same, `all` returns the same."""
        return self._changes

    def all(self) -> list[PodWorker]:
        """Return every worker."""
        return list(self._workers.values())

    def unfinished(self) -> list[PodWorker]:
        """Return the workers of pods that are not finished."""
        return [worker for worker in self._workers.values() if worker.state not in _FINISHED]

    def pods(self) -> list[Pod]:
        """Return the unfinished pods of all workers."""
        return [worker.pod for worker in self.unfinished() if worker.pod is not None]

    def names(self) -> set[str]:
        """Return the `namespace/name` of every unfinished pod."""
        return {worker.name for worker in self.unfinished()}

    def uids(self) -> set[str]:
        """Return the uids of pods that have a worker or wait for one; housekeeping must not touch them."""
        return {*self._workers, *(pod.uid for pod in self._successors.values())}

    def is_reborn(self, uid: str) -> bool:
        """Return whether a new pod with this uid waits for the end of the current one."""
        return any(pod.uid == uid for pod in self._successors.values())

    def sync(self, pod: Pod) -> None:
        """Sync a pod from now on."""
        worker = self._workers.get(pod.uid)
        if worker is not None and worker.state is PodWorkerState.SYNCING:
            worker.update(pod)
        elif worker is not None or (is_static_pod(pod) and self._of_name(pod.full_name) is not None):
            log.info("Pod waits until its predecessor is gone", pod=pod.full_name, podUID=pod.uid)
            replaced = self._successors.get(pod.full_name)
            self._successors[pod.full_name] = pod
            self._notify(pod.uid)
            if replaced is not None and replaced.uid != pod.uid:
                self._notify(replaced.uid)  # it counts as admitted no longer
            if worker is not None and worker.state is PodWorkerState.REMOVING:
                worker.wake()
        else:
            self._start(pod.uid, pod)

    def set_pod(self, pod: Pod) -> None:
        """Set a new version of a pod without a sync."""
        worker = self._workers.get(pod.uid)
        if worker is not None:
            worker.set_pod(pod)
        elif self.is_reborn(pod.uid):
            self._successors[pod.full_name] = pod

    def end(self, pod: Pod, grace: int | None = None, *, pod_status: PodStatusFunc | None = None) -> None:
        """Terminate a pod, also one that never started or has already terminated."""
        self._drop_successor(pod.uid)
        worker = self._workers.get(pod.uid)
        if worker is None:
            self._start(pod.uid, pod, ending=KillPodOptions(grace, pod_status))
        else:
            worker.set_pod(pod)
            worker.terminate(grace, pod_status)

    def terminate(
        self, uid: str, grace: int | None = None, *, pod_status: PodStatusFunc | None = None
    ) -> None:
        """Terminate a pod that has a worker; `PodWorker.stopped` is set when nothing of it runs any more.

        A kubelet component that kills a pod for reasons of its own (eviction, preemption, node shutdown)
        passes the function that sets the pod's last status.
        """
        self._drop_successor(uid)
        worker = self._workers.get(uid)
        if worker is not None:
            worker.terminate(grace, pod_status)

    def terminate_orphan(self, uid: str, name: str = "", *, alive: bool = False) -> None:
        """Terminate an orphan, known only to the runtime or the disk; `name`: its `namespace/name` or empty.

        `alive`: whether something of it runs.
        """
        if uid not in self._workers:
            self._start(uid, None, name)
            if alive:
                self._metrics.orphan()

    def wake(self, uid: str) -> None:
        """Request a step of a pod's worker."""
        worker = self._workers.get(uid)
        if worker is not None:
            worker.wake()

    def wake_all(self, uids: Iterable[str] | None = None) -> None:
        """Request a step of all workers, or of these."""
        for uid in list(self._workers if uids is None else uids):
            self.wake(uid)

    def _of_name(self, full_name: str) -> PodWorker | None:
        namesakes = self._named.get(full_name, {}).values()
        return next((worker for worker in namesakes if worker.state not in _FINISHED), None)

    def _state_changed(self, worker: PodWorker) -> None:
        is_current = self._workers.get(worker.uid) is worker
        if self._churn is not None and is_current and worker.state is not PodWorkerState.SYNCING:
            self._churn.terminating(worker.uid)
        self._notify(worker.uid)

    def _notify(self, uid: str) -> None:
        for listener in self._listeners:
            listener(uid)

    def _drop_successor(self, uid: str) -> None:
        for name, waiting in list(self._successors.items()):
            if waiting.uid == uid:
                del self._successors[name]
                self._notify(uid)

    def _start(
        self, uid: str, pod: Pod | None, name: str = "", *, ending: KillPodOptions | None = None
    ) -> None:
        assert self._syncer is not None, "not started"
        worker = PodWorker(
            uid,
            self._syncer,
            pod,
            self._resync,
            name,
            ending=ending,
            metrics=self._metrics,
            on_state=self._state_changed,
            on_finished=self._start_successor,
            is_superseded=self.is_reborn,
        )
        self._workers[uid] = worker
        self._changes += 1
        self._named.setdefault(worker.name, {})[uid] = worker
        self._state_changed(worker)
        if pod is not None and ending is None:
            seen = first_seen(pod)
            waited = None if seen is None else max(0.0, self._clock() - seen)
            self._metrics.started(len(pod.spec.containers), waited)
        self._scope.start(self._live(worker), name=f"pod-{uid}")

    def _remove(self, worker: PodWorker) -> None:
        del self._workers[worker.uid]
        self._changes += 1
        if self._churn is not None:
            self._churn.finished(worker.uid)
        namesakes = self._named[worker.name]
        del namesakes[worker.uid]
        if not namesakes:
            del self._named[worker.name]
        self._notify(worker.uid)

    async def _live(self, worker: PodWorker) -> None:
        await worker.run()
        self._remove(worker)
        self._start_successor(worker)

    def _start_successor(self, worker: PodWorker) -> None:
        """Start the pod that waits for the worker's pod, which is finished or gone."""
        # The name of an orphan may be unknown; its uid is not.
        for name, successor in list(self._successors.items()):
            same = worker.uid == successor.uid
            if (worker.name == name and not same) or (same and worker.uid not in self._workers):
                del self._successors[name]
                if same:
                    self._metrics.restarted(static=is_static_pod(successor))
                self.sync(successor)
