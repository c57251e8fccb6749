"""Pod worker: one task per pod, with the states syncing → terminating → terminated → removing → gone.

A worker is woken by a new spec, a runtime event, a probe result or a due retry, and runs one step of its
state; wake-ups during a step cause one more step. States only advance. A request to terminate interrupts a
running sync: cancelling is safe, because the next step observes the runtime first. A failed step is retried
with back-off. No failure of a pod ends its worker, and no failure of a worker ends the kubelet.

After the terminated step the pod is finished: its volumes are unmounted and the API server may have deleted
it. Removing what is left of it in the runtime and on disk is retried until it succeeds, and only another pod
with the same uid waits for it. A restarted kubelet finds such remnants during housekeeping.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.podsync.contract import (
    KillPodOptions,
    Outcome,
    PodStatusFunc,
    PodSyncer,
    Remnants,
    SyncError,
)
from pykubelet.podworkers.metrics import WorkerMetrics
from pykubelet.status.compute import TERMINAL
from pykubelet.util.backoff import exponential_delay
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
RETRY_SECONDS = (1.0, 10.0)
"""Back-off delay after a failed step, in seconds: the first and the longest."""
RESYNC_JITTER = 0.5
"""A pod is synced again after the resync period and a random part of it, at most so much of it."""


class PodWorkerState(Enum):
    """State of a pod worker."""

    SYNCING = "syncing"
    TERMINATING = "terminating"
    TERMINATED = "terminated"
    REMOVING = "removing"
    GONE = "gone"


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
