"""Pod workers: one per pod; a static pod waits for its predecessor with the same name.

An edited static pod is a new pod (its uid is a hash of its content) with the same name. Two pods of one name
must never run concurrently, so the new one's worker starts when the old one is finished; after several edits
only the latest pod counts. A pod of the API server starts immediately, because its predecessor was deleted by
force in order not to wait.

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
import time
from collections.abc import Callable, Iterable

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.contract import KillPodOptions, PodStatusFunc, PodSyncer
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podworkers.metrics import WorkerMetrics
from pykubelet.podworkers.startup_latency import first_seen
from pykubelet.podworkers.worker import PodWorker, PodWorkerState
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_FINISHED = (PodWorkerState.REMOVING, PodWorkerState.GONE)
MANY = 4
"""Number of concurrently terminating pods above which they count as a burst."""
CALM_SECONDS = 1.5
"""Seconds after the last start until a burst is over."""
TERMINATING_SECONDS = 10.0
"""Seconds after which a terminating pod no longer counts: it waits for something else than the host."""


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
