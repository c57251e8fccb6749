"""Connections to one API server, shared by all clients of a kubelet.

Connections are kept alive between requests, with TCP keepalive, so that a vanished peer is detected within
a minute. After a certificate change, new requests immediately use new connections: requests in flight
finish on the old ones, streams are closed so that their owners reopen them with the new identity.
`close_all` drops all connections, for requests that hang on dead ones.

`explain` maps exceptions of the HTTP, TLS and socket libraries to KubeErrors, so that a cause has the same
description for every request. `ClockCheck` compares the local clock with the Date header of each response:
a wrong clock makes certificates invalid and tokens expired, which looks like other failures. A mismatch is
only logged.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from pykubelet import KUBERNETES_VERSION
from pykubelet.apiserver.connection_pool import (
    IDLE_TIMEOUT_SECONDS,
    ConnectionClosed,
    ConnectionPool,
    ConnectTimeout,
    ResponseTruncated,
    SharedResolver,
)
from pykubelet.apiserver.credentials import Credentials, CredentialSource
from pykubelet.apiserver.errors import (
    InvalidResponse,
    KubeconfigError,
    KubeError,
    Superseded,
    TimedOut,
    TlsError,
    Unreachable,
)
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.proxy import SocksConnector, is_socks, proxy_from_environment, proxy_problem
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.tls import explain_tls
from pykubelet.linux.host_info import architecture
from pykubelet.logs import get_logger
from pykubelet.tracing.span import current_span
from pykubelet.transport.http1 import HttpProtocolError
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
TOLERANCE_SECONDS = 60.0
"""Tolerated clock difference in seconds: slow responses shift it, and it does no harm."""
INTERVAL_SECONDS = 10.0
"""Minimum seconds between two checks."""


class ClockOffError(Exception):
    """The two clocks differ; `ahead` is in seconds, negative if the local clock is behind."""

    def __init__(self, ahead: float) -> None:
        super().__init__(ahead)
        self.ahead = ahead

    def __str__(self) -> str:
        which = "ahead of" if self.ahead > 0 else "behind"
        off = timedelta(seconds=round(abs(self.ahead)))
        return f"it is {off} {which} the API server's clock: correct whichever is wrong, or run an NTP client"


class ClockCheck:
    """Check of the local clock against the API server's; `clock` returns Unix time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = 0.0
        self._error_log = ErrorLogLimiter(log, "Host clock may be wrong")

    def check_date(self, date: str, now: float) -> None:
        """Check the `Date` header of a response just received; `now` is of a monotonic clock."""
        if now < self._next or not date:
            return
        self._next = now + INTERVAL_SECONDS
        try:
            ahead = self._clock() - parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        if abs(ahead) > TOLERANCE_SECONDS:
            self._error_log.failed(ClockOffError(ahead), now)
        else:
            self._error_log.succeeded(now)


FAILURES = (aiohttp.ClientError, OSError, TimeoutError, HttpProtocolError)
"""Exceptions that a request can raise."""


def explain(err: BaseException, access: RestConfig, certificate_problem: str = "") -> KubeError:
    """Return the KubeError for an exception of the HTTP, TLS or socket library.

    `certificate_problem` is the known problem of the client certificate, if there is one.
    """
    server = access.server
    hint = f" ({certificate_problem})" if certificate_problem else ""
    if (tls := _find_tls(err)) is not None:
        name = access.tls_server_name or urlsplit(server).hostname or server
        why = explain_tls(tls, name)
        return TlsError(server, why + hint)
    if isinstance(err, aiohttp.ClientHttpProxyError):
        return Unreachable(server, f"the proxy refused with {err.status} {err.message}".rstrip())
    if isinstance(err, aiohttp.ClientProxyConnectionError):
        return Unreachable(server, f"the proxy cannot be reached: {_message(err.os_error)}")
    if isinstance(err, aiohttp.ClientConnectorDNSError):
        return Unreachable(server, f"the name {err.host} cannot be resolved: {_message(err.os_error)}")
    if isinstance(err, socket.gaierror):
        return Unreachable(
            server, f"the name {urlsplit(server).hostname} cannot be resolved: {_message(err)}"
        )
    if isinstance(err, aiohttp.ConnectionTimeoutError | ConnectTimeout):
        return TimedOut(server, "no connection could be made in time")
    if isinstance(err, TimeoutError):
        return TimedOut(server, "there was no answer in time")
    if isinstance(err, aiohttp.ClientConnectorError):
        return Unreachable(server, _message(err.os_error))
    if isinstance(err, aiohttp.ClientPayloadError | ResponseTruncated):
        return Unreachable(server, "the connection broke in the middle of an answer")
    if isinstance(err, aiohttp.ServerDisconnectedError | ConnectionClosed):
        return Unreachable(server, f"the connection was closed without an answer{hint}")
    if isinstance(err, aiohttp.ClientResponseError | HttpProtocolError):
        message = err.message if isinstance(err, aiohttp.ClientResponseError) else err
        return InvalidResponse(f"{server} does not answer as an API server does: {message}")
    if isinstance(err, OSError):
        # A server that rejects the client certificate may close the connection before its alert arrives.
        return Unreachable(server, _message(err) + hint)
    return Unreachable(server, str(err) or type(err).__name__)


def _find_tls(err: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error among the causes; alerts of the server arrive late, with the first response."""
    while err is not None:
        # aiohttp's own TLS errors derive from ssl.SSLError, but lack its attributes.
        if isinstance(err, ssl.SSLError) and not isinstance(err, aiohttp.ClientError):
            return err
        err = err.__cause__
    return None


def _message(err: OSError) -> str:
    return (err.strerror or str(err) or type(err).__name__).strip()


USER_AGENT = f"kubelet/{KUBERNETES_VERSION} (linux/{architecture()}) pykubelet"
CONNECT_SECONDS = 30.0

# Less than the API server's own 90 s and than common load balancer timeouts, so that the peer rarely closes a
# connection just when it is used.
_IDLE_SECONDS = IDLE_TIMEOUT_SECONDS

# A dead peer is detected after 15 + 3 x 10 seconds without traffic.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
)


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its complete body; header names are lower case."""

    code: int
    headers: Mapping[str, str]
    body: bytes


class StreamingResponse:
    """A response whose body is read completely or in chunks.

    Deadlines are in loop time.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, failed: Callable[[BaseException], Exception]
    ) -> None:
        self.code = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response
        self._failed = failed

    async def read(self, max_bytes: int, deadline: float | None = None) -> bytes:
        """Read the body. Raises InvalidResponse if longer than `max_bytes`, Unreachable if truncated."""
        body = bytearray()
        while chunk := await self.chunk(deadline):
            body += chunk
            if len(body) > max_bytes:
                raise InvalidResponse(
                    f"{self._response.url.path}: the answer is longer than {max_bytes} bytes"
                )
        return bytes(body)

    async def chunk(self, deadline: float | None = None) -> bytes:
        """Wait for the next chunk of the body; empty at its end. Raises Unreachable, TimedOut."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._response.content.readany()
        except FAILURES as err:
            raise self._failed(err) from err


class Chunks:
    """Async iterator over the chunks of a body. Raises TimedOut at the deadline."""

    def __init__(self, response: StreamingResponse, deadline: float) -> None:
        self._response = response
        self._deadline = deadline

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if chunk := await self._response.chunk(self._deadline):
            return chunk
        raise StopAsyncIteration


class Transport:
    """Transport to one API server, used as an async context manager."""

    def __init__(
        self,
        access: RestConfig,
        *,
        metrics: RestMetrics | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
        user_agent: str = USER_AGENT,
    ) -> None:
        self.access = access
        self.host = urlsplit(access.server).netloc
        self.credentials = CredentialSource(access, environ=environ, clock=clock, metrics=metrics)
        self._clock_check = ClockCheck(clock)
        self._metrics = metrics
        self._proxy = access.proxy or proxy_from_environment(access.server, environ)
        if self._proxy and (problem := proxy_problem(self._proxy)):
            raise KubeconfigError(f"the proxy for {access.server} in the environment {problem}")
        self._socks = self._proxy if is_socks(self._proxy) else ""
        self._headers = {"User-Agent": user_agent, "Accept": "application/json"}
        if not access.compression:
            self._headers["Accept-Encoding"] = "identity"
        self._resolver = SharedResolver()
        self._pools: list[_Pool] = []
        self._reachable = True
        self._recovery = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_all()

    async def fetch(
        self,
        credentials: Credentials,
        method: str,
        path: str,
        *,
        params: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        content_type: str = "application/json",
        deadline: float,
        max_bytes: int,
    ) -> Response:
        """Send a request and return its complete response. Raises Unreachable, TimedOut, InvalidResponse.

        `deadline` is the loop time at which the response must be complete.
        """
        if method == "GET" or self._proxy:
            async with self.request(
                credentials,
                method,
                path,
                params=params,
                body=body,
                content_type=content_type,
                deadline=deadline,
            ) as response:
                return Response(response.code, response.headers, await response.read(max_bytes, deadline))
        headers = self._request_headers(credentials, body, content_type)
        async with self._using(credentials) as pool:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout_at(deadline):
                    reader = await pool.connections.request(method, path, params, headers, body, max_bytes)
            except FAILURES as err:
                self._failed(method, started_at, body)
                raise self._explain(err) from err
            self._record_response(method, reader.status, reader.headers.get("date", ""), started_at, body)
            return Response(reader.status, reader.headers, bytes(reader.body))

    @asynccontextmanager
    async def request(
        self,
        credentials: Credentials,
        method: str,
        path: str,
        *,
        params: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        content_type: str = "application/json",
        deadline: float | None = None,
        stream: bool = False,
    ) -> AsyncIterator[StreamingResponse]:
        """Send a request and yield its response without the body. Raises Unreachable and InvalidResponse.

        `deadline` is the loop time at which the headers must have arrived. A stream is closed when the
        certificates change.
        """
        headers = self._request_headers(credentials, body, content_type)
        async with self._using(credentials) as pool:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout_at(deadline):
                    response = await pool.session.request(
                        method,
                        self.access.server + path,
                        params=params,
                        headers=headers,
                        data=body,
                        proxy=None if self._socks else self._proxy or None,
                        ssl=credentials.context if credentials.context is not None else True,
                        server_hostname=self.access.tls_server_name or None,
                        allow_redirects=False,
                    )
            except FAILURES as err:
                self._failed(method, started_at, body)
                raise self._explain(err) from err
            self._record_response(method, response.status, response.headers.get("Date", ""), started_at, body)
            pool.open[response] = stream
            try:
                if stream and pool.retired:
                    raise Superseded(self.access.server)
                yield StreamingResponse(response, lambda err: self._stream_error(err, pool, stream))
            finally:
                del pool.open[response]
                # A response that was not read completely closes its connection.
                response.release() if response.content.at_eof() else response.close()

    async def close_all(self) -> None:
        """Close all connections; pending requests raise Unreachable."""
        pools, self._pools = self._pools, []
        for pool in pools:
            await pool.close()

    async def pause(self, seconds: float, least: float = 1.0) -> None:
        """Sleep; at most `least` seconds if the API server becomes reachable during the sleep."""
        recovery = self._recovery
        await asyncio.sleep(min(seconds, least))
        if seconds > least:
            try:
                async with asyncio.timeout(seconds - least):
                    await recovery.wait()
            except TimeoutError:
                return

    def _request_headers(
        self, credentials: Credentials, body: bytes | None, content_type: str
    ) -> list[tuple[str, str]]:
        headers = [*self._headers.items(), *credentials.headers]
        if (span := current_span()) is not None:
            headers.append(("Traceparent", span.context.traceparent))
        if body is not None:
            headers.append(("Content-Type", content_type))
        return headers

    @asynccontextmanager
    async def _using(self, credentials: Credentials) -> AsyncIterator[_Pool]:
        pool = self._pool(credentials.context)
        async with pool.using():
            await self._retire_outdated()
            if pool.closed:
                raise Unreachable(self.access.server, "all connections were closed meanwhile")
            yield pool

    def _pool(self, context: ssl.SSLContext | None) -> _Pool:
        if not self._pools or self._pools[-1].context is not context:
            connections = ConnectionPool(
                self.access.server,
                context,
                self.access.tls_server_name,
                resolve=self._resolver.addresses,
                new_socket=_new_socket,
                idle_seconds=_IDLE_SECONDS,
                connect_seconds=CONNECT_SECONDS,
            )
            self._pools.append(_Pool(context, self._connector(), connections))
        return self._pools[-1]

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socks:
            return SocksConnector(self._socks, self._resolver, _set_options, keepalive_timeout=_IDLE_SECONDS)
        # Neither a limit nor a DNS cache: with both, closing the connector makes aiohttp cancel its waiters,
        # and such a task ends silently without having been cancelled by its owner.
        return aiohttp.TCPConnector(
            limit=0,
            use_dns_cache=False,
            resolver=self._resolver,
            keepalive_timeout=_IDLE_SECONDS,
            socket_factory=_new_socket,
        )

    async def _retire_outdated(self) -> None:
        if len(self._pools) > 1:
            for pool in self._pools[:-1]:
                await pool.retire()
            self._pools = [pool for pool in self._pools if not pool.closed]

    def _failed(self, method: str, started_at: float, body: bytes | None) -> None:
        self._count(method, "<error>", started_at, body)
        self._reachable = False

    def _record_response(
        self, method: str, code: int, date: str, started_at: float, body: bytes | None
    ) -> None:
        self._count(method, str(code), started_at, body)
        self._clock_check.check_date(date, time.monotonic())
        if code == 401:
            # Equivalent to unreachable: waiters can retry as soon as the credentials are accepted again.
            self._reachable = False
        elif not self._reachable and code < 500:
            self._reachable = True
            self._recovery.set()
            self._recovery = asyncio.Event()

    def _count(self, method: str, code: str, started_at: float, body: bytes | None) -> None:
        if self._metrics is not None:
            self._metrics.answered(method, self.host, code, time.monotonic() - started_at, len(body or b""))

    def _stream_error(self, err: BaseException, pool: _Pool, stream: bool) -> Exception:
        return Superseded(self.access.server) if stream and pool.retired else self._explain(err)

    def _explain(self, err: BaseException) -> Exception:
        return explain(err, self.access, self.credentials.problem())


class _Pool:
    """Connections made with the same TLS context."""

    def __init__(
        self, context: ssl.SSLContext | None, connector: aiohttp.BaseConnector, connections: ConnectionPool
    ) -> None:
        self.context = context
        self.connections = connections
        self.open: dict[aiohttp.ClientResponse, bool] = {}
        """Responses being read, and whether they are streams."""
        self._users = 0
        self.retired = False
        self.session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
        )

    @property
    def closed(self) -> bool:
        return self.session.closed

    @asynccontextmanager
    async def using(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self.retired and self._users == 0:
                await self.close()

    async def retire(self) -> None:
        """Accept no new requests, close the streams, and close after the last request finishes."""
        self.retired = True
        for response, stream in tuple(self.open.items()):
            if stream:
                response.close()
        if self._users == 0:
            await self.close()

    async def close(self) -> None:
        # aiohttp wakes the waiters for response headers, but not the readers of a body.
        for response in tuple(self.open):
            response.close()
        self.connections.close()
        await self.session.close()


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    try:
        _set_options(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _set_options(made: socket.socket) -> None:
    for level, option, value in _SOCKET_OPTIONS:
        made.setsockopt(level, option, value)
