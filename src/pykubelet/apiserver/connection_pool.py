"""Connections to the API server that are kept for writing: one request at a time on each.

Most of what an agent sends are reports: small, whole when they are sent, answered at once. For them this
is a client without the generality of the HTTP library, which takes several times as long for each
request and answer. Lists, watches and whatever goes through a proxy are the library's.

How many requests of a client are under way at once: as few as keep it going.

Each takes a connection, and a new one costs both sides more than several requests do. A request that
finds all of them taken therefore waits for a moment: with an API server nearby, one is free by then. If
none is, the server is far away or slow, and one connection more is allowed, up to a limit. Beyond it
there is one more only when nothing moves at all: a server that does not answer some (for secrets it may
have to ask another) must not keep a pod's status from being told.

Looking up the API server's name, one look-up at a time.

While the cluster's DNS is away a look-up blocks a thread for many seconds, and every request makes
one. Whoever asks for the same name meanwhile shares the answer, and one who stops waiting leaves no
second thread behind, so that the agent's few threads stay free for what runs on the node.
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

PATIENCE_SECONDS = 0.01
"""How long the first in the line waits before there is one more."""
STUCK_SECONDS = 1.0
"""How long he waits when there are as many as there should be."""
STUCK_TIMES = 8
"""How many times as many there may be when nothing moves."""
KEPT_SECONDS = 30.0
"""After so much silence connections are closed, and what there was no longer counts."""


class ConcurrencyLimiter:
    """An asynchronous context manager: inside, it is one's turn. The first come are the first served."""

    def __init__(self, most: int, patience: float = PATIENCE_SECONDS, kept: float = KEPT_SECONDS) -> None:
        self._most = most
        self._patience = patience
        self._kept = kept
        self._allowed = 1
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._taken == 0 and loop.time() - self._last > self._kept:
            self._allowed = 1
        if not self._waiting and self._taken < self._allowed:
            self._taken += 1
            return self
        turn = loop.create_future()
        self._waiting.append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                # Who gave turns out in the meantime has taken it from the line already.
                if turn in self._waiting:
                    self._waiting.remove(turn)
            else:
                self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._taken -= 1
        self._last = asyncio.get_running_loop().time()
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._taken < self._allowed:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    def _watch(self) -> None:
        """Have one more when the first in the line has waited long enough."""
        if self._timer is None and self._waiting and self._allowed < self._most * STUCK_TIMES:
            patience = self._patience if self._allowed < self._most else STUCK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(patience, self._grow, self._waiting[0])

    def _grow(self, first: asyncio.Future[None]) -> None:
        self._timer = None
        if self._waiting and self._waiting[0] is first:
            self._allowed += 1
            self._serve()
        self._watch()


AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
"""An address as `socket.getaddrinfo` gives it."""
_Found = Sequence[AddressInfo]


class SharedResolver(AbstractResolver):
    """Resolves names with the system's own rules; nothing is remembered."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int, int], asyncio.Future[_Found]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Give the addresses of a host as the HTTP library wants them; raises OSError."""
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
        """Give the addresses of a host; raises OSError."""
        key = (host, port, family)
        pending = self._pending.get(key)
        if pending is None:
            ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
            pending = asyncio.get_running_loop().run_in_executor(None, ask)
            self._pending[key] = pending
            pending.add_done_callback(partial(self._done, key))
        return await asyncio.shield(pending)

    async def close(self) -> None:
        """There is nothing to close; a look-up under way ends by itself."""

    def _done(self, key: tuple[str, int, int], pending: asyncio.Future[_Found]) -> None:
        del self._pending[key]
        # Perhaps nobody waits any more; a failure is then nobody's.
        if not pending.cancelled():
            pending.exception()


Resolve = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

# The usual head start of one family of addresses.
_HAPPY_SECONDS = 0.25
_HANG_UP_SECONDS = 1.0
_TARGET_SAFE = "/%:@!$&'()*+,;=~"
_REPEATABLE = ("PUT", "DELETE")
_PORTS = {"http": 80, "https": 443}


class ConnectionClosed(ConnectionError):
    """The server closed the connection before it answered anything."""


class ResponseTruncated(ConnectionError):
    """The connection broke in the middle of an answer."""


class ConnectTimeout(TimeoutError):
    """No connection could be made before the time was over."""


class ConnectionPool:
    """The kept connections to one server, all made with the same certificates."""

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        server_name: str,
        *,
        resolve: Resolve,
        new_socket: Callable[[AddressInfo], socket.socket],
        keep_seconds: float,
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
        self._keep = keep_seconds
        self._connect_seconds = connect_seconds
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        params: Sequence[tuple[str, str]],
        headers: Iterable[tuple[str, str]],
        body: bytes | None,
        limit: int,
    ) -> ResponseReader:
        """Send a request and read its answer; raises OSError, WireError, and BadAnswer when it is too long.

        A kept connection may have been closed by the server just now: what can be repeated is sent again.
        """
        target = self._prefix + quote(path, safe=_TARGET_SAFE)
        if params:
            target += "?" + urlencode(params)
        request = _request(method, target, self._authority, headers, body)
        while True:
            connection = self._kept()
            fresh = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                answer = await connection.ask(request, limit + 1)
            except ConnectionClosed:
                if fresh or self._closed or method not in _REPEATABLE:
                    raise
                continue
            finally:
                self._put_back(connection)
            if len(answer.body) > limit:
                raise InvalidResponse(f"{path}: the answer is longer than {limit} bytes")
            return answer

    def close(self) -> None:
        """Close all connections; whoever waits on one gets HungUp or Interrupted."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._all):
            connection.close()
        self._all.clear()

    def _kept(self) -> _Connection | None:
        """Give the connection that was used last, so that the others may grow old."""
        now = asyncio.get_running_loop().time()
        while self._idle and (not self._idle[0].usable or now - self._idle[0].since > self._keep):
            self._drop(self._idle.pop(0))
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._drop(connection)
        return None

    def _put_back(self, connection: _Connection) -> None:
        if connection.usable and not self._closed:
            connection.since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        connection.close()
        self._all.discard(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(self._connect_seconds):
                    addresses = await self._resolve(self._host, self._port)
                    made = await aiohappyeyeballs.start_connection(
                        addresses,
                        happy_eyeballs_delay=_HAPPY_SECONDS,
                        interleave=1,
                        socket_factory=self._new_socket,
                    )
                    undo.callback(made.close)
                    await loop.create_connection(
                        lambda: connection,
                        sock=made,
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
    """One connection; nothing is sent on it while an answer is awaited."""

    def __init__(self) -> None:
        self.since = 0.0
        """Since when it is not used."""
        self.usable = True
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._over: asyncio.Future[None] | None = None

    async def ask(self, request: bytes, limit: int) -> ResponseReader:
        """Give the answer to a request; raises HungUp, Interrupted, OSError and WireError."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self.usable = False
            raise ConnectionClosed
        reader = self._reader = ResponseReader(limit)
        self._over = asyncio.get_running_loop().create_future()
        # Until the answer is whole: a request that is given up leaves an answer on its way.
        self.usable = False
        try:
            transport.write(request)
            await self._over
        finally:
            self._reader = self._over = None
        self.usable = reader.reusable and not transport.is_closing()
        return reader

    def close(self) -> None:
        """Hang up."""
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        if self._reader is None or self._over is None or self._over.done():
            # Words that nobody asked for.
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
        """Tell whoever waits."""
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
        if self._over is not None and not self._over.done():
            if err is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(err)


def _request(
    method: str, target: str, authority: str, headers: Iterable[tuple[str, str]], body: bytes | None
) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    size = f"Content-Length: {len(body or b'')}\r\n"
    head = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n{lines}{size}\r\n"
    return head.encode() + (body or b"")
