"""Handing a client's connection on to the runtime's streaming server, byte for byte.

The client asks to speak another protocol (SPDY or WebSocket); the runtime does, so its answer and all that
follows is passed on without being looked at. Whoever sends has to wait while the other side does not take
it, so that nothing piles up here however much is sent; a stream on which nothing comes costs nothing. The
runtime's refusals are passed on as answers, except for redirects: following one would carry the client's
wish somewhere else (CVE-2020-8559).

What is sent on is made here: of the client's headers only those that the protocols need, never its
credentials.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from pykubelet.logs import get_logger
from pykubelet.server.identity import split_protocols, without_tokens
from pykubelet.server.pipeline import is_upgrade
from pykubelet.server.refused import Refused
from pykubelet.tasks import TaskScope, wait_seconds

log = get_logger(__name__)

_PATIENCE_SECONDS = 30.0
_LONGEST_HEAD = 64 * 1024
_LONGEST_REFUSAL = 64 * 1024
_LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})\r\n", re.IGNORECASE)
_PASSED_ON = (
    "X-Stream-Protocol-Version",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Version",
    "Sec-WebSocket-Extensions",
)


async def pass_through(request: web.Request, url: str, *, idle_seconds: float) -> web.StreamResponse:
    """Connect the client to the runtime's stream at `url` until one of them ends it, or nothing comes.

    Raises Refused when that does not come about.
    """
    if not is_upgrade(request):
        raise Refused(500, "Upgrade request required\n")
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or where.hostname is None:
        raise Refused(500, "the runtime's streaming server has an address that is none\n")
    tls = ssl.create_default_context() if where.scheme == "https" else None
    port = where.port or (443 if tls else 80)
    reader = _Reader(limit=_LONGEST_HEAD)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            runtime, _ = await asyncio.get_running_loop().create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), where.hostname, port, ssl=tls
            )
    except (OSError, TimeoutError) as err:
        log.error(err, "The runtime's streaming server cannot be reached", host=where.netloc)
        raise Refused(500, "the runtime's streaming server cannot be reached\n") from err
    try:
        target = where.path + (f"?{where.query}" if where.query else "")
        runtime.write(_head(request, target, where.netloc))
        async with asyncio.timeout(_PATIENCE_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        status = _status(head)
        if status != 101:
            raise await _refusal(status, head, reader)
        tunnel = _Tunnel(request, runtime, idle_seconds)
        runtime.set_protocol(tunnel)
        await tunnel.run(head + await reader.rest(), reader.ended)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        log.v(2).info("The runtime's streaming server did not answer", err=err)
        raise Refused(500, "the runtime's streaming server did not answer\n") from err
    finally:
        runtime.close()
    return _Done()


class _Reader(asyncio.StreamReader):
    """Reads the runtime's answer, and gives what came behind it when another takes over."""

    ended = False
    """Whether the runtime has sent everything."""

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()

    async def rest(self) -> bytes:
        super().feed_eof()
        return await self.read()


class _Done(web.StreamResponse):
    """The answer to a request whose connection was handed on: everything has been said."""

    def __init__(self) -> None:
        super().__init__(status=101)
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Tunnel(asyncio.Protocol):
    """The runtime's side of the connection; aiohttp takes it for the parser of what the client sends.

    Bytes are handed over in the moment in which they come; there is no task in their way.
    """

    def __init__(self, request: web.Request, runtime: asyncio.Transport, idle_seconds: float) -> None:
        assert request.transport is not None
        self._client: asyncio.Transport = request.transport
        self._request = request
        self._runtime = runtime
        self._idle_seconds = idle_seconds
        self._clock = asyncio.get_running_loop().time
        self._active = self._clock()
        self._ended = False
        self._news = asyncio.Event()

    async def run(self, begun: bytes, ended: bool) -> None:
        """Hand over what the runtime has said already and all that follows, until one side ends."""
        self.data_received(begun)
        if ended:
            self.connection_lost(None)
        # From here on aiohttp hands over what comes instead of reading requests in it.
        self._request.protocol.set_parser(cast(Any, self))
        async with TaskScope() as scope:
            ways_to_end = (
                scope.start(self._flow(), name="tunnel-flow"),
                scope.start(self._idle(), name="tunnel-idle"),
            )
            await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)

    def data_received(self, data: bytes) -> None:
        """Hand on what the runtime says; while the client does not take it, the runtime has to wait."""
        self._active = self._clock()
        if self._client.is_closing():
            return
        self._client.write(data)
        if self._request.protocol.writing_paused:
            self._runtime.pause_reading()
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The runtime has ended the stream."""
        self._ended = True
        self._news.set()

    def pause_writing(self) -> None:
        """The runtime does not take what the client says: the client has to wait."""
        self._client.pause_reading()

    def resume_writing(self) -> None:
        """The runtime takes it again."""
        self._client.resume_reading()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Hand on what the client says (aiohttp calls this)."""
        self._active = self._clock()
        # What is said to somebody who has just gone is said to nobody.
        if not self._runtime.is_closing():
            self._runtime.write(data)
        return False, b""

    def feed_eof(self) -> None:
        """The client has gone (aiohttp calls this)."""
        self._runtime.close()

    async def _flow(self) -> None:
        """Let the runtime go on whenever the client has taken enough; ends when it has everything."""
        # Caught here: what leaves a scope is a group, which nobody would know for a lost client.
        with suppress(ConnectionError):
            while not self._ended:
                await self._news.wait()
                self._news.clear()
                await self._request.writer.drain()
                self._runtime.resume_reading()
            # A connection that is being closed has seconds left, too few for a slow client.
            self._client.set_write_buffer_limits(high=1, low=0)
            await self._request.writer.drain()

    async def _idle(self) -> None:
        """Wait until nothing has come for too long."""
        while True:
            left = self._active + self._idle_seconds - self._clock()
            if left <= 0:
                break
            await asyncio.sleep(wait_seconds(left))
        log.v(2).info("Closing a stream on which nothing came", seconds=self._idle_seconds)
        self._runtime.abort()


def _head(request: web.Request, target: str, host: str) -> bytes:
    lines = [f"{request.method} {target or '/'} HTTP/1.1", f"Host: {host}", "Connection: Upgrade"]
    lines.append(f"Upgrade: {request.headers[hdrs.UPGRADE]}")
    for name in _PASSED_ON:
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
    words = head[:_LONGEST_HEAD].split(b"\r\n", 1)[0].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _refusal(status: int, head: bytes, reader: asyncio.StreamReader) -> Refused:
    if not 400 <= status < 600:
        return Refused(500, f"the runtime's streaming server answered with status {status}\n")
    body = b""
    length = _LENGTH.search(head)
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            if length is not None:
                body = await reader.readexactly(min(int(length[1]), _LONGEST_REFUSAL))
            else:
                body = await reader.read(_LONGEST_REFUSAL)
    return Refused(status, body.decode(errors="replace"))
