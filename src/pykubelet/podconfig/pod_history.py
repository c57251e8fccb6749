"""What happened to each pod, kept where people can ask: its events and its timeline.

Events are what Kubernetes users know (`Pulled`, `Created`, `BackOff`…): equal ones are counted, not
repeated. The timeline is ours: each station of a pod's walk notes its decision with time and
reason, so that a pod that misbehaves can be explained without reading logs. Both are bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger

log = get_logger(__name__)
EventKind = Literal["Normal", "Warning"]
EVENTS_PER_POD = 50
NOTES_PER_POD = 100


@dataclass(slots=True)
class Event:
    """Something that a user should know; `where` is a field such as `spec.containers{main}`."""

    kind: EventKind
    reason: str
    message: str
    where: str
    first: float
    last: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One station's decision."""

    time: float
    station: str
    text: str


@dataclass(slots=True)
class _Record:
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_PER_POD))
    notes: deque[TimelineEntry] = field(default_factory=lambda: deque(maxlen=NOTES_PER_POD))


Listener = Callable[[Pod, Event], None]


class PodHistory:
    """Events and timelines by pod uid; listeners hear of every event."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener` for every event from now on; it must not block."""
        self._listeners.append(listener)

    def event(
        self, pod: Pod, kind: EventKind, reason: str, message: str, where: str = "", *, keep: bool = True
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
            event = Event(kind, reason, message, where, now, now)
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

    def note(self, uid: str, station: str, text: str) -> None:
        """Record a station's decision; the same one again is not worth a line."""
        notes = self._records.setdefault(uid, _Record()).notes
        if not notes or (notes[-1].station, notes[-1].text) != (station, text):
            notes.append(TimelineEntry(self._clock(), station, text))

    def events(self, uid: str) -> list[Event]:
        """The pod's events, oldest first."""
        record = self._records.get(uid)
        return list(record.events) if record else []

    def timeline(self, uid: str) -> list[TimelineEntry]:
        """The pod's timeline, oldest first."""
        record = self._records.get(uid)
        return list(record.notes) if record else []

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone."""
        self._records.pop(uid, None)


def field_of(pod: Pod, container: str) -> str:
    """The field that an event about a container names."""
    for kind, containers in (
        ("containers", pod.spec.containers),
        ("initContainers", pod.spec.init_containers),
        ("ephemeralContainers", pod.spec.ephemeral_containers),
    ):
        if any(c.name == container for c in containers):
            return f"spec.{kind}{{{container}}}"
    return ""
