"""Connections to the API server that are kept for writing: one request at a time on each.

Most of what an agent sends are reports: small, whole when they are sent, answered at once. For them this
is a client without the generality of the HTTP library, which takes several times as long for each
request and answer. Lists, watches and whatever goes through a proxy are the library's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import cast
from urllib.parse import quote, urlencode, urlsplit

import aiohappyeyeballs

from pykubelet.host.http_answer import ResponseReader, WireError
from pykubelet.kube.errors import BadAnswer
from pykubelet.kube.resolver import AddressInfo

Resolve = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

# The usual head start of one family of addresses.
_HAPPY_SECONDS = 0.25
_HANG_UP_SECONDS = 1.0
_TARGET_SAFE = "/%:@!$&'()*+,;=~"
_REPEATABLE = ("PUT", "DELETE")
_PORTS = {"http": 80, "https": 443}


class HungUp(ConnectionError):
    """The server closed the connection before it answered anything."""


class Interrupted(ConnectionError):
    """The connection broke in the middle of an answer."""


class NoConnectionInTime(TimeoutError):
    """No connection could be made before the time was over."""


class Connections:
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
            except HungUp:
                if fresh or self._closed or method not in _REPEATABLE:
                    raise
                continue
            finally:
                self._put_back(connection)
            if len(answer.body) > limit:
                raise BadAnswer(f"{path}: the answer is longer than {limit} bytes")
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
                raise NoConnectionInTime from err
            undo.pop_all()
        if self._closed:
            connection.close()
            raise HungUp
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
            raise HungUp
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
        except WireError as err:
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
            self._end(exc if isinstance(exc, OSError) else HungUp())
            return
        try:
            self._reader.end()
        except WireError:
            self._end(exc if isinstance(exc, ssl.SSLError) else Interrupted())
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
