"""Live updates: one task renders the views that clients watch, and sends each client what has changed.

The task starts with the first client and ends with the last one, so that an unwatched page costs nothing. A
view is rendered once per round, however many clients watch it. The first message to a client has all
sections, later ones those that have changed and the ids of those that are gone. The number of clients is
bounded, and a client that does not read its messages is disconnected: it holds at most `QUEUED` of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from pykubelet.logs import get_logger
from pykubelet.server.page.html import Html
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
MAX_CLIENTS = 64
QUEUED = 4
INTERVAL_SECONDS = 2.0
V = TypeVar("V")


class TooManyClients(Exception):
    """Raised when the maximum number of clients is connected."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A view at one time: its live sections by id, and the current values of its charts."""

    sections: Mapping[str, Html]
    sample: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Client:
    """A connected client; its messages end when it is too slow or the server stops."""

    queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(QUEUED + 1))
    is_new: bool = True

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages, encoded as server-sent events."""
        while (message := await self.queue.get()) is not None:
            yield message

    def send(self, message: bytes) -> bool:
        """Queue a message; return False for a client that does not read, whose messages end."""
        if self.queue.qsize() >= QUEUED:
            self.end()
            return False
        self.queue.put_nowait(message)
        return True

    def end(self) -> None:
        """End the messages; those that are queued are dropped."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


@dataclass(slots=True)
class _Watched:
    clients: set[Client] = field(default_factory=set)
    sections: dict[str, Html] = field(default_factory=dict)


class Broadcaster(Generic[V]):
    """Clients by view, and the task that updates them."""

    def __init__(
        self,
        render: Callable[[V], Awaitable[Rendered | None]],
        prepare: Callable[[], Awaitable[None]],
        tasks: TaskScope,
        *,
        interval: float = INTERVAL_SECONDS,
        max_clients: int = MAX_CLIENTS,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Initialize; `render` returns None for a view that does not exist any more.

        `prepare` is called before each round, `finish` after it, also if it was cancelled.
        """
        self._render = render
        self._prepare = prepare
        self._finish = finish
        self._tasks = tasks
        self._interval = interval
        self._max_clients = max_clients
        self._views: dict[V, _Watched] = {}
        self._running = False
        self._closed = False

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        return sum(len(watched.clients) for watched in self._views.values())

    @contextmanager
    def connect(self, view: V) -> Iterator[Client]:
        """Connect a client while the context is open. Raises TooManyClients."""
        if self._closed or self.clients >= self._max_clients:
            raise TooManyClients
        client = Client()
        self._views.setdefault(view, _Watched()).clients.add(client)
        if not self._running:
            self._running = True
            self._tasks.start(self._run(), name="page-updates")
        try:
            yield client
        finally:
            watched = self._views.get(view)
            if watched is not None:
                watched.clients.discard(client)
                if not watched.clients:
                    del self._views[view]

    def close(self) -> None:
        """End the messages of all clients, and accept no more."""
        self._closed = True
        for watched in self._views.values():
            for client in watched.clients:
                client.end()

    async def _run(self) -> None:
        try:
            while self._views:
                try:
                    await self._guarded(self._prepare())
                    for view, watched in tuple(self._views.items()):
                        await self._guarded(self._update(view, watched))
                finally:
                    self._finish()
                await asyncio.sleep(self._interval)
        finally:
            self._running = False
            for watched in self._views.values():
                for client in watched.clients:
                    client.end()

    async def _guarded(self, step: Awaitable[None]) -> None:
        """Run a step; a defect of one view must stop neither the kubelet nor the other views."""
        try:
            await step
        except Exception as err:  # the data of pods is hostile, and the page only shows it
            log.error(err, "Failed to update the page")

    async def _update(self, view: V, watched: _Watched) -> None:
        rendered = await self._render(view)
        if rendered is None:
            for client in tuple(watched.clients):
                client.send(encode("gone", {}))
            return
        changed = {id: html for id, html in rendered.sections.items() if watched.sections.get(id) != html}
        removed = [id for id in watched.sections if id not in rendered.sections]
        watched.sections = dict(rendered.sections)
        part = encode("update", {"sections": _exact(changed), "removed": removed, "sample": rendered.sample})
        whole: bytes | None = None
        for client in tuple(watched.clients):
            message = part
            if client.is_new:
                whole = whole or encode(
                    "update",
                    {"sections": _exact(rendered.sections), "isWhole": True, "sample": rendered.sample},
                )
                message, client.is_new = whole, False
            if not client.send(message):
                watched.clients.discard(client)
                log.v(2).info("Disconnected a client of the page that does not read")


def encode(event: str, document: Mapping[str, Any]) -> bytes:
    """Return a server-sent event; JSON has no line breaks."""
    return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"


def _exact(sections: Mapping[str, Html]) -> dict[str, str]:
    """Return the sections as exact strings: the encoder rejects subclasses."""
    return {id: str(html) for id, html in sections.items()}
