"""Handing a client's connection on to the runtime's streaming server, byte for byte.

The client asks to speak another protocol (SPDY or WebSocket); the runtime does, so its answer and all that
follows is passed on without being looked at. Both directions wait for the slower side, so that nothing
piles up here however much is sent. The runtime's refusals are passed on as answers, except for redirects:
following one would carry the client's wish somewhere else (CVE-2020-8559).

What is sent on is made here: of the client's headers only those that the protocols need, never its
credentials.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
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
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

_PATIENCE_SECONDS = 30.0
_GULP = 256 * 1024
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
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection(where.hostname, port, ssl=tls, limit=_GULP)
    except (OSError, TimeoutError) as err:
        log.error(err, "The runtime's streaming server cannot be reached", host=where.netloc)
        raise Refused(500, "the runtime's streaming server cannot be reached\n") from err
    try:
        target = where.path + (f"?{where.query}" if where.query else "")
        writer.write(_head(request, target, where.netloc))
        async with asyncio.timeout(_PATIENCE_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        status = _status(head)
        if status != 101:
            raise await _refusal(status, head, reader)
        await _Tunnel(request, reader, writer, idle_seconds).run(head)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        log.v(2).info("The runtime's streaming server did not answer", err=err)
        raise Refused(500, "the runtime's streaming server did not answer\n") from err
    finally:
        writer.close()
    return _Done()


class _Done(web.StreamResponse):
    """The answer to a request whose connection was handed on: everything has been said."""

    def __init__(self) -> None:
        super().__init__(status=101)
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Tunnel:
    def __init__(
        self,
        request: web.Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle_seconds: float,
    ) -> None:
        assert request.transport is not None
        self._client: asyncio.Transport = request.transport
        self._request = request
        self._reader = reader
        self._writer = writer
        self._idle_seconds = idle_seconds
        self._clock = asyncio.get_running_loop().time
        self._active = self._clock()

    async def run(self, head: bytes) -> None:
        inlet = _Inlet(self._client)
        # From here on aiohttp hands over what comes instead of reading requests in it.
        self._request.protocol.set_parser(cast(Any, inlet))
        async with TaskScope() as scope:
            scope.start(self._up(inlet), name="tunnel-up")
            scope.start(self._close_when_idle(), name="tunnel-idle")
            # Inside the scope: what leaves a scope is a group, which nobody would know for a lost client.
            with suppress(ConnectionError):
                await self._send(head)
                while data := await self._reader.read(_GULP):
                    await self._send(data)

    async def _send(self, data: bytes) -> None:
        self._active = self._clock()
        self._client.write(data)
        await self._request.writer.drain()

    async def _up(self, inlet: _Inlet) -> None:
        with suppress(ConnectionError):
            while data := await inlet.take():
                self._active = self._clock()
                self._writer.write(data)
                await self._writer.drain()
        self._writer.close()

    async def _close_when_idle(self) -> None:
        while True:
            left = self._active + self._idle_seconds - self._clock()
            if left <= 0:
                break
            await asyncio.sleep(left)
        log.v(2).info("Closing a stream on which nothing came", seconds=self._idle_seconds)
        self._writer.close()


class _Inlet:
    """What the client sends, until it is taken; when too much waits, the client has to."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._held = False
        self._ended = False
        self._news = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take what came (aiohttp calls this)."""
        self._chunks.append(data)
        self._size += len(data)
        self._news.set()
        if self._size > _GULP and not self._held:
            self._held = True
            self._client.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        """Nothing more will come (aiohttp calls this)."""
        self._ended = True
        self._news.set()

    async def take(self) -> bytes:
        """Give what came since; empty at the end."""
        while not self._chunks and not self._ended:
            self._news.clear()
            await self._news.wait()
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._held and not self._client.is_closing():
            self._held = False
            self._client.resume_reading()
        return data


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
