"""`/exec`, `/attach` and `/portForward`, proxied to the runtime's streaming server; limits on streams.

The CRI call (Exec, Attach, PortForward) returns a URL that is valid once, for a minute. The client's
connection is tunnelled to it; the URL is never sent to the client.

The client requests an upgrade to SPDY or WebSocket, which the runtime implements, so its response and all
that follows is forwarded unparsed. Each direction applies back-pressure, so that nothing accumulates in
memory; an idle stream uses no CPU time. Error responses of the runtime are returned to the client,
except for redirects: following one would send the client's request to another host (CVE-2020-8559). The
forwarded request is built here with only the headers that the protocols need, never the client's credentials.

`StreamLimits` bounds the long-running responses (followed logs, exec, attach, port-forward), in total and per
user; a request above the limit gets 429.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from multidict import MultiMapping

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.logs import get_logger
from pykubelet.server.identity import HttpError, split_protocols, without_tokens
from pykubelet.server.lookup import PodLookup, find_container, runtime_http_error
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.pipeline import is_upgrade, is_websocket, user_name
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
_RUNTIME_TIMEOUT_SECONDS = 30.0
_MAX_HEAD_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})\r\n", re.IGNORECASE)
_FORWARDED_HEADERS = (
    "X-Stream-Protocol-Version",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Version",
    "Sec-WebSocket-Extensions",
)


async def proxy_stream(request: web.Request, url: str, *, idle_seconds: float) -> web.StreamResponse:
    """Tunnel the client to the runtime's stream at `url` until either side closes it or it is idle too long.

    Raises HttpError if the stream cannot be established.
    """
    if not is_upgrade(request):
        raise HttpError(500, "Upgrade request required\n")
    stream_url = urlsplit(url)
    if stream_url.scheme not in ("http", "https") or stream_url.hostname is None:
        raise HttpError(500, "the runtime's streaming server has an address that is none\n")
    tls = ssl.create_default_context() if stream_url.scheme == "https" else None
    port = stream_url.port or (443 if tls else 80)
    reader = _Reader(limit=_MAX_HEAD_BYTES)
    try:
        async with asyncio.timeout(_RUNTIME_TIMEOUT_SECONDS):
            runtime, _ = await asyncio.get_running_loop().create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), stream_url.hostname, port, ssl=tls
            )
    except (OSError, TimeoutError) as err:
        log.error(err, "Failed to connect to the runtime's streaming server", host=stream_url.netloc)
        raise HttpError(500, "the runtime's streaming server cannot be reached\n") from err
    try:
        target = stream_url.path + (f"?{stream_url.query}" if stream_url.query else "")
        runtime.write(_head(request, target, stream_url.netloc))
        async with asyncio.timeout(_RUNTIME_TIMEOUT_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        status = _status(head)
        if status != 101:
            raise await _runtime_error(status, head, reader)
        tunnel = _Tunnel(request, runtime, idle_seconds)
        runtime.set_protocol(tunnel)
        await tunnel.run(head + await reader.rest(), reader.ended)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        log.v(2).info("Failed to read the response of the runtime's streaming server", err=err)
        raise HttpError(500, "the runtime's streaming server did not answer\n") from err
    finally:
        runtime.close()
    return _TunnelledResponse()


class _Reader(asyncio.StreamReader):
    """Reader of the runtime's response head; `rest` returns the bytes received after it."""

    ended = False
    """Whether the runtime has sent EOF."""

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()

    async def rest(self) -> bytes:
        super().feed_eof()
        return await self.read()


class _TunnelledResponse(web.StreamResponse):
    """Response of a tunnelled request: nothing is left to send."""

    def __init__(self) -> None:
        super().__init__(status=101)
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Tunnel(asyncio.Protocol):
    """Protocol of the runtime's connection, installed as aiohttp's parser of the client's bytes.

    Bytes are forwarded in the callback in which they arrive, without a task in between.
    """

    def __init__(self, request: web.Request, runtime: asyncio.Transport, idle_seconds: float) -> None:
        assert request.transport is not None
        self._client: asyncio.Transport = request.transport
        self._request = request
        self._runtime = runtime
        self._idle_seconds = idle_seconds
        self._clock = asyncio.get_running_loop().time
        self._last_active = self._clock()
        self._ended = False
        self._state_changed = asyncio.Event()

    async def run(self, received: bytes, ended: bool) -> None:
        """Forward the bytes received from the runtime so far and all that follow, until either side ends."""
        self.data_received(received)
        if ended:
            self.connection_lost(None)
        # From here on aiohttp passes received bytes to `feed_data` instead of parsing requests.
        self._request.protocol.set_parser(cast(Any, self))
        async with TaskScope() as scope:
            end_tasks = (
                scope.start(self._flow(), name="tunnel-flow"),
                scope.start(self._close_when_idle(), name="tunnel-idle"),
            )
            await asyncio.wait(end_tasks, return_when=asyncio.FIRST_COMPLETED)

    def data_received(self, data: bytes) -> None:
        """Forward bytes to the client; stop reading from the runtime while the client's buffer is full."""
        self._last_active = self._clock()
        if self._client.is_closing():
            return
        self._client.write(data)
        if self._request.protocol.writing_paused:
            self._runtime.pause_reading()
            self._state_changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the runtime's connection."""
        self._ended = True
        self._state_changed.set()

    def pause_writing(self) -> None:
        """Stop reading from the client because the runtime's buffer is full."""
        self._client.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the client."""
        self._client.resume_reading()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Forward bytes to the runtime (called by aiohttp)."""
        self._last_active = self._clock()
        # Bytes for a runtime that has just disconnected are dropped.
        if not self._runtime.is_closing():
            self._runtime.write(data)
        return False, b""

    def feed_eof(self) -> None:
        """Handle the client's EOF (called by aiohttp)."""
        self._runtime.close()

    async def _flow(self) -> None:
        """Resume reading from the runtime when the client's buffer drains; return when all is sent."""
        # Caught here: TaskScope would raise it as an exception group, which callers do not handle.
        with suppress(ConnectionError):
            while not self._ended:
                await self._state_changed.wait()
                self._state_changed.clear()
                await self._request.writer.drain()
                self._runtime.resume_reading()
            # A closing connection is aborted after a few seconds, too few for a slow client: drain first.
            self._client.set_write_buffer_limits(high=1, low=0)
            await self._request.writer.drain()

    async def _close_when_idle(self) -> None:
        """Close the stream when no byte was received for the idle timeout."""
        while True:
            remaining = self._last_active + self._idle_seconds - self._clock()
            if remaining <= 0:
                break
            await asyncio.sleep(wait_seconds(remaining))
        log.v(2).info("Closing idle stream", seconds=self._idle_seconds)
        self._runtime.abort()


def _head(request: web.Request, target: str, host: str) -> bytes:
    lines = [f"{request.method} {target or '/'} HTTP/1.1", f"Host: {host}", "Connection: Upgrade"]
    lines.append(f"Upgrade: {request.headers[hdrs.UPGRADE]}")
    for name in _FORWARDED_HEADERS:
        lines += [f"{name}: {value}" for value in request.headers.getall(name, [])]
    protocols = without_tokens(split_protocols(request.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, [])))
    if protocols:
        lines.append(f"Sec-WebSocket-Protocol: {', '.join(protocols)}")
    if request.method not in ("GET", "HEAD"):
        lines.append("Content-Length: 0")
    return _crlf(lines)


def _crlf(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("utf-8", "surrogateescape")


def _status(head: bytes) -> int:
    fields = head[:_MAX_HEAD_BYTES].split(b"\r\n", 1)[0].split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


async def _runtime_error(status: int, head: bytes, reader: asyncio.StreamReader) -> HttpError:
    if not 400 <= status < 600:
        return HttpError(500, f"the runtime's streaming server answered with status {status}\n")
    body = b""
    length = _LENGTH.search(head)
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_RUNTIME_TIMEOUT_SECONDS):
            if length is not None:
                body = await reader.readexactly(min(int(length[1]), _MAX_ERROR_BYTES))
            else:
                body = await reader.read(_MAX_ERROR_BYTES)
    return HttpError(status, body.decode(errors="replace"))


MAX_STREAMS = 800

# The API server is one user and sends the requests of all cluster users, so this is most of `MAX_STREAMS`.
MAX_STREAMS_PER_USER = 600


class StreamLimits:
    """Limits on concurrent streams, in total and per user."""

    def __init__(self, max_streams: int = MAX_STREAMS, max_per_user: int = MAX_STREAMS_PER_USER) -> None:
        self._max_streams = max_streams
        self._max_per_user = max_per_user
        self._open: Counter[str] = Counter()

    @contextmanager
    def acquire(self, user: str) -> Iterator[None]:
        """Acquire a stream slot until the block ends. Raises HttpError (429) if none is free."""
        if self._open.total() >= self._max_streams or self._open[user] >= self._max_per_user:
            raise HttpError(429, "Too many streams are open, try again later\n", {"Retry-After": "1"})
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]


@dataclass(frozen=True, slots=True)
class RemoteCommandOptions:
    """Streams that an exec or attach request selects."""

    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> RemoteCommandOptions:
        """Parse the options from a query. Raises HttpError (400) if no stream is selected."""
        stdin, stdout, stderr, tty = (query.get(key) == "1" for key in ("input", "output", "error", "tty"))
        # A TTY merges stdout and stderr.
        stderr = stderr and not tty
        if not (stdin or stdout or stderr):
            raise HttpError(400, "you must specify at least 1 of stdin, stdout, stderr")
        return cls(stdin, stdout, stderr, tty)


def parse_ports(query: MultiMapping[str]) -> list[int]:
    """Return the ports in the query of a WebSocket client. Raises HttpError (400)."""
    found = query.getall("port", [])
    if not found:
        raise HttpError(400, 'query parameter "port" is required')
    ports = []
    for text in ",".join(found).split(","):
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise HttpError(400, f'unable to parse "{text}" as a port')
        ports.append(int(text))
    return ports


class StreamingEndpoints:
    """Endpoints `/exec`, `/attach` and `/portForward`."""

    def __init__(
        self, lookup: PodLookup, limits: StreamLimits, metrics: ServerMetrics, *, idle_seconds: float
    ) -> None:
        self._lookup = lookup
        self._limits = limits
        self._metrics = metrics
        self._idle_seconds = idle_seconds

    def routes(self) -> list[web.RouteDef]:
        """Return all routes, with and without the pod's UID, for SPDY (POST) and WebSocket (GET)."""
        pod, container = "/{namespace}/{pod}", "/{container}"
        endpoints = [
            ("/exec", self._exec, [pod + container, pod + "/{uid}" + container]),
            ("/attach", self._attach, [pod + container, pod + "/{uid}" + container]),
            ("/portForward", self._port_forward, [pod, pod + "/{uid}"]),
        ]
        return [
            method(root + path, handler)
            for root, handler, paths in endpoints
            for path in paths
            for method in (_get, web.post)
        ]

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        options = RemoteCommandOptions.from_query(request.query)
        pod = self._pod(request)

        async def prepare() -> str:
            container = await self._running_container(request, pod, 'container not found ("{}")')
            return await self._lookup.runtime.exec(
                pb.ExecRequest(
                    container_id=container,
                    cmd=request.query.getall("command", []),
                    tty=options.tty,
                    stdin=options.stdin,
                    stdout=options.stdout,
                    stderr=options.stderr,
                )
            )

        return await self._stream(request, "exec", prepare)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        options = RemoteCommandOptions.from_query(request.query)
        pod = self._pod(request)

        async def prepare() -> str:
            missing = f"container {{}} not found in pod {pod.metadata.name}_{pod.metadata.namespace}"
            container = await self._running_container(request, pod, missing)
            spec = find_container(pod, request.match_info["container"])
            if spec is None:
                raise HttpError(500, missing.format(request.match_info["container"]))
            # The TTY of the process was fixed when it was started.
            return await self._lookup.runtime.attach(
                pb.AttachRequest(
                    container_id=container,
                    tty=spec.tty,
                    stdin=options.stdin,
                    stdout=options.stdout,
                    stderr=options.stderr and not spec.tty,
                )
            )

        return await self._stream(request, "attach", prepare)

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        ports = parse_ports(request.query) if is_websocket(request) else []
        pod = self._pod(request)
        if not self._lookup.matches_uid(pod, request.match_info.get("uid", "")):
            raise HttpError(404, "pod not found")

        async def prepare() -> str:
            sandbox = await self._lookup.ready_sandbox(pod)
            if sandbox is None:
                raise HttpError(500, f'pod not found ("{pod.metadata.name}_{pod.metadata.namespace}")')
            return await self._lookup.runtime.port_forward(
                pb.PortForwardRequest(pod_sandbox_id=sandbox, port=ports)
            )

        return await self._stream(request, "portforward", prepare)

    async def _stream(
        self, request: web.Request, name: str, prepare: Callable[[], Awaitable[str]]
    ) -> web.StreamResponse:
        with self._limits.acquire(user_name(request)):
            try:
                url = await prepare()
            except CriError as err:
                raise runtime_http_error(err) from err
            if is_websocket(request):
                self._metrics.websocket(name)
            return await proxy_stream(request, url, idle_seconds=self._idle_seconds)

    def _pod(self, request: web.Request) -> Pod:
        pod = self._lookup.pod(request.match_info["namespace"], request.match_info["pod"])
        if pod is None:
            raise HttpError(404, "pod does not exist")
        return pod

    async def _running_container(self, request: web.Request, pod: Pod, missing: str) -> str:
        name = request.match_info["container"]
        if self._lookup.matches_uid(pod, request.match_info.get("uid", "")):
            container = await self._lookup.running_container(pod, name)
            if container is not None:
                return container
        raise HttpError(500, missing.format(name))


def _get(path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.RouteDef:
    return web.get(path, handler, allow_head=False)
