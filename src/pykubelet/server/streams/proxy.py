"""Streams of clients that are forwarded to the runtime's streaming server.

`StreamBridge` joins two connections: the client's, which aiohttp has accepted, and the runtime's. Bytes
are forwarded in the callback in which they arrive, without a task in between. Each direction applies
back-pressure, so that nothing accumulates in memory; an idle stream uses no CPU time, and is closed after
the idle timeout.

`proxy_stream` forwards unparsed bytes, the response of the runtime included. Error responses of the
runtime are returned to the client, except for redirects. The forwarded request is built here with only
the headers that the protocols need, never the client's credentials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError, split_protocols, without_tokens
from pykubelet.server.pipeline import is_upgrade
from pykubelet.transport.stream_upgrade import (
    StreamUnavailable,
    UpgradedConnection,
    UpgradeRejected,
    connect_upgraded,
)
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
FLUSH_SECONDS = 10.0
"""Seconds in which the runtime must read the input that a client sent before it disconnected."""
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
    runtime = await connect_or_http_error(
        url, request.headers[hdrs.UPGRADE], _forwarded_headers(request), method=request.method
    )
    await _Tunnel(request, runtime, idle_seconds).run()
    return TunnelledResponse()


async def connect_or_http_error(
    url: str, upgrade: str, headers: Iterable[tuple[str, str]], *, method: str
) -> UpgradedConnection:
    """Connect to the runtime's streaming server. Raises HttpError for the client if that fails."""
    try:
        return await connect_upgraded(url, upgrade, headers, method=method)
    except StreamUnavailable as err:
        log.error(err, "Failed to connect to the runtime's streaming server")
        # The cause may contain the URL, which is a credential.
        raise HttpError(500, f"the runtime's streaming server {str(err).partition(':')[0]}\n") from err
    except UpgradeRejected as err:
        if not 400 <= err.status < 600:
            raise HttpError(
                500, f"the runtime's streaming server answered with status {err.status}\n"
            ) from err
        raise HttpError(err.status, err.body) from err


class TunnelledResponse(web.StreamResponse):
    """Response of a request whose connection was taken over: nothing is left to send."""

    def __init__(self) -> None:
        super().__init__(status=101)
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send nothing."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Send nothing."""
        return


class ClientInput:
    """Input of a client whose WebSocket is established before the runtime is connected.

    Installed as aiohttp's parser; the first bytes are held, and the client waits, until a bridge is attached.
    """

    def __init__(self, request: web.Request) -> None:
        assert request.transport is not None
        self._client = request.transport
        self._held = b""
        self._discarding = False
        self._ended = asyncio.Event()
        self._bridge: StreamBridge | None = None
        request.protocol.set_parser(cast(Any, self))

    def attach(self, bridge: StreamBridge) -> None:
        """Pass the held bytes and all that follow to the bridge."""
        self._bridge = bridge
        if self._held:
            if not self._client.is_closing():
                self._client.resume_reading()
            bridge.feed_data(self._held)
            self._held = b""
        if self._ended.is_set():
            bridge.feed_eof()

    async def discard(self, seconds: float) -> None:
        """Discard the input until the client disconnects, at most for `seconds`.

        Input that is not read when the connection is closed would reset it, and the client would lose what
        was sent to it.
        """
        self._discarding = True
        if self._held and not self._client.is_closing():
            self._client.resume_reading()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Handle bytes of the client (called by aiohttp)."""
        if self._bridge is not None:
            return self._bridge.feed_data(data)
        if self._discarding:
            return False, b""
        self._held += data
        if not self._client.is_closing():
            self._client.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        """Handle the client's EOF (called by aiohttp)."""
        self._ended.set()
        if self._bridge is not None:
            self._bridge.feed_eof()


class StreamBridge(asyncio.Protocol):
    """Protocol of the runtime's connection, installed as aiohttp's parser of the client's bytes."""

    def __init__(self, request: web.Request, runtime: UpgradedConnection, idle_seconds: float) -> None:
        assert request.transport is not None
        self._request = request
        self._client: asyncio.Transport = request.transport
        self._connection = runtime
        self._runtime = runtime.transport
        self._idle_seconds = idle_seconds
        self._clock = asyncio.get_running_loop().time
        self._last_active = self._clock()
        self._ended = False
        self._state_changed = asyncio.Event()
        self._client_held = False
        self._client_backlog = False
        self._runtime_full = False
        self._runtime_held = False
        self._runtime_backlog = False
        self._client_full = False
        self._runtime_lost = False
        self._abort_timer: asyncio.TimerHandle | None = None

    async def run(self, client_input: ClientInput | None = None) -> None:
        """Forward the bytes received from the runtime so far and all that follow, until either side ends."""
        try:
            received, ended = await self._connection.take_over(self)
            if received:
                self.data_received(received)
            if ended:
                self.connection_lost(None)
            # From here on aiohttp passes received bytes to `feed_data` instead of parsing requests.
            if client_input is not None:
                client_input.attach(self)
            else:
                self._request.protocol.set_parser(cast(Any, self))
            if self._client_held:
                # aiohttp resumes reading when it has passed on what it had buffered.
                self._client.pause_reading()
            async with TaskScope() as scope:
                end_tasks = (
                    scope.start(self._flow(), name="stream-flow"),
                    scope.start(self._close_when_idle(), name="stream-idle"),
                )
                await asyncio.wait(end_tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = True
            self._close_runtime()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the runtime."""
        raise NotImplementedError

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Handle bytes of the client (called by aiohttp)."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the runtime's connection."""
        self._runtime_lost = True
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._end()

    def feed_eof(self) -> None:
        """Handle the client's EOF (called by aiohttp)."""
        self._close_runtime()

    def pause_writing(self) -> None:
        """Stop reading from the client because the runtime's buffer is full."""
        self._runtime_full = True
        self._update_reading()

    def resume_writing(self) -> None:
        """Resume reading from the client."""
        self._runtime_full = False
        self._update_reading()

    def _write_client(self, data: bytes) -> None:
        """Send bytes to the client; stop reading from the runtime while its buffer is full."""
        if self._client.is_closing():
            return
        self._client.write(data)
        if self._request.protocol.writing_paused:
            self._client_full = True
            self._update_reading()
            self._state_changed.set()

    def _write_runtime(self, data: bytes | bytearray) -> None:
        # Bytes for a runtime that has just disconnected are dropped.
        if not self._runtime.is_closing():
            self._runtime.write(data)

    def _update_reading(self) -> None:
        """Pause or resume reading of both sides."""
        held = self._runtime_full or self._client_backlog
        if held != self._client_held and not self._client.is_closing():
            self._client_held = held
            (self._client.pause_reading if held else self._client.resume_reading)()
        held = self._client_full or self._runtime_backlog
        if held != self._runtime_held and not self._runtime.is_closing():
            self._runtime_held = held
            (self._runtime.pause_reading if held else self._runtime.resume_reading)()

    def _close_runtime(self) -> None:
        """Close the runtime's connection when it has read what was sent, or after FLUSH_SECONDS."""
        self._runtime.close()
        if self._abort_timer is None and not self._runtime_lost:
            loop = asyncio.get_running_loop()
            self._abort_timer = loop.call_later(FLUSH_SECONDS, self._runtime.abort)

    def _end(self) -> None:
        self._ended = True
        self._state_changed.set()

    async def _flow(self) -> None:
        """Resume reading from the runtime when the client's buffer drains; return when all is sent."""
        # Caught here: TaskScope would raise it as an exception group, which callers do not handle.
        with suppress(ConnectionError):
            while not self._ended:
                await self._state_changed.wait()
                self._state_changed.clear()
                await self._request.writer.drain()
                self._client_drained()
            # A closing connection is aborted after a few seconds, too few for a slow client: drain first.
            self._client.set_write_buffer_limits(high=1, low=0)
            await self._request.writer.drain()
            await self._linger()

    def _client_drained(self) -> None:
        self._client_full = False
        self._update_reading()

    async def _linger(self) -> None:
        """Wait, after all is sent, for the client to close."""

    async def _close_when_idle(self) -> None:
        """Close the stream when nothing was received for the idle timeout."""
        while True:
            remaining = self._last_active + self._idle_seconds - self._clock()
            if remaining <= 0:
                break
            await asyncio.sleep(wait_seconds(remaining))
        log.v(2).info("Closing idle stream", seconds=self._idle_seconds)
        self._on_idle()
        self._runtime.abort()

    def _on_idle(self) -> None:
        """Handle the idle timeout, before the connections are closed."""


class _Tunnel(StreamBridge):
    """Bridge that forwards bytes as they are."""

    async def run(self, client_input: ClientInput | None = None) -> None:
        self._write_client(self._connection.head)
        await super().run(client_input)

    def data_received(self, data: bytes) -> None:
        self._last_active = self._clock()
        self._write_client(data)

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._last_active = self._clock()
        self._write_runtime(data)
        return False, b""


def _forwarded_headers(request: web.Request) -> list[tuple[str, str]]:
    found = [(name, value) for name in _FORWARDED_HEADERS for value in request.headers.getall(name, [])]
    protocols = without_tokens(split_protocols(request.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, [])))
    if protocols:
        found.append((hdrs.SEC_WEBSOCKET_PROTOCOL, ", ".join(protocols)))
    return found
