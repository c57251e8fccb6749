"""HTTP/2 connections: many requests at once on one connection, each a stream of its own.

`h2` knows the protocol; here is what a server adds to it. Streams take turns in sending, one frame each, as
far as the client and the connection take it, and a client that does not take what is sent is not listened
to either. All that a client can make grow is bounded: streams (of a connection and of all together), the
size of a request's fields, unread bodies, unsent answers, and frames for nothing (`http2_frames`). The time
that frames take is bounded, too, until the client has an authorized request (`http2_turns`).

aiohttp's server keeps the list of connections, to make room and to stop: a connection over HTTP/2 stands
there like any other, idle when nobody works on a request of it.

HTTP/2 for a server: its connections, and how many streams they may have together.

Imported with the first connection that needs it: most of its memory is `h2`.

How `h2` is made to speak HTTP/2 here: what clients are told, and what it should leave to us.
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
from pykubelet.server.pipeline import USER
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
MOST_STREAMS = 250
"""Of one connection; the reference's number."""
MOST_FIELD_BYTES = 64 * 1024
"""Of all fields of a request: decoding them is slow, and strangers may send them, too."""
WINDOW = 64 * 1024 - 1
"""How much of a body may come before somebody takes it."""


class H2State(H2Connection):
    """The protocol, without the bytes' way there and back."""

    # What is remembered of streams that have ended is for frames that crossed their end.
    MAX_CLOSED_STREAMS = 1000

    @property
    def open_inbound_streams(self) -> int:
        """None: a stream too many is refused by the connection, where h2 would end all of them."""
        # Asking is what makes it forget those that have ended.
        _ = super().open_inbound_streams
        return 0

    def room(self, number: int) -> int:
        """How many bytes may be sent on a stream now; not more than 0 when none may."""
        return min(self.outbound_flow_control_window, self.streams[number].outbound_flow_control_window)

    def more(self, number: int, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Give what to send, in order, for data of a stream that is neither its last nor too much.

        Nearly all that is sent is this, and h2's own way, which would be right for the last, too, takes
        half of the time that a long answer takes.
        """
        size = len(data)
        self.outbound_flow_control_window -= size
        self.streams[number].outbound_flow_control_window -= size
        return [self.data_to_send(), struct.pack(">IBI", size << 8 | DATA, 0, number), data]


def make_wire() -> H2State:
    """Make the protocol of a connection that begins."""
    settings = H2Configuration(
        client_side=False,
        header_encoding=None,
        # Fields are checked by `request_head`: a bad request should not end all others on the connection.
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
        # ... and those of answers are made by `answer_head`.
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
    """A GOAWAY that lets what has begun go on; after one of h2's own nothing could be sent."""
    return struct.pack(">IBIII", 8 << 8 | GOAWAY, 0, 0, last, ErrorCodes.NO_ERROR)


_TABLE_BYTES = 4096
_MUCH = 128 * 1024
_GULP = 128 * 1024
_BRIEFLY = 0.1

# Points of the budget: what a request costs that is taken back at once, and what an answer is worth.
_IN_VAIN = 20
_ANSWERED = 4


class Http2Connection(asyncio.Protocol):
    """A connection."""

    # What aiohttp's server looks at; see `_current_request`.
    _task_handler = None

    def __init__(self, shared: Http2) -> None:
        self.transport: asyncio.Transport | None = None
        """None when it is over."""
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
        """Whether nobody works on a request."""
        return self._at_work == 0

    @property
    def _current_request(self) -> object | None:
        """Something when it is not idle: so does aiohttp's own connection say it."""
        return None if self.idle else self

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: say what this side wants."""
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
        """Take what is left apart."""
        self._shared.server.connection_lost(cast(web.RequestHandler, self), exc)
        self._end()

    def data_received(self, data: bytes) -> None:
        """Read what the client sends."""
        try:
            self._frames.add(data)
        except BadFrames as err:
            self._fail(err)
            self._pump()
            return
        self._shared.turns.received(self)

    def pause_writing(self) -> None:
        """Wait for the client to read; it could make us answer without end otherwise."""
        self._paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False
        if self.transport is not None:
            if not self._held:
                self.transport.resume_reading()
            self._pump()

    # What `ReadingTurns` calls.

    @property
    def unread_bytes(self) -> int:
        """Bytes that were received and not handled yet."""
        return self._frames.unread_bytes

    def read_frames(self, seconds: float) -> bool:
        """Handle the frames that were received for about this time; return False when some may be left."""
        began, is_done = perf_counter(), True
        try:
            for frame in self._frames.complete():
                if self.transport is None:
                    return True
                if frame.kind == GOAWAY:
                    # It wants nothing more than what it has asked for; h2 would end that, too.
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
        """Read from the client again."""
        if self._held:
            self._held = False
            if self.transport is not None and not self._paused:
                self.transport.resume_reading()

    # What the server calls.

    def close(self) -> None:
        """Begin nothing new, and close when everything is done."""
        if self.transport is not None and not self._leaving:
            self._flush()
            self.transport.write(goodbye(self._wire.highest_inbound_stream_id))
            self._leaving = True
            self._pump()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """End: with `timeout` seconds for what is under way."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._over.wait()
        handlers = [stream.handler for stream in self.streams.values() if stream.handler is not None]
        await asyncio.gather(*(handler.shutdown(_BRIEFLY) for handler in handlers))
        self._pump()
        self.force_close()

    def force_close(self) -> None:
        """End at once."""
        if (transport := self.transport) is not None:
            if not self._leaving:
                self._flush()
                transport.write(goodbye(self._wire.highest_inbound_stream_id))
            self._end()
            transport.close()

    # What streams call.

    def extra_info(self, name: str, default: Any) -> Any:
        """Tell of the connection."""
        return default if self.transport is None else self.transport.get_extra_info(name, default)

    def go_on(self, stream: Stream) -> None:
        """Let the client send its body."""
        self._wire.send_headers(stream.number, [(b":status", b"100")])
        self._pump_soon()

    def has_news(self, stream: Stream) -> None:
        """Send something of the stream, soon."""
        if not self.is_authorized:
            self.is_authorized = stream.request is not None and USER in stream.request
        self._ready[stream] = None
        self._pump_soon()

    def taken(self, stream: Stream, size: int) -> None:
        """Let the client send so much more on the stream."""
        self._wire.increment_flow_control_window(size, stream.number)
        self._pump_soon()

    def cut(self, stream: Stream) -> None:
        """End a stream in its midst."""
        self._reset(stream.number, ErrorCodes.INTERNAL_ERROR)
        self._drop(stream)
        stream.lose()

    def handler_left(self, stream: Stream) -> None:
        """Count who works."""
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
                # A client with a large table could have us fill it.
                if self._wire.encoder.header_table_size > _TABLE_BYTES:
                    self._wire.encoder.header_table_size = _TABLE_BYTES
                self._ready |= dict.fromkeys(self.streams.values())

    def _begin(self, event: RequestReceived) -> None:
        number, ended = event.stream_id, event.stream_ended is not None
        if self._leaving or len(self.streams) >= MOST_STREAMS or not self._shared.has_room():
            self._reset(number, ErrorCodes.REFUSED_STREAM)
            return
        if self.transport is None:
            # Its own answers that nobody takes had to go.
            return
        try:
            head, refusal = request_head(event.headers, ended=ended), ""
        except UnsupportedRequest as err:
            headless = (b":method", b"HEAD") in event.headers
            head, refusal = RequestHead(b"", chunked=False, headless=headless), str(err)
        except Malformed as err:
            log.v(4).info("A request over HTTP/2 is none", err=err)
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
        """Let the client send on; how much of one stream waits here is that stream's affair."""
        self._untold += size
        if self._untold > WINDOW // 2:
            self._wire.increment_flow_control_window(self._untold)
            self._untold = 0

    # Sending.

    def _pump_soon(self) -> None:
        if self._pumping is None and self.transport is not None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what can be sent now."""
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
        """An answer is complete and on its way; what is still to come of its request is not wanted."""
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
        """Close when nothing was asked for, and no answer taken, for long."""
        left = self._active + self._shared.idle_seconds - self._loop.time()
        if not self.idle or left > 0:
            wait = wait_seconds(left if self.idle else self._shared.idle_seconds)
            self._timer = self._loop.call_later(wait, self._check_idle)
        else:
            self.force_close()

    def _fail(self, err: Exception) -> None:
        """The client has broken the rules (h2 has said so to it already) or spent its budget."""
        log.v(4).info("A connection over HTTP/2 is ended", err=err)
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
        """Let go of everything."""
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
    """What the connections of one server share."""

    def __init__(self, server: web.Server, *, idle_seconds: float, **options: Any) -> None:
        """Serve streams as `server` serves connections; `options` are those of its request handlers."""
        self.server = server
        self.streams = stream_server(server, **options)
        self.turns = ReadingTurns()
        self.idle_seconds = idle_seconds
        self.open = 0
        """How many streams there are."""
        self._most = MOST_STREAMS_OF_ALL
        self._connections: dict[Http2Connection, None] = {}

    def __call__(self) -> Http2Connection:
        """Make the protocol of a connection."""
        return Http2Connection(self)

    def come(self, connection: Http2Connection) -> None:
        """Take note of a connection."""
        self._connections[connection] = None

    def leave(self, connection: Http2Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)

    def has_room(self) -> bool:
        """Whether one stream more can be begun, if need be instead of answers that nobody takes."""
        # Handlers that were told to end and did not yet count, too.
        if len(self.streams.connections) >= self._most:
            return False
        if self.open >= self._most:
            for connection in self._connections:
                if connection.idle and connection.streams:
                    connection.force_close()
                    break
        return self.open < self._most
