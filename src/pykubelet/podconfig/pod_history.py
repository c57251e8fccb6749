"""History of each pod in memory: its events and its timeline.

Equal events (`Pulled`, `Created`, `BackOff` …) are counted, not repeated. The timeline is specific to
pykubelet: each component that handles a pod records its decisions with time and reason, so that the behavior
of a pod can be explained without logs. Both are bounded per pod, dropped with the pod, and lost when the
kubelet stops.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger

log = get_logger(__name__)
EventKind = Literal["Normal", "Warning"]
EVENTS_PER_POD = 50
NOTES_PER_POD = 100


@dataclass(slots=True)
class Event:
    """An event about a pod; `where` is a field such as `spec.containers{main}`."""

    kind: EventKind
    reason: str
    message: str
    where: str
    first: float
    last: float
    count: int = 1
    annotations: dict[str, str] | None = None
    """Annotations of the event object in the API server."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A decision of one component about a pod."""

    time: float
    component: str
    text: str


@dataclass(slots=True)
class _Record:
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_PER_POD))
    notes: deque[TimelineEntry] = field(default_factory=lambda: deque(maxlen=NOTES_PER_POD))


Listener = Callable[[Pod, Event], None]


class PodHistory:
    """Events and timelines by pod UID; listeners are called for every event."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._listeners: list[Listener] = []

    def add_listener(self, listener: Listener) -> None:
        """Add a listener for every event from now on; it must not block."""
        self._listeners.append(listener)

    def event(
        self,
        pod: Pod,
        kind: EventKind,
        reason: str,
        message: str,
        where: str = "",
        *,
        keep: bool = True,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Record an event about a pod.

        With `keep=False` the event only reaches the listeners: for a pod that never gets a worker, whose
        record would never be dropped.
        """
        now = self._clock()
        record = self._records.setdefault(pod.uid, _Record()) if keep else _Record()
        event = next(
            (e for e in record.events if (e.reason, e.message, e.where) == (reason, message, where)), None
        )
        if event is None:
            event = Event(
                kind, reason, message, where, now, now, annotations=dict(annotations) if annotations else None
            )
            record.events.append(event)
        else:
            event.count += 1
            event.last = now
        log.v(2).info(
            "Event occurred",
            pod=pod.full_name,
            podUID=pod.uid,
            type=kind,
            reason=reason,
            message=message,
            field=where,
        )
        for listener in self._listeners:
            listener(pod, event)

    def note(self, uid: str, component: str, text: str, *, at: float | None = None) -> None:
        """Record a decision; an immediate repetition is ignored.

        `at` is the time of something that happened before now, in seconds since the epoch; entries stay in
        the order of their times.
        """
        notes = self._records.setdefault(uid, _Record()).notes
        if at is not None:
            if len(notes) == NOTES_PER_POD:
                notes.popleft()
            later = sum(1 for _ in takewhile(lambda entry: entry.time > at, reversed(notes)))
            notes.insert(len(notes) - later, TimelineEntry(at, component, text))
        elif not notes or (notes[-1].component, notes[-1].text) != (component, text):
            notes.append(TimelineEntry(self._clock(), component, text))

    def events(self, uid: str) -> list[Event]:
        """Return the pod's events, oldest first."""
        record = self._records.get(uid)
        return list(record.events) if record else []

    def timeline(self, uid: str) -> list[TimelineEntry]:
        """Return the pod's timeline, oldest first."""
        record = self._records.get(uid)
        return list(record.notes) if record else []

    def forget(self, uid: str) -> None:
        """Drop the history of a removed pod."""
        self._records.pop(uid, None)


def field_of(pod: Pod, container: str) -> str:
    """Return the field path of a container for its events."""
    for kind, containers in (
        ("containers", pod.spec.containers),
        ("initContainers", pod.spec.init_containers),
        ("ephemeralContainers", pod.spec.ephemeral_containers),
    ):
        if any(c.name == container for c in containers):
            return f"spec.{kind}{{{container}}}"
    return ""
