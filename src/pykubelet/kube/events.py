"""Which events reach the API server, and how: told, counted, combined or kept back.

A node can have much to say about one pod that crashes for days. As everywhere in Kubernetes:

- the same event again raises the count of the first instead of making another;
- events that differ only in their message are combined after the tenth within ten minutes;
- about one object, 25 events are sent at once and then one every five minutes.

All of it is bookkeeping on arguments: no clock, no network, and bounded memory whatever happens.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from pykubelet.api.event import Event, EventSource, ObjectReference
from pykubelet.api.meta import ObjectMeta, to_document
from pykubelet.api.names import dns_subdomain_problem
from pykubelet.kube.rate import TokenBucket

REMEMBERED = 4096
COMBINE_AFTER = 10
COMBINE_SECONDS = 600.0
SPAM_BURST = 25
SPAM_QPS = 1 / 300
COMBINED = "(combined from similar events): "

_NANOS = 1_000_000_000
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def new_event(
    about: ObjectReference, source: EventSource, kind: str, reason: str, message: str, now_ns: int
) -> Event:
    """Make an event; `now_ns` is in nanoseconds since 1970."""
    moment = _moment(now_ns)
    return Event(
        metadata=ObjectMeta(
            name=event_name(about.name, now_ns),
            # Events about what has no namespace, such as the node, are kept in the default one.
            namespace=about.namespace or "default",
        ),
        involved_object=about,
        reason=reason,
        message=message,
        source=source,
        first_timestamp=moment,
        last_timestamp=moment,
        count=1,
        type=kind,
        reporting_component=source.component,
        reporting_instance=source.host,
    )


def event_name(about: str, now_ns: int) -> str:
    """Give an event its name: the object's, and the time; a random one where that is no valid name."""
    name = f"{about}.{now_ns:x}"
    return name if dns_subdomain_problem(name) is None else str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Write:
    """An event to be written: created, or when it `exists` already, only what changed of it."""

    event: Event
    exists: bool
    key: Hashable = None

    @property
    def patch(self) -> dict[str, Any]:
        """What changed: how often, when last, and the words."""
        document = to_document(self.event)
        return {name: document[name] for name in ("count", "lastTimestamp", "message")}


class Correlator:
    """Decides what becomes of each event, from those before it."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._groups: _Recent[Hashable, _Group] = _Recent(remembered)
        self._known: _Recent[Hashable, _Known] = _Recent(remembered)
        self._limits: _Recent[Hashable, TokenBucket] = _Recent(remembered)

    def correlate(self, event: Event, now: float) -> Write | None:
        """Give what to write for this event; None when it is kept back.

        `now` is in seconds of a steady clock. An event that is kept back is still counted, and shows
        in the count of the next that is not.
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
        return Write(event, known is not None, key) if limit.take_if_free(now) else None

    def written(self, write: Write, answer: Event) -> None:
        """Learn from the API server's answer how often it has the event now, and by which name."""
        if answer.metadata.name and answer.count > 0:
            known = _Known(answer.metadata.name, answer.first_timestamp, answer.count)
            self._known.put(write.key, known)

    def _combine(self, event: Event, now: float) -> tuple[Event, Hashable]:
        key = _group_key(event)
        group = self._groups.get(key)
        if group is None or now - group.last > COMBINE_SECONDS:
            group = _Group(set(), now)
        group.last = now
        self._groups.put(key, group)
        words = _digest(event.message)
        if words in group.messages or len(group.messages) + 1 < COMBINE_AFTER:
            group.messages.add(words)
            return event, _event_key(event)
        return msgspec.structs.replace(event, message=COMBINED + event.message), ("combined", key)


@dataclass(slots=True)
class _Group:
    """Events that differ only in their message; the messages by digest."""

    messages: set[bytes]
    last: float


@dataclass(frozen=True, slots=True)
class _Known:
    """An event that was seen before."""

    name: str
    first: datetime | None
    count: int


class _Recent(Generic[K, V]):
    """A map that forgets what was not asked for longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
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
    """Stand for a message that may be long."""
    return hashlib.blake2b(message.encode(errors="replace"), digest_size=16).digest()


def _moment(now_ns: int) -> datetime:
    return datetime.fromtimestamp(now_ns // _NANOS, UTC)
