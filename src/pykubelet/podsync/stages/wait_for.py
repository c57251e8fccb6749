"""Stage that delays the start of a pod until the pods that it waits for are ready (standalone nodes).

A pod whose sandbox exists has started before and does not wait again; after a reboot it does. Statuses of
other pods wake the waiting ones; a slow check covers what has no status, such as a manifest that appears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.podconfig.pod_history import EventKind, PodHistory
from pykubelet.podconfig.wait_for import WAIT_FOR_ANNOTATION, WAITING, JobOutcome, Wait, find_wait
from pykubelet.podsync.contract import StartDelayed
from pykubelet.podsync.stages.base import PodStart, Stage

CHECK_SECONDS = 5.0
"""Seconds between two checks of a waiting pod."""


class WaitForStage(Stage):
    """Pods that a pod waits for."""

    name = "wait-for"

    def __init__(
        self,
        pods: Callable[[], Sequence[Pod]],
        status_of: Callable[[str], PodStatus | None],
        job_outcome: Callable[[str, str], JobOutcome | None],
        wake: Callable[[str], None],
        history: PodHistory,
    ) -> None:
        """Initialize; `job_outcome` returns None for an unknown Job.

        `wake` starts the next sync of a pod.
        """
        self._pods = pods
        self._status_of = status_of
        self._job_outcome = job_outcome
        self._wake = wake
        self._history = history
        self._started: set[str] = set()
        self._waiting: dict[str, Wait] = {}

    def handle_status(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Handle a new status of any pod; must not block."""
        for uid in tuple(self._waiting):
            if uid != pod.uid:
                self._wake(uid)

    async def prepare(self, start: PodStart) -> None:
        """Return when the pod may start. Raises StartDelayed."""
        pod = start.pod
        if WAIT_FOR_ANNOTATION not in pod.metadata.annotations or pod.uid in self._started:
            return
        has_sandbox = any(sandbox.ready for sandbox in start.observed.sandboxes)
        wait = None
        if not has_sandbox:
            wait = find_wait(pod, self._pods(), self._is_ready, self._job_outcome)
        if wait is None:
            self._started.add(pod.uid)
            if self._waiting.pop(pod.uid, None) is not None:
                self._history.note(pod.uid, self.name, "all pods that it waits for are ready")
            return
        if self._waiting.get(pod.uid) != wait:
            self._waiting[pod.uid] = wait
            kind: EventKind = "Normal" if wait.reason == WAITING else "Warning"
            self._history.event(pod, kind, wait.reason, wait.message)
        raise StartDelayed(wait.reason, wait.message, CHECK_SECONDS)

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Do nothing: a waiting pod has nothing."""
        self._waiting.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Drop the state of a pod."""
        self._started.discard(uid)
        self._waiting.pop(uid, None)

    def _is_ready(self, pod: Pod) -> bool:
        status = self._status_of(pod.uid) or pod.status
        return status.phase == "Succeeded" or any(
            condition.type == "Ready" and condition.status == "True" for condition in status.conditions
        )
