"""HTTP/2 connections on the `h2` library, with limits on everything that a client can make grow.

Streams send in turns, one frame each, as flow control allows; a client that does not read is not read from
either. Limits apply to streams (per connection and in total), header fields of a request, unread bodies,
unsent responses and useless frames (`frames.Budget`), and to the time spent on frames until the client has an
authorized request (`frames.ReadingTurns`).

A connection is registered in aiohttp's server like an HTTP/1.1 connection, for eviction and shutdown; it is
idle when no handler works on a request of it.

Imported with the first HTTP/2 connection, to save the memory of `h2`.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from time import perf_counter
from typing import Any, cast

from aiohttp import web
from aiohttp.tcp_helpers import tcp_keepalive
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import USER
from pykubelet.server.http2.frames import (
    DATA,
    GOAWAY,
    LONGEST_FRAME,
    PREFACE,
    BadFrames,
    Budget,
    BudgetExceeded,
    Frames,
    ReadingTurns,
)
from pykubelet.server.http2.headers import Malformed, RequestHead, UnsupportedRequest, request_head
from pykubelet.server.http2.stream import Stream, stream_server
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
MOST_STREAMS = 250
"""Maximum streams of one connection, as upstream."""
MOST_FIELD_BYTES = 64 * 1024
"""Maximum bytes of a request's fields: decoding is slow and happens before authentication."""
WINDOW = 64 * 1024 - 1
"""Flow control window: maximum unread bytes of a body."""


class H2State(H2Connection):
    """HTTP/2 protocol state of a connection, without I/O."""

    # Closed streams are remembered for frames that were sent before the client saw the end.
    MAX_CLOSED_STREAMS = 1000

    @property
    def open_inbound_streams(self) -> int:
        """Always 0: `Http2Connection` refuses excess streams, where h2 would close the connection."""
        # Evaluating the property makes h2 forget closed streams.
        _ = super().open_inbound_streams
        return 0

    def room(self, number: int) -> int:
        """Return how many bytes may be sent on a stream now; 0 or less if none."""
        return min(self.outbound_flow_control_window, self.streams[number].outbound_flow_control_window)

    def more(self, number: int, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Return the bytes to send for stream data that fits the window and is not the last.

        This is the common case; h2's own `send_data` takes half of the time of a long response.
        """
        size = len(data)
        self.outbound_flow_control_window -= size
        self.streams[number].outbound_flow_control_window -= size
        return [self.data_to_send(), struct.pack(">IBI", size << 8 | DATA, 0, number), data]


def make_wire() -> H2State:
    """Return the protocol state of a new connection."""
    settings = H2Configuration(
        client_side=False,
        header_encoding=None,
        # Fields are validated by `request_head`: a malformed request must not close the connection.
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
        # Fields of responses are built by `answer_head`.
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    wire = H2State(settings)
    wire.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
            SettingCodes.MAX_FRAME_SIZE: LONGEST_FRAME,
            SettingCodes.MAX_HEADER_LIST_SIZE: MOST_FIELD_BYTES,
        },
    )
    wire.decoder.max_header_list_size = MOST_FIELD_BYTES
    return wire


def goodbye(last: int) -> bytes:
    """Return a GOAWAY frame; h2 would not allow sending on open streams after its own."""
    return struct.pack(">IBIII", 8 << 8 | GOAWAY, 0, 0, last, ErrorCodes.NO_ERROR)


_TABLE_BYTES = 4096
_MUCH = 128 * 1024
_GULP = 128 * 1024
_BRIEFLY = 0.1

# Budget points: charge for a request that is reset before its response, and reward for a response.
_IN_VAIN = 20
_ANSWERED = 4


class Http2Connection(asyncio.Protocol):
    """Protocol of one HTTP/2 connection."""

    # Read by aiohttp's server; see `_current_request`.
    _task_handler = None

    def __init__(self, shared: Http2) -> None:
        self.transport: asyncio.Transport | None = None
        """None after the connection has ended."""
        self.streams: dict[int, Stream] = {}
        self.is_authorized = False
        """Whether a request was authorized."""
        self.reading_seconds = 0.0
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._budget = Budget(self._loop.time)
        self._frames = Frames(self._budget)
        self._wire = make_wire()
        self._ready: dict[Stream, None] = {}
        self._out: list[bytes | memoryview] = []
        self._at_work = 0
        self._paused = False
        self._held = False
        self._leaving = False
        self._pumping: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._active = self._loop.time()
        self._untold = 0
        self._over = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether no handler works on a request."""
        return self._at_work == 0

    @property
    def _current_request(self) -> object | None:
        """Not None unless idle, as in aiohttp's own connection."""
        return None if self.idle else self

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and send SETTINGS."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_MUCH)
        tcp_keepalive(self.transport)
        self._shared.server.connection_made(cast(web.RequestHandler, self), self.transport)
        self._shared.come(self)
        self._timer = self._loop.call_later(self._shared.idle_seconds, self._check_idle)
        self._wire.initiate_connection()
        self._wire.receive_data(PREFACE)
        self._pump()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Unregister the connection and end its streams."""
        self._shared.server.connection_lost(cast(web.RequestHandler, self), exc)
        self._end()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        try:
            self._frames.add(data)
        except BadFrames as err:
            self._fail(err)
            self._pump()
            return
        self._shared.turns.received(self)

    def pause_writing(self) -> None:
        """Stop reading until the client reads; its requests could grow the buffer without bound otherwise."""
        self._paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading and sending."""
        self._paused = False
        if self.transport is not None:
            if not self._held:
                self.transport.resume_reading()
            self._pump()

    # Called by `ReadingTurns`.

    @property
    def unread_bytes(self) -> int:
        """Bytes received and not handled yet."""
        return self._frames.unread_bytes

    def read_frames(self, seconds: float) -> bool:
        """Handle received frames for about `seconds`; return False if some may be left."""
        began, is_done = perf_counter(), True
        try:
            for frame in self._frames.complete():
                if self.transport is None:
                    return True
                if frame.kind == GOAWAY:
                    # The client opens no more streams; h2 would also end the open ones.
                    self._leaving = True
                    continue
                for event in self._wire.receive_data(frame.data):
                    self._take(event)
                if perf_counter() - began > seconds:
                    is_done = False
                    break
        except (BadFrames, H2Error) as err:
            self._fail(err)
        self._pump()
        return is_done or self.transport is None

    def hold(self) -> None:
        """Stop reading from the client."""
        self._held = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Resume reading from the client."""
        if self._held:
            self._held = False
            if self.transport is not None and not self._paused:
                self.transport.resume_reading()

    # Called by the server.

    def close(self) -> None:
        """Accept no new streams, and close when the open ones are done."""
        if self.transport is not None and not self._leaving:
            self._flush()
            self.transport.write(goodbye(self._wire.highest_inbound_stream_id))
            self._leaving = True
            self._pump()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Close the connection, with `timeout` seconds for requests in flight."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._over.wait()
        handlers = [stream.handler for stream in self.streams.values() if stream.handler is not None]
        await asyncio.gather(*(handler.shutdown(_BRIEFLY) for handler in handlers))
        self._pump()
        self.force_close()

    def force_close(self) -> None:
        """Close the connection immediately."""
        if (transport := self.transport) is not None:
            if not self._leaving:
                self._flush()
                transport.write(goodbye(self._wire.highest_inbound_stream_id))
            self._end()
            transport.close()

    # Called by streams.

    def extra_info(self, name: str, default: Any) -> Any:
        """Return transport information."""
        return default if self.transport is None else self.transport.get_extra_info(name, default)

    def go_on(self, stream: Stream) -> None:
        """Send "100 Continue"."""
        self._wire.send_headers(stream.number, [(b":status", b"100")])
        self._pump_soon()

    def has_news(self, stream: Stream) -> None:
        """Schedule sending for the stream."""
        if not self.is_authorized:
            self.is_authorized = stream.request is not None and USER in stream.request
        self._ready[stream] = None
        self._pump_soon()

    def taken(self, stream: Stream, size: int) -> None:
        """Increase the stream's receive window."""
        self._wire.increment_flow_control_window(size, stream.number)
        self._pump_soon()

    def cut(self, stream: Stream) -> None:
        """Reset a stream whose response is not complete."""
        self._reset(stream.number, ErrorCodes.INTERNAL_ERROR)
        self._drop(stream)
        stream.lose()

    def handler_left(self, stream: Stream) -> None:
        """Record that a handler has finished."""
        self._at_work -= 1
        self._active = self._loop.time()

    # Reading.

    def _take(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived(stream_id=number, data=data, flow_controlled_length=size):
                self._budget.moved(size)
                self._allow(size)
                if (stream := self.streams.get(number)) is not None:
                    stream.receive(data, size)
            case StreamEnded(stream_id=number):
                if (stream := self.streams.get(number)) is not None:
                    stream.all_asked()
            case StreamReset(stream_id=number):
                if (stream := self.streams.get(number)) is not None:
                    self._budget.spend(1 if stream.begun else _IN_VAIN)
                    self._drop(stream)
                    stream.lose()
            case WindowUpdated(stream_id=number):
                waiting = [self.streams.get(number)] if number else self.streams.values()
                self._ready |= dict.fromkeys(stream for stream in waiting if stream is not None)
            case RemoteSettingsChanged():
                # A client with a large table could make the encoder's table grow.
                if self._wire.encoder.header_table_size > _TABLE_BYTES:
                    self._wire.encoder.header_table_size = _TABLE_BYTES
                self._ready |= dict.fromkeys(self.streams.values())

    def _begin(self, event: RequestReceived) -> None:
        number, ended = event.stream_id, event.stream_ended is not None
        if self._leaving or len(self.streams) >= MOST_STREAMS or not self._shared.has_room():
            self._reset(number, ErrorCodes.REFUSED_STREAM)
            return
        if self.transport is None:
            # `has_room` may have closed this connection for its unread responses.
            return
        try:
            head, refusal = request_head(event.headers, ended=ended), ""
        except UnsupportedRequest as err:
            headless = (b":method", b"HEAD") in event.headers
            head, refusal = RequestHead(b"", chunked=False, headless=headless), str(err)
        except Malformed as err:
            log.v(4).info("Rejected malformed HTTP/2 request", err=err)
            self._budget.spend(_IN_VAIN)
            self._reset(number, ErrorCodes.PROTOCOL_ERROR)
            return
        stream = Stream(self, number, chunked=head.chunked, headless=head.headless)
        self.streams[number] = stream
        self._shared.open += 1
        if refusal:
            stream.answer(400, [("Content-Type", "text/plain; charset=utf-8")])
            stream.write(refusal.encode() + b"\n")
            stream.complete()
        else:
            self._at_work += 1
            stream.begin(self._shared.streams(), head.data)

    def _allow(self, size: int) -> None:
        """Increase the connection's receive window; the streams have their own windows."""
        self._untold += size
        if self._untold > WINDOW // 2:
            self._wire.increment_flow_control_window(self._untold)
            self._untold = 0

    # Sending.

    def _pump_soon(self) -> None:
        if self._pumping is None and self.transport is not None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send as much as possible now."""
        if self._pumping is not None:
            self._pumping.cancel()
            self._pumping = None
        try:
            self._send_in_turns()
        except H2Error as err:
            self._fail(err)
        self._flush()
        if self._leaving and not self.streams and self.transport is not None:
            self.force_close()

    def _send_in_turns(self) -> None:
        size = 0
        while self._ready and not self._paused and self.transport is not None:
            stream = next(iter(self._ready))
            del self._ready[stream]
            if not stream.over:
                size += self._send_some(stream)
            if size >= _GULP:
                size = 0
                self._flush()

    def _flush(self) -> None:
        self._out.append(self._wire.data_to_send())
        data = b"".join(self._out)
        self._out.clear()
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def _send_some(self, stream: Stream) -> int:
        number, size = stream.number, 0
        if stream.head is not None:
            last = stream.ended and not stream.size
            self._wire.send_headers(number, stream.head, end_stream=last)
            stream.head = None
            if last:
                self._sent(stream)
                return 0
        if stream.size:
            most = min(self._wire.room(number), LONGEST_FRAME)
            if most <= 0:
                return 0
            data = stream.take(most)
            size = len(data)
            last = stream.ended and not stream.size
            self._budget.moved(size)
            self._active = self._loop.time()
            if last:
                self._wire.send_data(number, data, end_stream=True)
                self._sent(stream)
                return size
            self._out += self._wire.more(number, data)
            if stream.size or stream.ended or stream.broken:
                self._ready[stream] = None
        elif stream.ended:
            self._wire.end_stream(number)
            self._sent(stream)
        elif stream.broken:
            self.cut(stream)
        return size

    def _sent(self, stream: Stream) -> None:
        """Complete a stream whose response is sent; reset it if its request is incomplete."""
        if not stream.asked:
            self._reset(stream.number, ErrorCodes.NO_ERROR)
        self._drop(stream)
        stream.over = True
        self._budget.earn(_ANSWERED)

    def _drop(self, stream: Stream) -> None:
        self._ready.pop(stream, None)
        if self.streams.pop(stream.number, None) is not None:
            self._shared.open -= 1

    def _reset(self, number: int, code: ErrorCodes) -> None:
        self._wire.reset_stream(number, code)
        self._pump_soon()

    # Ending.

    def _check_idle(self) -> None:
        """Close the connection if it was idle for too long."""
        left = self._active + self._shared.idle_seconds - self._loop.time()
        if not self.idle or left > 0:
            wait = wait_seconds(left if self.idle else self._shared.idle_seconds)
            self._timer = self._loop.call_later(wait, self._check_idle)
        else:
            self.force_close()

    def _fail(self, err: Exception) -> None:
        """Close the connection after a protocol error (already sent by h2) or an exceeded budget."""
        log.v(4).info("Closing HTTP/2 connection", err=err)
        if self.transport is None:
            return
        if isinstance(err, BadFrames):
            code = (
                ErrorCodes.ENHANCE_YOUR_CALM if isinstance(err, BudgetExceeded) else ErrorCodes.PROTOCOL_ERROR
            )
            self._wire.close_connection(code)
        self._flush()
        self._leaving = True
        self.force_close()

    def _end(self) -> None:
        """Release all resources."""
        self.transport = None
        self._over.set()
        self._shared.leave(self)
        self._shared.turns.forget(self)
        for handle in (self._timer, self._pumping):
            if handle is not None:
                handle.cancel()
        self._timer = self._pumping = None
        for stream in list(self.streams.values()):
            self._drop(stream)
            stream.lose()
        self._ready.clear()


MOST_STREAMS_OF_ALL = 1000


class Http2:
    """State shared by the HTTP/2 connections of one server."""

    def __init__(self, server: web.Server, *, idle_seconds: float, **options: Any) -> None:
        """Serve streams as `server` serves connections; `options` are those of its request handlers."""
        self.server = server
        self.streams = stream_server(server, **options)
        self.turns = ReadingTurns()
        self.idle_seconds = idle_seconds
        self.open = 0
        """Number of open streams."""
        self._most = MOST_STREAMS_OF_ALL
        self._connections: dict[Http2Connection, None] = {}

    def __call__(self) -> Http2Connection:
        """Return the protocol of a new connection."""
        return Http2Connection(self)

    def come(self, connection: Http2Connection) -> None:
        """Register a connection."""
        self._connections[connection] = None

    def leave(self, connection: Http2Connection) -> None:
        """Unregister a connection."""
        self._connections.pop(connection, None)

    def has_room(self) -> bool:
        """Return whether a stream can be opened; closes a connection with unread responses if necessary."""
        # Includes cancelled handlers that have not finished.
        if len(self.streams.connections) >= self._most:
            return False
        if self.open >= self._most:
            for connection in self._connections:
                if connection.idle and connection.streams:
                    connection.force_close()
                    break
        return self.open < self._most
