"""A copy of some objects of the API server, kept up to date: list once, then watch.

The copy is always a state that the server was in, or on its way to one: a list is taken as a whole or
not at all, a watch continues from the last version that was seen, and when the server no longer knows
that version the list is taken anew, with the differences told as if they had been watched. Nothing
ends it but cancellation: an API server that is away, slow, silent or talks nonsense is asked again
after growing pauses.

    reflector = Reflector(client, PODS, on_update, field_selector="spec.nodeName=one")
    scope.start(reflector.run(), name="pods of this node")
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NoReturn, Protocol

from pykubelet.api.meta import plan_reading
from pykubelet.kube.calls import Params
from pykubelet.kube.client import RawPage
from pykubelet.kube.errors import (
    ApiError,
    BadAnswer,
    Gone,
    KubeError,
    Superseded,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from pykubelet.kube.object_copy import Key, ObjectCopy, Unreadable, Update, no_flaw
from pykubelet.kube.resources import Resource, T
from pykubelet.kube.retrying import Complaints, Pauses, put_off
from pykubelet.kube.watch_stream import WatchStream
from pykubelet.logs import get_logger

log = get_logger(__name__)

PAGE = 500
WATCH_SECONDS = (300, 600)
"""A watch is asked to last a random time between these, so that not all end at once."""
GRACE_SECONDS = 30.0
"""A watch that outlives its time by so much is dead."""
BOOKMARKS = 2
SILENT_SECONDS = 180.0
"""API servers send a bookmark each minute. From a watch that had two of them, none for so long means that
nobody is there any more: a server that hangs keeps its connections."""
_SHORT_SECONDS = 1.0


class Source(Protocol):
    """Where objects come from: an ApiClient."""

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects as the server wrote them."""

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""


class Reflector(Generic[T]):
    """Mirrors the objects that the selectors choose, of one namespace or of all.

    An object in which `flaw` finds something counts as one that cannot be read.
    `on_update` is awaited after each change of `objects`: after every listing, and after each batch
    of events that arrived together. While it takes its time, nothing more is read.
    """

    def __init__(
        self,
        source: Source,
        resource: Resource[T],
        on_update: Callable[[Update[T]], Awaitable[None]],
        *,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
        flaw: Callable[[T], str] = no_flaw,
        pauses: Pauses | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._resource = resource
        self._on_update = on_update
        self._namespace = namespace
        selectors = {"fieldSelector": field_selector, "labelSelector": label_selector}
        self._selectors = [(name, text) for name, text in selectors.items() if text]
        self._chance = chance
        self._copy = ObjectCopy(resource, flaw)
        self._version = ""
        self._version_lost = False
        self._must_list = True
        self._synced = asyncio.Event()
        self._pauses = pauses or Pauses(chance=chance)
        which = {"namespace": namespace, "selector": field_selector or label_selector}
        self._complaints = Complaints(
            log,
            "Failed to list or watch",
            resource=resource.plural,
            **{name: text for name, text in which.items() if text},
        )
        self._told_unreadable: dict[Key, str] = {}

    @property
    def objects(self) -> Mapping[Key, T]:
        """All objects by namespace and name, as last seen."""
        return self._copy.objects

    @property
    def unreadable(self) -> Mapping[Key, str]:
        """Objects that could not be read, and why: they are missing from `objects`, or outdated there."""
        return self._copy.unreadable

    @property
    def has_synced(self) -> bool:
        """Whether a complete listing was had since the start."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait for the first complete listing."""
        await self._synced.wait()

    async def run(self) -> NoReturn:
        """Mirror until cancelled."""
        # Now, and not when the first pod waits for it: a pod's takes a hundredth of a second.
        plan_reading(self._resource.struct)
        while True:
            try:
                if self._must_list:
                    await self._list()
                    self._must_list = False
                await self._watch()
            except Superseded:
                continue
            except KubeError as err:
                await self._recover(err)

    async def _recover(self, err: KubeError) -> None:
        """Decide how to go on, and wait a little."""
        # Whoever could not be reached, or has too much to do, still knows the version we have seen.
        if not isinstance(err, Unreachable | TooManyRequests):
            self._must_list = True
        now = asyncio.get_running_loop().time()
        if isinstance(err, Gone):
            log.v(2).info("The version is too old, listing anew", resource=self._resource.plural, err=err)
        else:
            self._complaints.failed(err, now)
        pause = self._pauses.next(now, isinstance(err, Unreachable))
        if isinstance(err, ApiError) and not isinstance(err, Unauthorized):
            await asyncio.sleep(put_off(pause, err.retry_after))
        else:
            await self._source.pause(pause)

    async def _list(self) -> None:
        try:
            found, version = await self._pages("" if self._version_lost else self._version or "0", PAGE)
        except ApiError as err:
            if not _is_version_unknown(err):
                raise
            # The newest there is, in one piece: neither its version nor its pages can be too old.
            self._version_lost = True
            found, version = await self._pages("", 0)
        self._version, self._version_lost = version, False
        update = self._copy.replace(found)
        self._synced.set()
        self._succeeded()
        await self._on_update(update)

    async def _pages(self, version: str, limit: int) -> tuple[list[T | Unreadable], str]:
        params = list(self._selectors)
        if version:
            params.append(("resourceVersion", version))
        # With a version, only a list without limit can be served from the server's memory.
        if limit and version in ("", "0"):
            params.append(("limit", str(limit)))
        page = await self._source.list_page(self._resource, self._namespace, params)
        found = [self._copy.read(raw) for raw in page.items]
        while page.continues:
            more = [*self._selectors, ("limit", str(limit)), ("continue", page.continues)]
            page = await self._source.list_page(self._resource, self._namespace, more)
            found += [self._copy.read(raw) for raw in page.items]
        if not page.resource_version:
            raise BadAnswer(f"the list of {self._resource.plural} has no resourceVersion")
        return found, page.resource_version

    async def _watch(self) -> None:
        """Watch until the server ends it in order; raises KubeError when it ends otherwise."""
        shortest, longest = WATCH_SECONDS
        seconds = int(shortest + (longest - shortest) * self._chance())
        params = [
            *self._selectors,
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(seconds)),
        ]
        loop = asyncio.get_running_loop()
        begin, silent = loop.time(), True
        stream = WatchStream()
        async with self._source.watch(
            self._resource, self._namespace, params, seconds=seconds + GRACE_SECONDS
        ) as chunks:
            self._succeeded()
            bookmarks = 0
            while chunk := await self._next(chunks, SILENT_SECONDS if bookmarks >= BOOKMARKS else None):
                if events := stream.feed(chunk):
                    silent = False
                    bookmarks += sum(event.type == "BOOKMARK" for event in events)
                    applied = self._copy.apply(events)
                    self._version = applied.version or self._version
                    if applied.update.changed or applied.update.removed:
                        await self._on_update(applied.update)
                    self._tell_unreadable()
                    if applied.error is not None:
                        raise applied.error
        if not stream.finish():
            raise BadAnswer(f"the watch of {self._resource.plural} ended in the middle of an event")
        if silent and loop.time() - begin < _SHORT_SECONDS:
            raise BadAnswer(f"the watch of {self._resource.plural} ended as soon as it began")

    async def _next(self, chunks: AsyncIterator[bytes], patience: float | None) -> bytes:
        """Give what comes next; nothing at the end, or when the watch has gone silent."""
        try:
            async with asyncio.timeout(patience):
                return await anext(chunks, b"")
        except TimeoutError:
            log.info("A watch has gone silent, asking again", resource=self._resource.plural)
            return b""

    def _succeeded(self) -> None:
        self._complaints.succeeded(asyncio.get_running_loop().time())
        self._tell_unreadable()

    def _tell_unreadable(self) -> None:
        if self._copy.unreadable != self._told_unreadable:
            for (namespace, name), why in self._copy.unreadable.items():
                if self._told_unreadable.get((namespace, name)) != why:
                    log.error(
                        why,
                        "Failed to read an object",
                        kind=self._resource.kind,
                        object=f"{namespace}/{name}",
                    )
            self._told_unreadable = dict(self._copy.unreadable)


def _is_version_unknown(err: ApiError) -> bool:
    """Whether the server no longer knows the version, or does not know it yet."""
    return isinstance(err, Gone) or err.details.has_cause("ResourceVersionTooLarge")
