"""Accept loop of the servers, with limits on connections and on the heads of HTTP/1.1 requests.

Each connection uses the TLS context of that time. ALPN selects HTTP/2 (`http2`) or HTTP/1.1 (aiohttp).

Unauthenticated clients can connect, so the number of connections is limited. At the limit a new connection
replaces the oldest idle one, else the oldest one in its TLS handshake, else the oldest one whose request is
not authorized yet; connections with an authorized request in flight are kept. A client that does not complete
its handshake or sends no request is disconnected after a timeout.

Heads (request line and header fields) are received before authentication, so they are limited in three ways:
a head has at most 1 MiB, as in Go servers; a connection handles one request at a time, and only some
kilobytes that a client pipelines after it are buffered, unparsed; and all connections share a budget
(`HeadBudget`). Small heads are not charged to it, so that ordinary clients are served whatever others hold.
Above the budget, the connection with the largest charge among those without an authorized request is closed.
HTTP/2 has its own limits (`http2.connection`).

Responses have no `Server` header, as upstream (`remove_server_header`).
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

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpRequestParser, RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import USER
from pykubelet.server.tls import HTTP2, NoCertificate
from pykubelet.util.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.server.http2.connection import Http2

log = get_logger(__name__)
MAX_HEAD_BYTES = 1024 * 1024
MAX_TOTAL_HEAD_BYTES = 8 * 1024 * 1024
"""Maximum bytes of heads of all connections together, without `FREE_BYTES` each."""
FREE_BYTES = 16 * 1024
"""Bytes of a head that are not charged to the budget."""
_MAX_PIPELINED_BYTES = 16 * 1024
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\n\r\n431 Request Header Fields Too Large"
)
MayEvict = Callable[[web.BaseRequest | None], bool]
"""Returns whether a connection may be closed while it handles this request; None while it reads a head."""


class HeadBudget:
    """Bytes of request heads that the connections of a server hold."""

    def __init__(self, may_evict: MayEvict, max_bytes: int = MAX_TOTAL_HEAD_BYTES) -> None:
        self._may_evict = may_evict
        self._max_bytes = max_bytes
        self._charged: dict[RequestHandler, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes charged by all connections."""
        return self._total

    def charge(self, handler: RequestHandler, head_bytes: int) -> None:
        """Set a connection's charge; close other connections, or this one, while the budget is exceeded."""
        self.release(handler)
        if head_bytes > FREE_BYTES:
            self._charged[handler] = head_bytes - FREE_BYTES
            self._total += head_bytes - FREE_BYTES
        while self._total > self._max_bytes:
            evictable = [connection for connection in self._charged if self._may_evict(connection.request)]
            largest = max(evictable, key=self._charged.__getitem__, default=handler)
            log.v(2).info("Closing connection, request heads exceed the budget", client=largest.peername)
            self.release(largest)
            largest.abort()

    def release(self, handler: RequestHandler) -> None:
        """Release a connection's charge."""
        self._total -= self._charged.pop(handler, 0)


class RequestHandler(web.RequestHandler):
    """aiohttp's handler of a connection, with limits on the heads of its requests."""

    __slots__ = ("_budget", "_busy", "_head_bytes", "_payload", "_pipelined")

    def __init__(self, server: web.Server, budget: HeadBudget, **options: Any) -> None:
        super().__init__(server, **options)
        # At most one message in aiohttp's queue: the following bytes stay unparsed.
        self._max_msg_queue_size, self._msg_queue_resume_size = 1, 0
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=RequestPayloadError,
            max_msg_queue_size=1,
        )
        self._budget = budget
        self._busy = False
        """Whether a request was read and its response is not complete."""
        self._payload: StreamReader | None = None
        """Body of the last request that was read."""
        self._head_bytes = 0
        self._pipelined = bytearray()
        """Bytes received after the request that is being handled."""

    @property
    def request(self) -> web.BaseRequest | None:
        """The request that is being handled."""
        return self._current_request

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        transport = self.transport
        self._pipelined.clear()
        self.force_close()
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes within the limits; see the module docstring."""
        if self._force_close or self._close:
            return
        if self._upgraded or self._payload_parser is not None or self._reads_body():
            super().data_received(data)
        elif self._busy:
            self._hold_pipelined(data)
        else:
            self._read_head(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's buffer and charge."""
        self._budget.release(self)
        self._pipelined.clear()
        super().connection_lost(exc)

    async def _handle_request(self, *arguments: Any) -> Any:
        try:
            return await super()._handle_request(*arguments)
        finally:
            self._head_bytes = 0
            self._budget.release(self)
            self._busy = bool(self._messages)
            # The next request is read when this response is complete and its body is read or skipped.
            self._loop.call_soon(self._read_next_request)

    def _reads_body(self) -> bool:
        return self._payload is not None and not self._payload.is_eof()

    def _read_head(self, data: bytes) -> None:
        before = self._request_count
        self._head_bytes += len(data)
        super().data_received(data)
        if self._request_count > before:
            self._busy = True
            self._payload = self._messages[-1][1] if self._messages else None
        elif self._head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.write(_TOO_LARGE)
            self.force_close()
            return
        if self._head_bytes > FREE_BYTES:
            self._budget.charge(self, self._head_bytes)

    def _hold_pipelined(self, data: bytes) -> None:
        self._pipelined += data
        self._budget.charge(self, self._head_bytes + len(self._pipelined))
        if len(self._pipelined) > _MAX_PIPELINED_BYTES and not self._buffer_paused:
            self._pause_reading_for_buffer()

    def _read_next_request(self) -> None:
        if self._busy or self.transport is None or self._force_close or self._close:
            return
        pipelined, self._pipelined = bytes(self._pipelined), bytearray()
        self.data_received(pipelined)
        if self._buffer_paused and not self._busy:
            self._resume_reading_for_buffer()


def remove_server_header(server: web.Server) -> None:
    """Remove the `Server` header from all responses, also from those to malformed requests.

    aiohttp adds the header after all response hooks; only the hook of the writer runs later. The factory is
    replaced because an application (`web.AppRunner`) passes its own to the server, and has no option for it.
    """
    create_request = server.request_factory

    def request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if type(writer) is StreamWriter:  # not that of an HTTP/2 stream
            loop = asyncio.get_running_loop()
            writer = StreamWriter(protocol, loop, on_headers_sent=_drop_server_header)
        return create_request(message, payload, protocol, writer, task)

    server.request_factory = request


async def _drop_server_header(headers: CIMultiDict[str]) -> None:
    headers.popall(hdrs.SERVER, None)


@asynccontextmanager
async def single_error_scope() -> AsyncIterator[TaskScope]:
    """Yield a TaskScope; a single error is raised as it is, not wrapped in an exception group."""
    try:
        async with TaskScope() as scope:
            yield scope
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


MAX_CONNECTIONS = 1000
IDLE_SECONDS = 90.0
"""Seconds after which a connection without a complete request is closed."""
HANDSHAKE_SECONDS = 10.0
MAX_LINE_BYTES = 1024 * 1024
"""Maximum bytes of the request line, which contains the command of exec requests."""
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
_RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_RETRY_SECONDS = 0.1
_CLOSE_SECONDS = 5.0

# Seconds for responses in flight: the kubelet must stop within five.
_SHUTDOWN_SECONDS = 2.0
Context = Callable[[], ssl.SSLContext]
"""Returns the TLS context for a new connection. Raises NoCertificate."""


@asynccontextmanager
async def app_runner(app: web.Application) -> AsyncIterator[web.Server]:
    """Yield the server of an application; on exit, requests in flight get a grace period of two seconds."""
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
    remove_server_header(runner.server)
    try:
        yield runner.server
    finally:
        await runner.cleanup()


def _handler_options() -> dict[str, Any]:
    """Return the request handler options, for HTTP/1.1 and HTTP/2."""
    return {
        "access_log": None,
        # Client errors are only returned to the client; handler errors are logged by the middleware.
        "logger": logging.Logger("silent", logging.CRITICAL + 1),
        "max_line_size": MAX_LINE_BYTES,
        "max_field_size": MAX_HEADER_BYTES,
        "max_headers": MAX_HEADERS,
    }


@asynccontextmanager
async def serve_connections(
    server: web.Server,
    listener: socket.socket,
    context: Context | None = None,
    *,
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[None]:
    """Accept connections on a listening socket while the context is open, with TLS if `context` is given."""
    async with single_error_scope() as scope:
        scope.start(_Acceptor(server, listener, context, scope, max_connections).run(), name="accept")
        yield


class _Acceptor:
    def __init__(
        self,
        server: web.Server,
        listener: socket.socket,
        context: Context | None,
        scope: TaskScope,
        max_connections: int,
    ) -> None:
        self._server = server
        self._listener = listener
        self._context = context
        self._scope = scope
        self._max_connections = max_connections
        self._handshaking: dict[asyncio.Task[None], None] = {}
        self._http2_factory: Http2 | None = None
        uses_tls = context is not None
        self._head_budget = HeadBudget(
            lambda request: request is None or (uses_tls and _is_unauthorized(request)),
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as err:
                if err.errno in _RESOURCE_ERRNOS:
                    log.error(err, "Failed to accept a connection")
                    await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            if not self._ensure_capacity():
                client.close()
                continue
            task = self._scope.start(self._establish(client), name="greet")
            self._handshaking[task] = None
            task.add_done_callback(lambda done: self._handshaking.pop(done, None))

    def _ensure_capacity(self) -> bool:
        connections = self._server.connections
        if len(connections) + len(self._handshaking) < self._max_connections:
            return True
        # aiohttp has no public attribute for "no request is being handled".
        if self._evict(lambda connection: connection._current_request is None):
            return True
        oldest = next(iter(self._handshaking), None)
        if oldest is not None:
            oldest.cancel()
            return True
        # Unauthenticated requests that wait for a review must not block all other clients.
        return self._context is not None and self._evict(
            lambda connection: _is_unauthorized(connection._current_request)
        )

    def _evict(self, evictable: Callable[[web.RequestHandler], bool]) -> bool:
        """Close the oldest evictable connection and return whether there was one."""
        for connection in self._server.connections:
            if evictable(connection) and (transport := connection.transport) is not None:
                connection.force_close()
                # A graceful close would wait for a client that does not respond.
                transport.abort()
                return True
        return False

    async def _establish(self, client: socket.socket) -> None:
        try:
            tls = self._context() if self._context is not None else None
            options = (
                {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": _CLOSE_SECONDS}
                if tls
                else {}
            )
            protocol = (lambda: _AlpnNegotiation(self)) if tls else self._http1
            await asyncio.get_running_loop().connect_accepted_socket(protocol, client, ssl=tls, **options)
        except (NoCertificate, ssl.SSLError, OSError) as err:
            log.v(4).info("Failed to establish client connection", err=err)
            client.close()
        except BaseException:
            client.close()
            raise

    def protocol_for(self, alpn_protocol: str | None) -> asyncio.Protocol:
        """Return the protocol for the result of the ALPN negotiation."""
        return self._http2() if alpn_protocol == HTTP2 else self._http1()

    def _http1(self) -> asyncio.Protocol:
        server = self._server
        return RequestHandler(server, self._head_budget, loop=asyncio.get_running_loop(), **server._kwargs)

    def _http2(self) -> asyncio.Protocol:
        if self._http2_factory is None:
            # Imported lazily to save memory: many nodes never have an HTTP/2 client.
            from pykubelet.server.http2.connection import Http2

            self._http2_factory = Http2(self._server, idle_seconds=IDLE_SECONDS, **_handler_options())
        return self._http2_factory()


def _is_unauthorized(request: object) -> bool:
    """Return whether a request is not authenticated and authorized yet."""
    return isinstance(request, web.BaseRequest) and USER not in request


class _AlpnNegotiation(asyncio.Protocol):
    """Protocol during the TLS handshake, replaced by the one that ALPN selects."""

    def __init__(self, acceptor: _Acceptor) -> None:
        self._acceptor = acceptor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        alpn_protocol = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        log.v(4).info("Client connected", protocol=alpn_protocol, client=transport.get_extra_info("peername"))
        protocol = self._acceptor.protocol_for(alpn_protocol)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
