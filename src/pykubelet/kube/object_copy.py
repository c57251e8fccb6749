"""Objects of the API server as the agent last saw them, and what changed between two looks.

Pure bookkeeping for the reflector. An object that cannot be read keeps its last good form, so that a
field nobody expected does not look like a deletion; `unreadable` tells which and why. An object
without even a name cannot be kept apart from others: then the whole answer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic

import msgspec

from pykubelet.api.meta import ObjectMeta, ObjectStruct
from pykubelet.kube.errors import BadAnswer, KubeError, Status, read_status, status_error
from pykubelet.kube.resources import Metadata, Resource, T, read_object
from pykubelet.kube.watch_stream import WatchEvent

Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Update(Generic[T]):
    """What changed at once; deal with `removed` first: a name may be in both, for two objects."""

    changed: tuple[T, ...]
    """New or changed objects, as they are now."""
    removed: tuple[T, ...]
    """Objects that are gone, in their last known form."""
    listed: bool = False
    """Whether this is after a complete listing: the copy is all there is."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that does not fit its type, as far as it could be read."""

    metadata: ObjectMeta
    why: str


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """What some events came to."""

    update: Update[T]
    version: str
    """The version up to which the copy is now; empty when the events told none."""
    error: KubeError | None = None
    """What the server ended the watch with, or an event that cannot be understood."""


def no_flaw(obj: object) -> str:
    """Find nothing wrong with an object."""
    return ""


class _Envelope(ObjectStruct):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


class ObjectCopy(Generic[T]):
    """The objects by namespace and name."""

    def __init__(self, resource: Resource[T], flaw: Callable[[T], str] = no_flaw) -> None:
        """`flaw` says why an object cannot be used although it fits its type; empty when it can."""
        self._resource = resource
        self._flaw = flaw
        self.objects: dict[Key, T] = {}
        self.unreadable: dict[Key, str] = {}

    def read(self, raw: bytes) -> T | Unreadable:
        """Read an object; raises BadAnswer when not even its name can be read."""
        try:
            obj = read_object(self._resource.struct, raw)
            why = self._flaw(obj) if obj.metadata.name else "it has no name"
            if not why:
                return obj
        except ValueError as err:
            why = str(err)
        try:
            metadata = read_object(_Envelope, raw).metadata
        except ValueError:
            metadata = ObjectMeta()
        if not metadata.name:
            raise BadAnswer(f"a {self._resource.kind} cannot be told apart from others: {why}")
        return Unreadable(metadata, why)

    def replace(self, found: Iterable[T | Unreadable]) -> Update[T]:
        """Take these as all there is; objects of the version that is known do not count as changed."""
        before, self.objects, self.unreadable = self.objects, {}, {}
        for obj in found:
            old = before.get(_key(obj.metadata))
            same = old is not None and obj.metadata.resource_version == old.metadata.resource_version != ""
            self._put(old if same and old is not None else obj, old)
        update = self._compare({**{key: before.get(key) for key in self.objects}, **before}, {})
        return Update(update.changed, update.removed, listed=True)

    def apply(self, events: Iterable[WatchEvent]) -> Applied[T]:
        """Follow some events of a watch, up to an error among them."""
        # What was there before the first of the events, and the last form of what was deleted.
        before: dict[Key, T | None] = {}
        last: dict[Key, T] = {}
        version, error = "", None
        for event in events:
            try:
                version = self._follow(event, before, last) or version
            except KubeError as err:
                error = err
                break
        return Applied(self._compare(before, last), version, error)

    def _follow(self, event: WatchEvent, before: dict[Key, T | None], last: dict[Key, T]) -> str:
        if event.type == "ERROR":
            raise status_error(read_status(event.object) or Status(message="no reason was given"))
        if event.type == "BOOKMARK":
            return self._bookmark(event)
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            return ""
        obj = self.read(event.object)
        key = _key(obj.metadata)
        old = self.objects.get(key)
        before.setdefault(key, old)
        if event.type == "DELETED":
            self.objects.pop(key, None)
            self.unreadable.pop(key, None)
            if not isinstance(obj, Unreadable):
                last[key] = obj
        else:
            self._put(obj, old)
        return obj.metadata.resource_version

    def _put(self, obj: T | Unreadable, old: T | None) -> None:
        key = _key(obj.metadata)
        if not isinstance(obj, Unreadable):
            self.objects[key] = obj
            self.unreadable.pop(key, None)
            return
        self.unreadable[key] = obj.why
        if old is not None and _same(old, obj):
            self.objects[key] = old
        else:
            self.objects.pop(key, None)

    def _bookmark(self, event: WatchEvent) -> str:
        try:
            return read_object(_Envelope, event.object).metadata.resource_version
        except ValueError as err:
            raise BadAnswer(f"a bookmark of {self._resource.plural} cannot be read: {err}") from None

    def _compare(self, before: Mapping[Key, T | None], last: Mapping[Key, T]) -> Update[T]:
        changed, removed = [], []
        for key, old in before.items():
            new = self.objects.get(key)
            if old is not None and (new is None or not _same(old, new)):
                final = last.get(key)
                removed.append(final if final is not None and _same(old, final) else old)
            if new is not None and new is not old:
                changed.append(new)
        return Update(tuple(changed), tuple(removed))


def _key(metadata: Metadata) -> Key:
    return metadata.namespace, metadata.name


def _same(one: T, other: T | Unreadable) -> bool:
    """Whether both are the same object, not two of the same name."""
    uid = other.metadata.uid
    return one.metadata.uid == uid or (isinstance(other, Unreadable) and not uid)
