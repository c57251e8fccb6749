"""HTTP/1.1 connections for writes to the API server, the concurrency limiter and the shared DNS resolver.

`ConnectionPool` sends small, complete requests, mostly status and event writes, one at a time per
connection. It costs a fraction of aiohttp's CPU time per request; lists, watches and everything through a
proxy use aiohttp.

`ConcurrencyLimiter` bounds the concurrent requests of a client, because each takes a connection and a new
connection costs both sides more than several requests. A request that finds the limit reached waits
briefly: with an API server nearby, a connection is free by then. Otherwise the server is distant or slow
and the limit grows by one, up to a maximum. Above the maximum it grows only while the first waiter is
stuck: requests that hang (a secret may depend on an external KMS) must not block a pod's status.

`SharedResolver` makes one look-up per name at a time. While DNS is unavailable, a look-up blocks a thread
for many seconds; concurrent callers share its result, and a cancelled caller starts no second look-up, so
that the few threads of the default executor stay free for node work.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote, urlencode, urlsplit

import aiohappyeyeballs
from aiohttp.abc import AbstractResolver, ResolveResult

from pykubelet.apiserver.errors import InvalidResponse
from pykubelet.transport.http1 import HttpProtocolError, ResponseReader

GROWTH_TIMEOUT_SECONDS = 0.01
"""Seconds that the first waiter waits before the limit grows by one."""
STUCK_SECONDS = 1.0
"""Seconds that the first waiter waits at the regular limit before one request above it is admitted."""
STUCK_TIMES = 8
"""Factor on the regular limit that bounds its growth while the first waiter is stuck."""
IDLE_TIMEOUT_SECONDS = 30.0
"""Idle seconds after which connections are closed and the limiter's limit is reset to one."""


class ConcurrencyLimiter:
    """A FIFO concurrency limiter (async context manager); its limit grows while the first waiter is stuck."""

    def __init__(
        self,
        regular_limit: int,
        growth_timeout: float = GROWTH_TIMEOUT_SECONDS,
        idle_timeout: float = IDLE_TIMEOUT_SECONDS,
    ) -> None:
        self._regular_limit = regular_limit
        self._growth_timeout = growth_timeout
        self._idle_timeout = idle_timeout
        self._limit = 1
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._active == 0 and loop.time() - self._last > self._idle_timeout:
            self._limit = 1
        if not self._waiting and self._active < self._limit:
            self._active += 1
            return self
        waiter = loop.create_future()
        self._waiting.append(waiter)
        self._watch()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # A concurrent release may already have removed this waiter from the queue.
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            else:
                self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._active -= 1
        self._last = asyncio.get_running_loop().time()
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._active < self._limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._active += 1
                waiter.set_result(None)

    def _watch(self) -> None:
        """Arm the timer that grows the limit if the first waiter is still waiting."""
        if self._timer is None and self._waiting and self._limit < self._regular_limit * STUCK_TIMES:
            growth_timeout = self._growth_timeout if self._limit < self._regular_limit else STUCK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(growth_timeout, self._grow, self._waiting[0])

    def _grow(self, first: asyncio.Future[None]) -> None:
        self._timer = None
        if self._waiting and self._waiting[0] is first:
            self._limit += 1
            self._serve()
        self._watch()


AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""Address as returned by `socket.getaddrinfo`."""
_Found = Sequence[AddressInfo]


class SharedResolver(AbstractResolver):
    """DNS resolver that uses getaddrinfo and caches nothing."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int, int], asyncio.Future[_Found]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host in aiohttp's format. Raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in await self.addresses(host, port, family)
        ]

    async def addresses(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> Sequence[AddressInfo]:
        """Return the addresses of a host. Raises OSError."""
        key = (host, port, family)
        pending = self._pending.get(key)
        if pending is None:
            lookup = partial(
                socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
            )
            pending = asyncio.get_running_loop().run_in_executor(None, lookup)
            self._pending[key] = pending
            pending.add_done_callback(partial(self._done, key))
        return await asyncio.shield(pending)

    async def close(self) -> None:
        """Do nothing: a look-up in flight ends by itself."""

    def _done(self, key: tuple[str, int, int], pending: asyncio.Future[_Found]) -> None:
        del self._pending[key]
        # All waiters may have been cancelled: mark the exception as retrieved.
        if not pending.cancelled():
            pending.exception()


Resolve = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

# Head start of the first address family, the default of Happy Eyeballs (RFC 8305).
_HAPPY_SECONDS = 0.25
_HANG_UP_SECONDS = 1.0
_TARGET_SAFE = "/%:@!$&'()*+,;=~"
_REPEATABLE = ("PUT", "DELETE")
_PORTS = {"http": 80, "https": 443}


class ConnectionClosed(ConnectionError):
    """The server closed the connection before sending any byte of the response."""


class ResponseTruncated(ConnectionError):
    """The connection closed in the middle of a response."""


class ConnectTimeout(TimeoutError):
    """No connection was established before the connect timeout."""


class ConnectionPool:
    """Pool of keep-alive connections to one server, all made with the same TLS context."""

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        server_name: str,
        *,
        resolve: Resolve,
        new_socket: Callable[[AddressInfo], socket.socket],
        idle_seconds: float,
        connect_seconds: float,
    ) -> None:
        parts = urlsplit(server)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS.get(parts.scheme, 443)
        self._prefix = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._tls: ssl.SSLContext | bool | None = (context or True) if parts.scheme == "https" else None
        self._server_name = server_name or self._host
        self._resolve = resolve
        self._new_socket = new_socket
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        params: Sequence[tuple[str, str]],
        headers: Iterable[tuple[str, str]],
        body: bytes | None,
        limit: int,
    ) -> ResponseReader:
        """Send a request and return its response.

        An idle connection may just have been closed by the server: idempotent methods (PUT, DELETE) are then
        retried. Raises OSError, HttpProtocolError, and InvalidResponse if the body is longer than `limit`
        bytes.
        """
        target = self._prefix + quote(path, safe=_TARGET_SAFE)
        if params:
            target += "?" + urlencode(params)
        request = _request(method, target, self._authority, headers, body)
        while True:
            connection = self._take_idle()
            is_new = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                response = await connection.request(request, limit + 1)
            except ConnectionClosed:
                if is_new or self._closed or method not in _REPEATABLE:
                    raise
                continue
            finally:
                self._release_connection(connection)
            if len(response.body) > limit:
                raise InvalidResponse(f"{path}: the answer is longer than {limit} bytes")
            return response

    def close(self) -> None:
        """Close all connections; pending requests raise ConnectionClosed or ResponseTruncated."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._all):
            connection.close()
        self._all.clear()

    def _take_idle(self) -> _Connection | None:
        """Return the most recently used idle connection, so that the others can expire."""
        now = asyncio.get_running_loop().time()
        while self._idle and (
            not self._idle[0].usable or now - self._idle[0].idle_since > self._idle_seconds
        ):
            self._discard(self._idle.pop(0))
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._discard(connection)
        return None

    def _release_connection(self, connection: _Connection) -> None:
        if connection.usable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            self._discard(connection)

    def _discard(self, connection: _Connection) -> None:
        connection.close()
        self._all.discard(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(self._connect_seconds):
                    addresses = await self._resolve(self._host, self._port)
                    sock = await aiohappyeyeballs.start_connection(
                        addresses,
                        happy_eyeballs_delay=_HAPPY_SECONDS,
                        interleave=1,
                        socket_factory=self._new_socket,
                    )
                    undo.callback(sock.close)
                    await loop.create_connection(
                        lambda: connection,
                        sock=sock,
                        ssl=self._tls,
                        server_hostname=self._server_name if self._tls else None,
                        ssl_shutdown_timeout=_HANG_UP_SECONDS if self._tls else None,
                    )
            except TimeoutError as err:
                raise ConnectTimeout from err
            undo.pop_all()
        if self._closed:
            connection.close()
            raise ConnectionClosed
        self._all.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection; carries one request at a time, without pipelining."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        """Loop time since which the connection is idle."""
        self.usable = True
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._completed: asyncio.Future[None] | None = None

    async def request(self, request: bytes, limit: int) -> ResponseReader:
        """Send a request and return its response.

        Raises ConnectionClosed, ResponseTruncated, OSError and HttpProtocolError.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            self.usable = False
            raise ConnectionClosed
        reader = self._reader = ResponseReader(limit)
        self._completed = asyncio.get_running_loop().create_future()
        # Not reusable until the response is complete: after a cancellation, its response still arrives.
        self.usable = False
        try:
            transport.write(request)
            await self._completed
        finally:
            self._reader = self._completed = None
        self.usable = reader.reusable and not transport.is_closing()
        return reader

    def close(self) -> None:
        """Close the connection."""
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes of the response."""
        if self._reader is None or self._completed is None or self._completed.done():
            # Unsolicited data: no request is in flight.
            self.close()
            return
        try:
            self._reader.feed(data)
        except HttpProtocolError as err:
            self._end(err)
            self.close()
            return
        if self._reader.done:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete or fail the request in flight."""
        self.usable = False
        if self._reader is None:
            return
        if not self._reader.begun:
            self._end(exc if isinstance(exc, OSError) else ConnectionClosed())
            return
        try:
            self._reader.end()
        except HttpProtocolError:
            self._end(exc if isinstance(exc, ssl.SSLError) else ResponseTruncated())
        else:
            self._end(None)

    def _end(self, err: Exception | None) -> None:
        if self._completed is not None and not self._completed.done():
            if err is None:
                self._completed.set_result(None)
            else:
                self._completed.set_exception(err)


def _request(
    method: str, target: str, authority: str, headers: Iterable[tuple[str, str]], body: bytes | None
) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    size = f"Content-Length: {len(body or b'')}\r\n"
    head = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n{lines}{size}\r\n"
    return head.encode() + (body or b"")
