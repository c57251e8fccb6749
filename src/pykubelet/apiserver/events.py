"""Event recorder: a bounded queue of events, their correlation, and one task that sends them in order.

`record` only appends to the queue; if it is full, the event is dropped and counted. While many pods start
or terminate, Normal events are held back for up to 30 s; they are sent before the next Warning. If the API
server is unreachable, the current event is retried for about two minutes, as upstream does, or without
limit. An event that the server rejects is dropped, and so is, after a few tries, one for which the server
fails with 500: the cause (a webhook of one namespace) must not block all other events. The queue is lost
when the kubelet stops.

`EventCorrelator` limits the events of, for example, a crash-looping pod, as client-go does:

- a repeated event increments the count of the first one instead of creating another;
- events that differ only in their message are combined from the tenth message on, while they are at most
  ten minutes apart;
- per source, object and event type, 25 events are sent in a burst and then one every five minutes.

It does no I/O, gets the time as an argument, and its memory is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec

from pykubelet.api.core import Event, EventSource, ObjectReference
from pykubelet.api.meta import ObjectMeta, to_document
from pykubelet.api.names import dns_subdomain_problem
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import EVENTS, PatchKind, Resource
from pykubelet.apiserver.errors import (
    AlreadyExists,
    ApiError,
    InvalidResponse,
    KubeError,
    NotFound,
    ServerError,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter, delay_with_retry_after
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
MAX_REMEMBERED = 4096
COMBINE_AFTER = 10
COMBINE_SECONDS = 600.0
SPAM_BURST = 25
SPAM_QPS = 1 / 300
COMBINED = "(combined from similar events): "
_NANOS = 1_000_000_000
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def new_event(
    about: ObjectReference,
    source: EventSource,
    kind: str,
    reason: str,
    message: str,
    now_ns: int,
    annotations: Mapping[str, str] | None = None,
) -> Event:
    """Return a new event; `now_ns` is Unix time in nanoseconds."""
    timestamp = _timestamp(now_ns)
    return Event(
        metadata=ObjectMeta(
            name=event_name(about.name, now_ns),
            # Events of cluster-scoped objects, such as the node, belong to the default namespace.
            namespace=about.namespace or "default",
            annotations=dict(annotations or {}),
        ),
        involved_object=about,
        reason=reason,
        message=message,
        source=source,
        first_timestamp=timestamp,
        last_timestamp=timestamp,
        count=1,
        type=kind,
        reporting_component=source.component,
        reporting_instance=source.host,
    )


def event_name(about: str, now_ns: int) -> str:
    """Return the name of an event: object name and time, or a UUID if that is not a valid name."""
    name = f"{about}.{now_ns:x}"
    return name if dns_subdomain_problem(name) is None else str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Write:
    """An event to write: a create, or a patch of its changed fields if it `exists`."""

    event: Event
    exists: bool
    key: Hashable = None

    @property
    def patch(self) -> dict[str, Any]:
        """Patch with count, last timestamp and message."""
        document = to_document(self.event)
        return {name: document[name] for name in ("count", "lastTimestamp", "message")}


class EventCorrelator:
    """Correlation of events: deduplication, aggregation and spam filter."""

    def __init__(self, remembered: int = MAX_REMEMBERED) -> None:
        self._groups: _Recent[Hashable, _Group] = _Recent(remembered)
        self._known: _Recent[Hashable, _Known] = _Recent(remembered)
        self._limits: _Recent[Hashable, TokenBucket] = _Recent(remembered)

    def correlate(self, event: Event, now: float) -> Write | None:
        """Return the write for this event; None if the spam filter suppresses it.

        `now` is in seconds of a monotonic clock. A suppressed event is counted, and its count is part of the
        next write.
        """
        event, key = self._combine(event, now)
        known = self._known.get(key)
        if known is not None:
            event = msgspec.structs.replace(
                event,
                metadata=ObjectMeta(name=known.name, namespace=event.metadata.namespace),
                first_timestamp=known.first,
                count=known.count + 1,
            )
        self._known.put(key, _Known(event.metadata.name, event.first_timestamp, event.count))
        limit = self._limits.get(_object_key(event)) or TokenBucket(SPAM_QPS, SPAM_BURST)
        self._limits.put(_object_key(event), limit)
        return Write(event, known is not None, key) if limit.try_acquire(now) else None

    def written(self, write: Write, response: Event) -> None:
        """Record the name and count of the event from the API server's response."""
        if response.metadata.name and response.count > 0:
            known = _Known(response.metadata.name, response.first_timestamp, response.count)
            self._known.put(write.key, known)

    def _combine(self, event: Event, now: float) -> tuple[Event, Hashable]:
        key = _group_key(event)
        group = self._groups.get(key)
        if group is None or now - group.last > COMBINE_SECONDS:
            group = _Group(set(), now)
        group.last = now
        self._groups.put(key, group)
        digest = _digest(event.message)
        if digest in group.messages or len(group.messages) + 1 < COMBINE_AFTER:
            group.messages.add(digest)
            return event, _event_key(event)
        return msgspec.structs.replace(event, message=COMBINED + event.message), ("combined", key)


@dataclass(slots=True)
class _Group:
    """Events that differ only in their message; the messages are stored as digests."""

    messages: set[bytes]
    last: float


@dataclass(frozen=True, slots=True)
class _Known:
    """A previously recorded event."""

    name: str
    first: datetime | None
    count: int


class _Recent(Generic[K, V]):
    """LRU map."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)


def _object_key(event: Event) -> Hashable:
    about, source = event.involved_object, event.source
    who = (source.component, source.host)
    return (*who, about.kind, about.namespace, about.name, about.uid, about.api_version, event.type)


def _event_key(event: Event) -> Hashable:
    return (_object_key(event), event.involved_object.field_path, event.reason, _digest(event.message))


def _group_key(event: Event) -> Hashable:
    return (_object_key(event), event.reason, event.reporting_component, event.reporting_instance)


def _digest(message: str) -> bytes:
    """Return a short digest of a message, which may be long."""
    return hashlib.blake2b(message.encode(errors="replace"), digest_size=16).digest()


def _timestamp(now_ns: int) -> datetime:
    return datetime.fromtimestamp(now_ns // _NANOS, UTC)


MAX_QUEUED = 2000
TRIES = 12
FAILED_TRIES = 3
"""Tries per event for which the API server responds with 500."""
RETRY_SECONDS = 10.0
HOLD_SECONDS = 30.0
"""Longest time, in seconds, that Normal events are held back during a burst."""
BURST_CHECK_SECONDS = 0.25
"""Seconds between checks whether the burst is over."""
_TRANSIENT = (Unreachable, InvalidResponse, ServerError, TooManyRequests, Unauthorized)
_SECOND = 1_000_000_000


class RecordedEvent(Protocol):
    """An event of the pod history; `where` is a field such as `spec.containers{main}`."""

    @property
    def kind(self) -> str:
        """Normal or Warning."""

    @property
    def reason(self) -> str:
        """Reason in CamelCase."""

    @property
    def message(self) -> str:
        """Message text."""

    @property
    def where(self) -> str:
        """Field path of the pod part that the event is about."""

    @property
    def annotations(self) -> Mapping[str, str] | None:
        """Annotations of the event object, if any."""


class EventStore(Protocol):
    """Writer of events: an ApiClient."""

    async def create(self, resource: Resource[Event], obj: Event, namespace: str = "") -> Event:
        """Create an event."""

    async def patch(
        self,
        resource: Resource[Event],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        kind: PatchKind = PatchKind.STRATEGIC,
    ) -> Event:
        """Patch an event."""

    async def pause(self, seconds: float) -> None:
        """Sleep before a retry, or until the server is reachable again."""


class EventRecorder:
    """Event recorder of one component on one node.

    `tries` is the number of tries per event while the API server is unreachable or overloaded; None means
    unlimited. `clock` returns Unix time in nanoseconds.
    """

    def __init__(
        self,
        store: EventStore,
        host: str,
        *,
        component: str = "kubelet",
        queued: int = MAX_QUEUED,
        tries: int | None = TRIES,
        clock: Callable[[], int] = time.time_ns,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._source = EventSource(component=component, host=host)
        self._queue: asyncio.Queue[tuple[Event, float]] = asyncio.Queue(queued)
        self._urgent = 0
        """Number of queued Warning events and of waiting flushes."""
        self._urgent_added = asyncio.Event()
        self._tries = tries
        self._clock = clock
        self._rng = rng
        self._correlator = EventCorrelator()
        self._last_ns = 0
        self._send_error_log = ErrorLogLimiter(log, "Failed to send an event")
        self._rejection_error_log = ErrorLogLimiter(log, "API server rejected an event")
        self._overflow_error_log = ErrorLogLimiter(log, "Dropped an event, too many are waiting to be sent")
        self.dropped = 0
        """Number of events never sent: queue full, tries exhausted, or rejected by the server."""

    def record(
        self,
        about: ObjectReference,
        kind: str,
        reason: str,
        message: str,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Record an event about an object; never blocks."""
        event = new_event(about, self._source, kind, reason, message, self._now(), annotations)
        try:
            self._queue.put_nowait((event, asyncio.get_running_loop().time()))
        except asyncio.QueueFull as err:
            self.dropped += 1
            self._overflow_error_log.failed(err, asyncio.get_running_loop().time())
            return
        if _is_urgent(event):
            self._urgent += 1
            self._urgent_added.set()

    def pod_event(self, pod: Pod, event: RecordedEvent) -> None:
        """Record an event of the pod history: `history.add_listener(recorder.pod_event)`."""
        about = pod_reference(pod, event.where)
        self.record(about, event.kind, event.reason, event.message, event.annotations)

    async def run(self, in_burst: Callable[[], bool] = lambda: False) -> NoReturn:
        """Send events until cancelled; while `in_burst()` is true, Normal events are held back."""
        while True:
            event, recorded = await self._queue.get()
            try:
                await self._wait_for_quiet(recorded, in_burst)
                self._urgent -= _is_urgent(event)
                # With the time of recording: events queued during an outage did not all happen at its end.
                if (write := self._correlator.correlate(event, recorded)) is not None:
                    await self._deliver(write)
            finally:
                self._queue.task_done()

    async def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until the queue is drained; return whether it is."""
        self._urgent += 1
        self._urgent_added.set()
        try:
            async with asyncio.timeout(seconds):
                await self._queue.join()
        except TimeoutError:
            return False
        finally:
            self._urgent -= 1
        return True

    async def _wait_for_quiet(self, recorded: float, in_burst: Callable[[], bool]) -> None:
        loop, limit = asyncio.get_running_loop(), self._queue.maxsize // 2
        while in_burst() and not self._urgent and self._queue.qsize() < limit:
            left = recorded + HOLD_SECONDS - loop.time()
            if left <= 0:
                return
            self._urgent_added.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds(min(left, BURST_CHECK_SECONDS))):
                    await self._urgent_added.wait()

    async def _deliver(self, write: Write) -> None:
        tries = failed = 0
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._correlator.written(write, await self._send(write))
                self._send_error_log.succeeded(loop.time())
                return
            except _TRANSIENT as err:
                self._send_error_log.failed(err, loop.time())
                tries += 1
                failed += isinstance(err, ServerError) and err.code == 500
                if failed >= FAILED_TRIES or (self._tries is not None and tries >= self._tries):
                    break
                await self._wait(err, tries)
            except AlreadyExists:
                # An earlier try succeeded, but its response was lost.
                return
            except KubeError as err:
                if not _is_ending(err):
                    self._rejection_error_log.failed(err, loop.time())
                break
        self.dropped += 1

    async def _send(self, write: Write) -> Event:
        event = write.event
        if write.exists:
            try:
                return await self._store.patch(
                    EVENTS, event.metadata.name, write.patch, event.metadata.namespace
                )
            except NotFound:
                # The event's TTL (one hour) expired; a new event continues the count.
                pass
        return await self._store.create(EVENTS, event, event.metadata.namespace)

    async def _wait(self, err: KubeError, tries: int) -> None:
        pause = RETRY_SECONDS * (self._rng() if tries == 1 else 1.0)
        await self._store.pause(
            delay_with_retry_after(pause, err.retry_after if isinstance(err, ApiError) else None)
        )

    def _now(self) -> int:
        now = self._clock()
        # The name contains the time, so it must be unique per event; a clock that was set back is followed.
        if now <= self._last_ns < now + _SECOND:
            now = self._last_ns + 1
        self._last_ns = now
        return now


def _is_urgent(event: Event) -> bool:
    return event.type != "Normal"


def pod_reference(pod: Pod, where: str = "") -> ObjectReference:
    """Return a reference to a pod, or to one of its containers (`spec.containers{main}`)."""
    meta = pod.metadata
    return ObjectReference(
        kind="Pod",
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        api_version="v1",
        resource_version=meta.resource_version,
        field_path=where,
    )


def node_reference(name: str, uid: str = "") -> ObjectReference:
    """Return a reference to the node, by default without a UID."""
    return ObjectReference(kind="Node", name=name, uid=uid, api_version="v1")


def _is_ending(err: KubeError) -> bool:
    """Return whether the namespace is terminating and rejects new objects, which is expected."""
    return isinstance(err, ApiError) and err.details.has_cause("NamespaceTerminating")
