"""Reflector: a local copy of API objects, kept up to date by list and watch, or by a streaming list.

    reflector = Reflector(client, PODS, on_update, field_selector="spec.nodeName=one")
    scope.start(reflector.run(), name="pods of this node")

The store always is a state that the server was in, or on the way to one: a list is applied completely or
not at all, and a watch continues from the last observed resource version. If the server no longer knows
that version, the objects are relisted and the differences are delivered as if they had been watched. Only
cancellation ends a reflector: unreachable servers, timeouts and invalid responses are retried with
exponential back-off.

With the feature gate WatchListClient the objects come as the first events of the watch, up to a bookmark with
the annotation `k8s.io/initial-events-end` (`InitialEvents`), so that neither side holds a complete list as
one document. Nothing is delivered before that bookmark. If the server refuses it, does not know it or breaks
its rules, or a proxy delays or interrupts it, an ordinary list is requested instead. An API server with an
etcd before 3.4.31 or 3.5.13 refuses it; then all reflectors list for some minutes before one tries again, and
also after a server has not completed it in time.

`Store` is pure state without I/O. An object that cannot be decoded keeps its last valid form, so that an
unexpected field does not look like a deletion; `unreadable` holds these objects and the reasons. An object
without a readable name cannot be identified: then the whole response is rejected.

`WatchStream` splits the bytes of a watch, one JSON document per line, into events. It buffers at most one
incomplete line of bounded length and decodes only the envelope; the object stays raw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol

import msgspec

from pykubelet.api.meta import ObjectMeta, ObjectStruct, plan_reading
from pykubelet.apiserver.client import (
    MAX_RESPONSE_BYTES,
    Metadata,
    Params,
    RawPage,
    Resource,
    T,
    read_object,
)
from pykubelet.apiserver.errors import (
    ApiError,
    Forbidden,
    Gone,
    InvalidResponse,
    KubeError,
    NotFound,
    Status,
    Superseded,
    TimedOut,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    read_status,
    status_error,
)
from pykubelet.logs import get_logger
from pykubelet.util.backoff import Backoff, ErrorLogLimiter, delay_with_retry_after

log = get_logger(__name__)
MAX_LINE_BYTES = 8 * 1024 * 1024


class WatchEvent(msgspec.Struct):
    """Watch event: type (ADDED, MODIFIED, DELETED, BOOKMARK, ERROR) and the raw object."""

    type: str
    object: msgspec.Raw


class WatchStream:
    """Incremental decoder of a watch: `feed` received bytes, and `finish` at the end of the stream."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[WatchEvent]:
        """Return the events that this chunk completes. Raises InvalidResponse on an invalid line."""
        searched = len(self._buffer)
        self._buffer += chunk
        end = self._buffer.rfind(b"\n", searched)
        if end < 0:
            self._check(len(self._buffer))
            return []
        complete = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._check(len(self._buffer))
        return [self._read(line) for line in complete.split(b"\n") if line.strip()]

    def finish(self) -> bool:
        """Return whether the stream ended after a complete line. An incomplete line is dropped."""
        clean = not self._buffer.strip()
        self._buffer.clear()
        return clean

    def _read(self, line: bytes) -> WatchEvent:
        self._check(len(line))
        try:
            return msgspec.json.decode(line, type=WatchEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise InvalidResponse(f"a line of a watch is not an event: {err}") from None

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise InvalidResponse(f"an event of a watch is longer than {self._limit // 1024} KiB")


Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class StoreDelta(Generic[T]):
    """Changes of one batch; handle `removed` first: a name may be in both, for two objects."""

    changed: tuple[T, ...]
    """New or changed objects, in their current form."""
    removed: tuple[T, ...]
    """Removed objects, in their last known form."""
    listed: bool = False
    """Whether the batch results from a complete list."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that could not be decoded or was rejected by `flaw`, with its metadata."""

    metadata: ObjectMeta
    why: str


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """Result of applying a batch of watch events."""

    update: StoreDelta[T]
    version: str
    """Resource version that the store has reached; empty if the events contained none."""
    error: KubeError | None = None
    """Error event of the server, or an event that could not be decoded."""


def no_flaw(obj: object) -> str:
    """Accept every object: the default for `flaw`."""
    return ""


class _Envelope(ObjectStruct):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


class Store(Generic[T]):
    """Objects by namespace and name."""

    def __init__(self, resource: Resource[T], flaw: Callable[[T], str] = no_flaw) -> None:
        """Initialize; `flaw` returns why a decoded object is unusable, or an empty string."""
        self._resource = resource
        self._flaw = flaw
        self.objects: dict[Key, T] = {}
        self.unreadable: dict[Key, str] = {}

    def read(self, raw: bytes) -> T | Unreadable:
        """Decode an object. Raises InvalidResponse if its name is not readable."""
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
            raise InvalidResponse(f"a {self._resource.kind} cannot be told apart from others: {why}")
        return Unreadable(metadata, why)

    def replace(self, found: Iterable[T | Unreadable]) -> StoreDelta[T]:
        """Replace all objects; those with an unchanged resource version do not count as changed."""
        before, self.objects, self.unreadable = self.objects, {}, {}
        for obj in found:
            old = before.get(_key(obj.metadata))
            same = old is not None and obj.metadata.resource_version == old.metadata.resource_version != ""
            self._put(old if same and old is not None else obj, old)
        update = self._compare({**{key: before.get(key) for key in self.objects}, **before}, {})
        return StoreDelta(update.changed, update.removed, listed=True)

    def apply(self, events: Iterable[WatchEvent]) -> Applied[T]:
        """Apply watch events up to the first error."""
        # The objects before the first event, and the last form of deleted objects.
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
        return self.read_metadata(event.object).resource_version

    def read_metadata(self, raw: bytes) -> ObjectMeta:
        """Decode the metadata of a bookmark. Raises InvalidResponse."""
        try:
            return read_object(_Envelope, raw).metadata
        except ValueError as err:
            raise InvalidResponse(f"a bookmark of {self._resource.plural} cannot be read: {err}") from None

    def _compare(self, before: Mapping[Key, T | None], last: Mapping[Key, T]) -> StoreDelta[T]:
        changed, removed = [], []
        for key, old in before.items():
            new = self.objects.get(key)
            if old is not None and (new is None or not _same(old, new)):
                final = last.get(key)
                removed.append(final if final is not None and _same(old, final) else old)
            if new is not None and new is not old:
                changed.append(new)
        return StoreDelta(tuple(changed), tuple(removed))


def _key(metadata: Metadata) -> Key:
    return metadata.namespace, metadata.name


def _same(old: T, other: T | Unreadable) -> bool:
    """Return whether both have the same UID, not only the same name."""
    uid = other.metadata.uid
    return old.metadata.uid == uid or (isinstance(other, Unreadable) and not uid)


INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""Annotation of the bookmark that ends the initial events of a streaming list."""
MAX_INITIAL_BYTES = MAX_RESPONSE_BYTES
"""Bytes of all initial events together, as of a list."""
INITIAL_SILENCE_SECONDS = 30.0
"""Seconds without data before the end of the initial events, after which the server is taken not to know
streaming lists: it serves an ordinary watch and never sends the bookmark."""
INITIAL_SECONDS = 120.0
"""Seconds until the initial events must have ended, however slowly they arrive."""


class InitialEvents(Generic[T]):
    """Initial events of a streaming list, collected until the bookmark that ends them."""

    def __init__(self, store: Store[T], max_bytes: int = MAX_INITIAL_BYTES) -> None:
        self._store = store
        self._left = max_bytes
        self._found: dict[Key, T | Unreadable] = {}
        self.version = ""
        """Resource version of the list, once it is complete."""
        self.has_response = False
        """Whether the server has accepted the watch."""

    def take(self) -> Iterable[T | Unreadable]:
        """Return the listed objects and release them: the watch that follows lasts for minutes."""
        found, self._found = self._found, {}
        return found.values()

    def add(self, events: Sequence[WatchEvent]) -> Sequence[WatchEvent] | None:
        """Add events; return those after the end of the list, None while it is not complete.

        Raises KubeError for an error event, an invalid one, and for too many bytes.
        """
        for index, event in enumerate(events):
            self._left -= memoryview(event.object).nbytes
            if self._left < 0:
                raise InvalidResponse("the initial events of a watch are larger than a list may be")
            if event.type == "ERROR":
                raise status_error(read_status(event.object) or Status(message="no reason was given"))
            if event.type == "BOOKMARK":
                metadata = self._store.read_metadata(event.object)
                if metadata.annotations.get(INITIAL_EVENTS_END) == "true":
                    if not metadata.resource_version:
                        raise InvalidResponse("the bookmark that ends a list has no resourceVersion")
                    self.version = metadata.resource_version
                    return events[index + 1 :]
            elif event.type in ("ADDED", "MODIFIED", "DELETED"):
                obj = self._store.read(event.object)
                if event.type == "DELETED":
                    self._found.pop(_key(obj.metadata), None)
                else:
                    self._found[_key(obj.metadata)] = obj
        return None


PAGE = 500
WATCH_SECONDS = (300, 600)
"""Bounds, in seconds, of the random watch timeout, so that not all watches end simultaneously."""
GRACE_SECONDS = 30.0
"""Seconds after its timeout at which an open watch is considered dead."""
BOOKMARKS = 2
SILENT_SECONDS = 180.0
"""Seconds without data after which a watch is considered dead, once it has had two bookmarks: API servers
send one per minute, and a hung server keeps its connections open."""
_SHORT_SECONDS = 1.0


class ListerWatcher(Protocol):
    """Source of objects: an ApiClient."""

    @property
    def streams_lists(self) -> bool:
        """Whether to try a streaming list before an ordinary one."""

    def disable_streaming(self) -> None:
        """Use no streaming lists for some time, because the server has refused one."""

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects without decoding the items."""

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""

    async def pause(self, seconds: float) -> None:
        """Sleep before a retry, or until the server is reachable again."""


class Reflector(Generic[T]):
    """Reflector of the objects that the selectors match, of one namespace or of all.

    An object for which `flaw` returns a reason is treated as unreadable. `on_update` is awaited after each
    change of `objects`: after every list, and after each batch of events that arrived together. No further
    events are read until it returns.
    """

    def __init__(
        self,
        source: ListerWatcher,
        resource: Resource[T],
        on_update: Callable[[StoreDelta[T]], Awaitable[None]],
        *,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
        flaw: Callable[[T], str] = no_flaw,
        backoff: Backoff | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._resource = resource
        self._on_update = on_update
        self._namespace = namespace
        selectors = {"fieldSelector": field_selector, "labelSelector": label_selector}
        self._selectors = [(name, text) for name, text in selectors.items() if text]
        self._rng = rng
        self._store = Store(resource, flaw)
        self._version = ""
        self._version_lost = False
        self._must_list = True
        self._synced = asyncio.Event()
        self._backoff = backoff or Backoff(rng=rng)
        which = {"namespace": namespace, "selector": field_selector or label_selector}
        self._error_log = ErrorLogLimiter(
            log,
            "Failed to list or watch",
            resource=resource.plural,
            **{name: text for name, text in which.items() if text},
        )
        self._logged_unreadable: dict[Key, str] = {}

    @property
    def objects(self) -> Mapping[Key, T]:
        """All objects by namespace and name, as last observed."""
        return self._store.objects

    @property
    def unreadable(self) -> Mapping[Key, str]:
        """Unreadable objects with their reasons: missing from `objects`, or outdated there."""
        return self._store.unreadable

    @property
    def has_synced(self) -> bool:
        """Whether a complete list was received since the start."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait for the first complete list."""
        await self._synced.wait()

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        # Built before the first pod waits for it: the decoder of a pod takes 10 ms.
        plan_reading(self._resource.struct)
        while True:
            try:
                if not self._must_list:
                    await self._watch()
                elif not (self._source.streams_lists and await self._stream_list()):
                    await self._list()
                    self._must_list = False
            except Superseded:
                continue
            except KubeError as err:
                await self._recover(err)

    async def _recover(self, err: KubeError) -> None:
        """Decide whether to relist, and sleep for the back-off delay."""
        # A server that was unreachable or overloaded still knows the last observed resource version.
        if not isinstance(err, Unreachable | TooManyRequests):
            self._must_list = True
        now = asyncio.get_running_loop().time()
        if isinstance(err, Gone):
            log.v(2).info("Resource version is too old, relisting", resource=self._resource.plural, err=err)
        else:
            self._error_log.failed(err, now)
        pause = self._backoff.next(now, isinstance(err, Unreachable))
        if isinstance(err, ApiError) and not isinstance(err, Unauthorized):
            await asyncio.sleep(delay_with_retry_after(pause, err.retry_after))
        else:
            await self._source.pause(pause)

    async def _list(self) -> None:
        try:
            found, version = await self._pages("" if self._version_lost else self._version or "0", PAGE)
        except ApiError as err:
            if not _is_version_unknown(err):
                raise
            # The latest state in a single page: neither its version nor a continue token can expire.
            self._version_lost = True
            found, version = await self._pages("", 0)
        await self._listed(found, version)

    async def _listed(self, found: Iterable[T | Unreadable], version: str) -> None:
        """Replace the objects with a complete list."""
        self._version, self._version_lost = version, False
        update = self._store.replace(found)
        self._synced.set()
        self._succeeded()
        await self._on_update(update)

    async def _pages(self, version: str, limit: int) -> tuple[list[T | Unreadable], str]:
        params = list(self._selectors)
        if version:
            params.append(("resourceVersion", version))
        # With a version, only a list without limit is served from the server's watch cache.
        if limit and version in ("", "0"):
            params.append(("limit", str(limit)))
        page = await self._source.list_page(self._resource, self._namespace, params)
        found = [self._store.read(raw) for raw in page.items]
        while page.continues:
            more = [*self._selectors, ("limit", str(limit)), ("continue", page.continues)]
            page = await self._source.list_page(self._resource, self._namespace, more)
            found += [self._store.read(raw) for raw in page.items]
        if not page.resource_version:
            raise InvalidResponse(f"the list of {self._resource.plural} has no resourceVersion")
        return found, page.resource_version

    async def _stream_list(self) -> bool:
        """List by a watch, and go on watching until the server closes it regularly.

        Return False if an ordinary list is needed: the server has refused, or has not completed the list.
        Raises KubeError, also if the watch ends otherwise after a complete list.
        """
        initial = InitialEvents(self._store)
        try:
            await self._watch(initial)
        except (Superseded, TooManyRequests, Unauthorized):
            raise
        except KubeError as err:
            if initial.version:
                raise
            if isinstance(err, TimedOut):
                # Also a proxy that holds back a response until it is complete: a watch never is.
                self._source.disable_streaming()
            elif isinstance(err, Unreachable):
                if not initial.has_response:
                    raise
                # The server is reachable; what interrupts a stream may let a list pass.
            elif isinstance(err, ApiError) and _is_version_unknown(err):
                self._version_lost = True
            elif isinstance(err, ApiError) and not isinstance(err, Forbidden | NotFound):
                self._source.disable_streaming()
            log.v(4).info("Failed to stream the list, listing", resource=self._resource.plural, err=err)
        return bool(initial.version)

    async def _watch(self, initial: InitialEvents[T] | None = None) -> None:
        """Watch until the server closes it regularly. Raises KubeError if it ends otherwise.

        With `initial`, the objects are listed first.
        """
        shortest, longest = WATCH_SECONDS
        seconds = int(shortest + (longest - shortest) * self._rng())
        params = [*self._selectors, ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(seconds))]
        if initial is not None:
            params += [("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")]
        if version := "" if initial is not None and self._version_lost else self._version:
            params.append(("resourceVersion", version))
        loop = asyncio.get_running_loop()
        started_at, silent = loop.time(), True
        stream = WatchStream()
        async with self._source.watch(
            self._resource, self._namespace, params, seconds=seconds + GRACE_SECONDS
        ) as chunks:
            bookmarks = 0
            if initial is None:
                self._succeeded()
            else:
                initial.has_response = True
            while chunk := await self._next(
                chunks,
                self._silence(initial, bookmarks, started_at),
                is_list=initial is not None and not initial.version,
            ):
                events: Sequence[WatchEvent] = stream.feed(chunk)
                if initial is not None and not initial.version:
                    if (rest := initial.add(events)) is None:
                        continue
                    await self._listed(initial.take(), initial.version)
                    self._must_list, silent, events = False, False, rest
                if events:
                    silent = False
                    bookmarks += sum(event.type == "BOOKMARK" for event in events)
                    applied = self._store.apply(events)
                    self._version = applied.version or self._version
                    if applied.update.changed or applied.update.removed:
                        await self._on_update(applied.update)
                    self._log_unreadable()
                    if applied.error is not None:
                        raise applied.error
        if not stream.finish():
            raise InvalidResponse(f"the watch of {self._resource.plural} ended in the middle of an event")
        if initial is not None and not initial.version:
            raise InvalidResponse(f"the watch of {self._resource.plural} ended before the list was complete")
        if silent and loop.time() - started_at < _SHORT_SECONDS:
            raise InvalidResponse(f"the watch of {self._resource.plural} ended as soon as it began")

    def _silence(self, initial: InitialEvents[T] | None, bookmarks: int, started_at: float) -> float | None:
        """Return the seconds without data after which a watch is considered dead; None for no limit."""
        if initial is not None and not initial.version:
            left = started_at + INITIAL_SECONDS - asyncio.get_running_loop().time()
            return max(0.0, min(INITIAL_SILENCE_SECONDS, left))
        return SILENT_SECONDS if bookmarks >= BOOKMARKS else None

    async def _next(self, chunks: AsyncIterator[bytes], timeout: float | None, *, is_list: bool) -> bytes:
        """Return the next chunk; empty at the end of the stream or if the watch went silent."""
        try:
            async with asyncio.timeout(timeout):
                return await anext(chunks, b"")
        except TimeoutError:
            if is_list:
                self._source.disable_streaming()
            log.info("Watch went silent, restarting it", resource=self._resource.plural)
            return b""

    def _succeeded(self) -> None:
        self._error_log.succeeded(asyncio.get_running_loop().time())
        self._log_unreadable()

    def _log_unreadable(self) -> None:
        if self._store.unreadable != self._logged_unreadable:
            for (namespace, name), why in self._store.unreadable.items():
                if self._logged_unreadable.get((namespace, name)) != why:
                    log.error(
                        why,
                        "Failed to read object",
                        kind=self._resource.kind,
                        object=f"{namespace}/{name}",
                    )
            self._logged_unreadable = dict(self._store.unreadable)


def _is_version_unknown(err: ApiError) -> bool:
    """Return whether the server no longer has the resource version, or has not reached it yet."""
    return isinstance(err, Gone) or err.details.has_cause("ResourceVersionTooLarge")
