"""Pod conditions of in-place resizes, from the change of the desired spec to its actuation.

`PodResizePending` has the reason why a resize is not being actuated. `PodResizeInProgress` is set while one
is, with the reason if that fails. After a restart both are restored from the pod's status in the API server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition
from pykubelet.resize.feasibility import DEFERRED, IN_PROGRESS, INFEASIBLE, PENDING


@dataclass(slots=True)
class _Shown:
    pending: PodCondition | None = None
    in_progress: PodCondition | None = None

    def __bool__(self) -> bool:
        return self.pending is not None or self.in_progress is not None


class ResizeConditions:
    """Resize conditions of all pods by uid; listeners are notified when one is set or removed."""

    def __init__(
        self,
        on_count: Callable[[list[str], int], None] = lambda pending, in_progress: None,
        clock: Callable[[], datetime] = api_now,
    ) -> None:
        """Initialize; `on_count` gets the reasons of pending resizes and the number of those in progress."""
        self._on_count = on_count
        self._clock = clock
        self._shown: dict[str, _Shown] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose conditions are set or removed; must not block."""
        self._listeners.append(listener)

    def of(self, uid: str) -> list[PodCondition]:
        """Return a pod's resize conditions."""
        shown = self._shown.get(uid)
        if shown is None:
            return []
        return [condition for condition in (shown.pending, shown.in_progress) if condition is not None]

    def is_deferred(self, uid: str) -> bool:
        """Return whether a pod's resize is Deferred."""
        pending = self._pending(uid)
        return pending is not None and pending.reason == DEFERRED

    def waiting_since(self, uid: str) -> datetime | None:
        """Return the time since which a pod's resize is pending, or None."""
        pending = self._pending(uid)
        return pending.last_transition_time if pending is not None else None

    def in_progress(self, uid: str) -> bool:
        """Return whether a pod's resize is in progress."""
        shown = self._shown.get(uid)
        return shown is not None and shown.in_progress is not None

    def take_over(self, pod: Pod) -> None:
        """Restore the conditions that a previous kubelet process reported."""
        for condition in pod.status.conditions:
            if condition.status != "True":
                continue
            if condition.type == PENDING:
                self._of(pod.uid).pending = condition
            elif condition.type == IN_PROGRESS:
                self._of(pod.uid).in_progress = condition
        if pod.uid in self._shown:
            self._count(pod.uid)

    def wait(self, pod: Pod, reason: str, message: str) -> bool:
        """Set PodResizePending; return whether its reason or its generation is new."""
        shown, reason = self._of(pod.uid), reason if reason == INFEASIBLE else DEFERRED
        old = shown.pending
        shown.pending = self._condition(PENDING, old, reason, message, pod.metadata.generation)
        self._count(pod.uid)
        return old is None or (old.reason, old.observed_generation) != (
            reason,
            shown.pending.observed_generation,
        )

    def wait_no_more(self, uid: str) -> None:
        """Remove PodResizePending."""
        shown = self._shown.get(uid)
        if shown is not None and shown.pending is not None:
            shown.pending = None
            self._settle(uid)

    def begin(self, pod: Pod) -> None:
        """Set PodResizeInProgress for a new resize, replacing that of an earlier one."""
        shown = self._of(pod.uid)
        shown.in_progress = self._condition(IN_PROGRESS, None, "", "", pod.metadata.generation)
        self._count(pod.uid)

    def go_on(self, pod: Pod) -> None:
        """Set PodResizeInProgress unless it is set."""
        if not self.in_progress(pod.uid):
            self.begin(pod)

    def fail(self, pod: Pod, reason: str, message: str) -> int | None:
        """Set the error of PodResizeInProgress; return the generation being resized if the error is new."""
        self.go_on(pod)
        shown = self._of(pod.uid)
        old = shown.in_progress
        assert old is not None
        generation = old.observed_generation or 0
        shown.in_progress = self._condition(IN_PROGRESS, old, reason, message, generation)
        return generation if (old.reason, old.message) != (reason, message) else None

    def end(self, uid: str) -> int | None:
        """Remove PodResizeInProgress; return the generation that was resized, None if it was not set."""
        shown = self._shown.get(uid)
        if shown is None or shown.in_progress is None:
            return None
        generation = shown.in_progress.observed_generation or 0
        shown.in_progress = None
        self._settle(uid)
        return generation

    def forget(self, uid: str) -> None:
        """Remove a pod that has ended."""
        if self._shown.pop(uid, None) is not None:
            self._count(uid)

    def _pending(self, uid: str) -> PodCondition | None:
        shown = self._shown.get(uid)
        return shown.pending if shown is not None else None

    def _of(self, uid: str) -> _Shown:
        return self._shown.setdefault(uid, _Shown())

    def _settle(self, uid: str) -> None:
        if not self._shown[uid]:
            del self._shown[uid]
        self._count(uid)

    def _count(self, changed: str) -> None:
        for listener in self._listeners:
            listener(changed)
        shown = list(self._shown.values())
        self._on_count(
            [str(one.pending.reason) for one in shown if one.pending is not None],
            sum(one.in_progress is not None for one in shown),
        )

    def _condition(
        self, kind: str, old: PodCondition | None, reason: str, message: str, generation: int
    ) -> PodCondition:
        now = self._clock()
        same = old is not None and (old.reason or "") == reason
        if (
            same
            and old is not None
            and (old.message or "", old.observed_generation or 0)
            == (
                message,
                generation,
            )
        ):
            return old
        return PodCondition(
            type=kind,
            status="True",
            observed_generation=generation or msgspec.UNSET,
            last_probe_time=now,
            last_transition_time=old.last_transition_time if same and old is not None else now,
            reason=reason or msgspec.UNSET,
            message=message or msgspec.UNSET,
        )
