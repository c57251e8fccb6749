"""Events of the API: something that happened to an object, counted when it happens again."""

from __future__ import annotations

from datetime import datetime

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct


class ObjectReference(ObjectStruct):
    """The object that an event is about; `field_path` is a part of it, `spec.containers{main}`."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    api_version: str = ""
    resource_version: str = ""
    field_path: str = ""


class EventSource(ObjectStruct):
    """Who says it."""

    component: str = ""
    host: str = ""


class Event(ObjectStruct, omit_defaults=False):
    """An event; the API server wants to see the empty fields too."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    involved_object: ObjectReference = field(default_factory=ObjectReference)
    reason: str = ""
    message: str = ""
    source: EventSource = field(default_factory=EventSource)
    first_timestamp: datetime | None = None
    last_timestamp: datetime | None = None
    count: int = 0
    type: str = ""
    event_time: datetime | None = None
    reporting_component: str = ""
    reporting_instance: str = ""
