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
class _PodEntry:
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
        self._entries: dict[str, _PodEntry] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose conditions are set or removed; must not block."""
        self._listeners.append(listener)

    def get(self, uid: str) -> list[PodCondition]:
        """Return a pod's resize conditions."""
        entry = self._entries.get(uid)
        if entry is None:
            return []
        return [condition for condition in (entry.pending, entry.in_progress) if condition is not None]

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
        entry = self._entries.get(uid)
        return entry is not None and entry.in_progress is not None

    def restore(self, pod: Pod) -> None:
        """Restore the conditions that a previous kubelet process reported."""
        for condition in pod.status.conditions:
            if condition.status != "True":
                continue
            if condition.type == PENDING:
                self._entry(pod.uid).pending = condition
            elif condition.type == IN_PROGRESS:
                self._entry(pod.uid).in_progress = condition
        if pod.uid in self._entries:
            self._count(pod.uid)

    def set_pending(self, pod: Pod, reason: str, message: str) -> bool:
        """Set PodResizePending; return whether its reason or its generation is new."""
        entry, reason = self._entry(pod.uid), reason if reason == INFEASIBLE else DEFERRED
        old = entry.pending
        entry.pending = self._condition(PENDING, old, reason, message, pod.metadata.generation)
        self._count(pod.uid)
        return old is None or (old.reason, old.observed_generation) != (
            reason,
            entry.pending.observed_generation,
        )

    def clear_pending(self, uid: str) -> None:
        """Remove PodResizePending."""
        entry = self._entries.get(uid)
        if entry is not None and entry.pending is not None:
            entry.pending = None
            self._remove_if_empty(uid)

    def set_in_progress(self, pod: Pod) -> None:
        """Set PodResizeInProgress for a new resize, replacing that of an earlier one."""
        entry = self._entry(pod.uid)
        entry.in_progress = self._condition(IN_PROGRESS, None, "", "", pod.metadata.generation)
        self._count(pod.uid)

    def ensure_in_progress(self, pod: Pod) -> None:
        """Set PodResizeInProgress unless it is set."""
        if not self.in_progress(pod.uid):
            self.set_in_progress(pod)

    def set_error(self, pod: Pod, reason: str, message: str) -> int | None:
        """Set the error of PodResizeInProgress; return the generation being resized if the error is new."""
        self.ensure_in_progress(pod)
        entry = self._entry(pod.uid)
        old = entry.in_progress
        assert old is not None
        generation = old.observed_generation or 0
        entry.in_progress = self._condition(IN_PROGRESS, old, reason, message, generation)
        return generation if (old.reason, old.message) != (reason, message) else None

    def clear_in_progress(self, uid: str) -> int | None:
        """Remove PodResizeInProgress; return the generation that was resized, None if it was not set."""
        entry = self._entries.get(uid)
        if entry is None or entry.in_progress is None:
            return None
        generation = entry.in_progress.observed_generation or 0
        entry.in_progress = None
        self._remove_if_empty(uid)
        return generation

    def forget(self, uid: str) -> None:
        """Remove a pod that has ended."""
        if self._entries.pop(uid, None) is not None:
            self._count(uid)

    def _pending(self, uid: str) -> PodCondition | None:
        entry = self._entries.get(uid)
        return entry.pending if entry is not None else None

    def _entry(self, uid: str) -> _PodEntry:
        return self._entries.setdefault(uid, _PodEntry())

    def _remove_if_empty(self, uid: str) -> None:
        if not self._entries[uid]:
            del self._entries[uid]
        self._count(uid)

    def _count(self, changed: str) -> None:
        for listener in self._listeners:
            listener(changed)
        entries = list(self._entries.values())
        self._on_count(
            [str(entry.pending.reason) for entry in entries if entry.pending is not None],
            sum(entry.in_progress is not None for entry in entries),
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
