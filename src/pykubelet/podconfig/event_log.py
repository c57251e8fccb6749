"""Recent events of all pods and of the node, for `pykubelet events`.

The log keeps the last MAX_EVENTS different events; a repeated one moves to the end with its new count, so
that a crash loop does not displace other events. Events of removed pods stay until they are displaced.
Readers ask for what came after a cursor and may wait for it. The log is lost when the kubelet stops; a cursor
of a previous kubelet process reads from the start, because each log has an identity of its own.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.podconfig.pod_history import Event, EventKind

MAX_EVENTS = 1000
MAX_MESSAGE_CHARACTERS = 1024
"""Length of a message in the log; the rest is cut off."""


class LoggedEvent(msgspec.Struct, kw_only=True, frozen=True, rename="camel", omit_defaults=True):
    """An event as its log returns it; pod, namespace and uid are empty for an event of the node."""

    sequence: int
    type: str
    reason: str
    message: str
    namespace: str = ""
    pod: str = ""
    uid: str = ""
    field: str = ""
    first: float
    """Seconds since the epoch, like `last`."""
    last: float
    count: int = 1


class EventPage(msgspec.Struct, kw_only=True, rename="camel"):
    """Events after a cursor, oldest first, and the cursor of the next request."""

    events: list[LoggedEvent] = []
    log: str = ""
    """Identity of the log; another one means that the kubelet has restarted."""
    cursor: int = 0


_Key = tuple[str, str, str, str]


class EventLog:
    """Bounded log of events; `pod_event` and `node_event` must be called from the event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._identity = uuid.uuid4().hex
        self._events: OrderedDict[_Key, LoggedEvent] = OrderedDict()
        self._sequence = 0
        self._changed = asyncio.Event()

    def pod_event(self, pod: Pod, event: Event) -> None:
        """Record an event of a pod; a listener of `PodHistory`."""
        self._add(
            event.kind,
            event.reason,
            event.message,
            first=event.first,
            last=event.last,
            count=event.count,
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            uid=pod.uid,
            field=event.where,
        )

    def node_event(self, kind: EventKind, reason: str, message: str) -> None:
        """Record an event of the node."""
        now = self._clock()
        known = self._events.get(("", reason, message[:MAX_MESSAGE_CHARACTERS], ""))
        first, count = (known.first, known.count + 1) if known is not None else (now, 1)
        self._add(kind, reason, message, first=first, last=now, count=count)

    def recording(
        self, record: Callable[[EventKind, str, str], None]
    ) -> Callable[[EventKind, str, str], None]:
        """Return a recorder of node events that keeps them here and passes them to `record`."""

        def both(kind: EventKind, reason: str, message: str) -> None:
            self.node_event(kind, reason, message)
            record(kind, reason, message)

        return both

    def page(self, log: str = "", after: int = 0) -> EventPage:
        """Return the events after a cursor; those of another log are all new."""
        start = after if log == self._identity else 0
        found = [event for event in self._events.values() if event.sequence > start]
        return EventPage(events=found, log=self._identity, cursor=self._sequence)

    async def wait(self, log: str, after: int, seconds: float) -> bool:
        """Wait until there is an event after the cursor, at most some seconds; return whether there is."""
        if log != self._identity or self._sequence > after:
            return True
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _add(
        self,
        kind: str,
        reason: str,
        message: str,
        *,
        first: float,
        last: float,
        count: int,
        namespace: str = "",
        pod: str = "",
        uid: str = "",
        field: str = "",
    ) -> None:
        message = message[:MAX_MESSAGE_CHARACTERS]
        key = (uid, reason, message, field)
        self._sequence += 1
        self._events.pop(key, None)
        self._events[key] = LoggedEvent(
            sequence=self._sequence,
            type=kind,
            reason=reason,
            message=message,
            namespace=namespace,
            pod=pod,
            uid=uid,
            field=field,
            first=first,
            last=last,
            count=count,
        )
        while len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)
        # Each wait has the event of its start, so that none misses a change.
        self._changed.set()
        self._changed = asyncio.Event()
