"""Connections of clients: accepted one by one, begun with the TLS of the moment, and never too many.

Over TLS a client says what it wants to speak: HTTP/2 (`http2`), or HTTP/1.1, which is aiohttp's.

Strangers can open connections, too, so there is a bound: at the bound, whoever has been idle longest (or
has not finished the TLS handshake, or whose request is not authorized yet) makes room for the new one,
and connections with an authorized request in flight are left alone. A client that does not finish its
handshake, or sends nothing, is closed after a while.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pykubelet.logs import get_logger
from pykubelet.server.nameless import nameless
from pykubelet.server.pipeline import USER
from pykubelet.server.request_heads import HeadBudget, RequestHandler
from pykubelet.server.scopes import own_scope
from pykubelet.server.tls import HTTP2, NoCertificate
from pykubelet.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.server.http2 import Http2

log = get_logger(__name__)

MOST_CONNECTIONS = 1000
IDLE_SECONDS = 90.0
"""A connection without a (whole) request is closed after this time."""
HANDSHAKE_SECONDS = 10.0
MOST_LINE_BYTES = 1024 * 1024
"""Of the request line: commands to run in containers stand there."""
MOST_HEADER_BYTES = 32 * 1024
MOST_HEADERS = 100

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
# Two seconds for answers under way: the agent must stop within five.
_SHUTDOWN_SECONDS = 2.0

Context = Callable[[], ssl.SSLContext]
"""Gives the TLS for a connection that begins now; raises NoCertificate."""


@asynccontextmanager
async def app_runner(app: web.Application) -> AsyncIterator[web.Server]:
    """Make the server of an application; leaving ends what is under way, with two seconds of grace."""
    runner = web.AppRunner(
        app,
        handle_signals=False,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        lingering_time=1.0,
        handler_cancellation=True,
        **_handler_options(),
    )
    await runner.setup()
    assert runner.server is not None
    nameless(runner.server)
    try:
        yield runner.server
    finally:
        await runner.cleanup()


def _handler_options() -> dict[str, Any]:
    """How requests are read, over whichever protocol."""
    return {
        "access_log": None,
        # What clients do wrong is answered, not logged; what handlers do wrong is logged by their callers.
        "logger": logging.Logger("silent", logging.CRITICAL + 1),
        "max_line_size": MOST_LINE_BYTES,
        "max_field_size": MOST_HEADER_BYTES,
        "max_headers": MOST_HEADERS,
    }


@asynccontextmanager
async def serve_connections(
    server: web.Server,
    listener: socket.socket,
    context: Context | None = None,
    *,
    most: int = MOST_CONNECTIONS,
) -> AsyncIterator[None]:
    """Accept clients on a listening socket while inside; with a `context` they must speak TLS."""
    async with own_scope() as scope:
        scope.start(_Door(server, listener, context, scope, most).run(), name="accept")
        yield


class _Door:
    def __init__(
        self,
        server: web.Server,
        listener: socket.socket,
        context: Context | None,
        scope: TaskScope,
        most: int,
    ) -> None:
        self._server = server
        self._listener = listener
        self._context = context
        self._scope = scope
        self._most = most
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._made_http2: Http2 | None = None
        secured = context is not None
        self._heads = HeadBudget(
            lambda request: request is None or (secured and _is_unauthorized(request)),
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as err:
                if err.errno in _OUT_OF_FILES:
                    log.error(err, "Failed to accept a connection")
                    await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if not self._make_room():
                client.close()
                continue
            task = self._scope.start(self._greet(client), name="greet")
            self._greeting[task] = None
            task.add_done_callback(lambda done: self._greeting.pop(done, None))

    def _make_room(self) -> bool:
        connections = self._server.connections
        if len(connections) + len(self._greeting) < self._most:
            return True
        # aiohttp has no public word for "no request is being handled".
        if self._evict(lambda connection: connection._current_request is None):
            return True
        oldest = next(iter(self._greeting), None)
        if oldest is not None:
            oldest.cancel()
            return True
        # Requests of strangers that wait for a review must not keep everybody else out.
        return self._context is not None and self._evict(
            lambda connection: _is_unauthorized(connection._current_request)
        )

    def _evict(self, evictable: Callable[[web.RequestHandler], bool]) -> bool:
        """Close the first connection, the oldest, that may be closed; return whether there was one."""
        for connection in self._server.connections:
            if evictable(connection) and (transport := connection.transport) is not None:
                connection.force_close()
                # Whoever does not answer to a goodbye would stay for a while yet.
                transport.abort()
                return True
        return False

    async def _greet(self, client: socket.socket) -> None:
        try:
            tls = self._context() if self._context is not None else None
            options = (
                {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": _CLOSE_SECONDS}
                if tls
                else {}
            )
            protocol = (lambda: _Choice(self)) if tls else self._http1
            await asyncio.get_running_loop().connect_accepted_socket(protocol, client, ssl=tls, **options)
        except (NoCertificate, ssl.SSLError, OSError) as err:
            log.v(4).info("A connection did not come about", err=err)
            client.close()
        except BaseException:
            client.close()
            raise

    def protocol_for(self, spoken: str | None) -> asyncio.Protocol:
        """Give who speaks what was agreed on."""
        return self._http2() if spoken == HTTP2 else self._http1()

    def _http1(self) -> asyncio.Protocol:
        server = self._server
        return RequestHandler(server, self._heads, loop=asyncio.get_running_loop(), **server._kwargs)

    def _http2(self) -> asyncio.Protocol:
        if self._made_http2 is None:
            # Here because of its memory: a node may never meet a client that speaks it.
            from pykubelet.server.http2 import Http2

            self._made_http2 = Http2(self._server, idle_seconds=IDLE_SECONDS, **_handler_options())
        return self._made_http2()


def _is_unauthorized(request: object) -> bool:
    """Return whether the sender of a request is not known, or not known to have permission, yet."""
    return isinstance(request, web.BaseRequest) and USER not in request


class _Choice(asyncio.Protocol):
    """Stands in until the handshake is done, and then leaves the connection to who speaks its protocol."""

    def __init__(self, door: _Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        spoken = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        log.v(4).info("A client is connected", protocol=spoken, client=transport.get_extra_info("peername"))
        protocol = self._door.protocol_for(spoken)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
