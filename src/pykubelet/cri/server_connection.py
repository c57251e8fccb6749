"""One HTTP/2 connection of a client to our gRPC server, as an asyncio protocol.

Here are the rules of HTTP/2 and of gRPC's use of it; what methods do is `grpc_server.py`'s business. A
call comes as headers and one message, and is answered by messages and a status. Requests are taken whole
before anybody looks at them.

Whoever breaks the rules of the connection is told so and cut off; a call that breaks its own ends with a
status. Answers wait until the client makes room for them, one message per call.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from pykubelet.cri import http2, http2_rules
from pykubelet.cri import server_rules as rules
from pykubelet.cri.grpc_status import Status
from pykubelet.cri.http2 import Kind, ProtocolError, Setting, frame
from pykubelet.cri.http2_rules import Code, HeaderBlocks, Violation
from pykubelet.cri.server_rules import Limits
from pykubelet.cri.server_stream import ServerStream

HANDSHAKE_SECONDS = 10.0
"""How long a client may take to introduce itself."""

_LEAST_ROOM = http2.FIRST_WINDOW // 2


class Host(Protocol):
    """What a connection needs of its server."""

    limits: Limits
    held: int
    """Bytes of requests that are not complete yet, of all connections."""

    def enter(self, connection: ServerConnection) -> bool:
        """Take a connection in; False when there are too many."""

    def leave(self, connection: ServerConnection) -> None:
        """Forget a connection."""

    def refusal(self, path: str) -> Status | None:
        """Say why a method cannot be called; None when it can."""

    def start(self, stream: ServerStream, path: str, message: bytes) -> asyncio.Task[None]:
        """Answer a call whose request is complete."""


class ServerConnection(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._headers = HeaderBlocks(host.limits.headers)
        self._buffer = b""
        self._streams: dict[int, ServerStream] = {}
        self._running = 0
        """Handlers that have not ended, also of calls that have."""
        self._last = 0
        """The newest call's number."""
        self._introduced = self._greeted = False
        self._paused = False
        self._window = http2.FIRST_WINDOW
        self._stream_window = http2.FIRST_WINDOW
        self._max_frame = http2.MAX_FRAME
        self._room = http2.FIRST_WINDOW
        self._timer: asyncio.TimerHandle | None = None

    def close(self, code: Code = Code.NO_ERROR, why: str = "") -> None:
        """End the connection and all its calls; the client is told why."""
        if self._transport is not None and not self._transport.is_closing():
            last = http2.number(self._last)
            self._write(frame(Kind.GOAWAY, 0, 0, last + http2.number(code) + why.encode()[:200]))
            if self._paused:
                self._transport.abort()  # it does not read: nothing would ever be over
            else:
                self._transport.close()
        self._abandon()

    # What calls ask

    def write_headers(self, stream: int, block: bytes, *, last: bool) -> None:
        """Send headers or trailers, in as many frames as the client's limit makes of them."""
        flags, kind = http2.END_STREAM if last else 0, Kind.HEADERS
        while len(block) > http2.MAX_FRAME:
            self._write(frame(kind, flags, stream, block[: http2.MAX_FRAME]))
            block, flags, kind = block[http2.MAX_FRAME :], 0, Kind.CONTINUATION
        self._write(frame(kind, flags | http2.END_HEADERS, stream, block))

    def reset(self, stream: int, code: Code) -> None:
        """Tell the client that a call is over."""
        self._write(frame(Kind.RST_STREAM, 0, stream, http2.number(code)))

    def forget(self, stream: int) -> None:
        """Drop a call that has ended."""
        if ended := self._streams.pop(stream, None):
            self._host.held -= len(ended.request)
            ended.request.clear()

    def flush(self) -> None:
        """Send of the answers what the client makes room for."""
        for number, stream in tuple(self._streams.items()):
            while stream.unsent and not self._paused:
                size = min(len(stream.unsent), self._max_frame, self._window, stream.window)
                if size <= 0:
                    break
                part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
                self._window -= size
                stream.window -= size
                self._write(frame(Kind.DATA, 0, number, part))
            if not stream.unsent:
                stream.sent()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce ourselves."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._host.enter(self):
            self.close(Code.CALM_DOWN, "too many connections")
            return
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._silent)
        self._write(http2.settings({Setting.MAX_CONCURRENT_STREAMS: self._host.limits.calls}))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all that is done for the client."""
        self._abandon()

    def pause_writing(self) -> None:
        """Listen no more to a client that does not: its pings alone would fill the memory."""
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self.flush()

    def data_received(self, data: bytes) -> None:
        """Take whatever frames are complete."""
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        at, end = 0, len(data)
        try:
            if not self._introduced:
                if not http2.PREFACE.startswith(data[: len(http2.PREFACE)]):
                    raise ProtocolError("it does not speak HTTP/2")
                if end < len(http2.PREFACE):
                    self._buffer = data
                    return
                self._introduced, at = True, len(http2.PREFACE)
            while end - at >= http2.HEAD_BYTES and self._open:
                size, kind, flags, number = http2.read_head(data, at)
                if size > http2.MAX_FRAME:
                    raise Violation(Code.FRAME_SIZE, "a frame is too large")
                begin = at + http2.HEAD_BYTES
                if end - begin < size:
                    break
                self._frame(kind, flags, number, data[begin : begin + size])
                at = begin + size
        except ProtocolError as err:
            self.close(err.code if isinstance(err, Violation) else Code.PROTOCOL, str(err))
        else:
            self._buffer = data[at:]

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _silent(self) -> None:
        self.close(Code.PROTOCOL, "it does not introduce itself")

    def _abandon(self) -> None:
        self._host.leave(self)
        self._buffer = b""
        if self._timer is not None:
            self._timer.cancel()
        for stream in tuple(self._streams.values()):
            stream.drop()

    # Frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if not self._greeted:
            if kind != Kind.SETTINGS or flags & http2.ACK:
                raise ProtocolError("its first frame is not its settings")
            self._greeted = True
            if self._timer is not None:
                self._timer.cancel()
        if self._headers.interrupted != (kind == Kind.CONTINUATION):
            raise ProtocolError("headers are interrupted, or continued without a beginning")
        http2_rules.check_frame(kind, flags, number, payload)
        match kind:
            case Kind.DATA:
                self._data_frame(flags, number, payload)
            case Kind.HEADERS:
                block = http2_rules.header_block(flags, payload)
                self._header_block(self._headers.begin(number, flags, block))
            case Kind.CONTINUATION:
                self._header_block(self._headers.resume(number, flags, payload))
            case Kind.RST_STREAM:
                if number > self._last:
                    raise ProtocolError("a call that was never begun is reset")
                if stream := self._streams.get(number):
                    stream.drop()
            case Kind.SETTINGS if not flags & http2.ACK:
                self._settings_frame(payload)
            case Kind.PING if not flags & http2.ACK:
                self._write(frame(Kind.PING, http2.ACK, 0, payload))
            case Kind.WINDOW_UPDATE:
                self._window_frame(number, http2.read_number(payload))
            case Kind.PUSH_PROMISE:
                raise ProtocolError("it pushes")

    def _data_frame(self, flags: int, number: int, payload: bytes) -> None:
        if number > self._last:
            raise ProtocolError("data of a call that was never begun")
        self._room -= len(payload)
        if self._room < 0:
            raise Violation(Code.FLOW_CONTROL, "more data than there is room for")
        if self._room <= _LEAST_ROOM:
            self._renew(0, http2.FIRST_WINDOW - self._room)
            self._room = http2.FIRST_WINDOW
        content = http2.unpadded(flags, payload)
        stream = self._streams.get(number)
        if stream is None:
            return  # it ended while this was under way
        if stream.complete:
            self.reset(number, Code.STREAM_CLOSED)
            stream.drop()
            return
        stream.room -= len(payload)
        if stream.room < 0:
            raise Violation(Code.FLOW_CONTROL, "more data than there is room for")
        if stream.room <= _LEAST_ROOM:
            self._renew(number, http2.FIRST_WINDOW - stream.room)
            stream.room = http2.FIRST_WINDOW
        stream.request += content
        self._host.held += len(content)
        problem = rules.request_problem(stream.request, self._host.limits.request)
        if self._host.held > self._host.limits.held:
            problem = Status("RESOURCE_EXHAUSTED", "too many requests are under way")
        if problem is not None:
            stream.finish(problem)
        elif flags & http2.END_STREAM:
            self._complete(stream)

    def _complete(self, stream: ServerStream) -> None:
        stream.complete = True
        message = rules.whole_message(stream.request)
        self._host.held -= len(stream.request)
        stream.request.clear()
        if message is None:
            stream.finish(Status("INTERNAL", "the request ended before its message"))
            return
        self._running += 1
        stream.task = self._host.start(stream, stream.path, message)
        stream.task.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1

    def _header_block(self, complete: tuple[int, int, bytes] | None) -> None:
        if complete is None:
            return
        number, flags, block = complete
        # Also of a call that nobody answers: the decoder must see every block.
        headers = dict(self._headers.decode(block))
        if number <= self._last:
            self._trailers(number, flags)
            return
        self._last = number
        if max(len(self._streams), self._running) >= self._host.limits.calls:
            self.reset(number, Code.REFUSED_STREAM)
            return
        self._begin(number, headers, ended=bool(flags & http2.END_STREAM))

    def _begin(self, number: int, headers: dict[str, str], *, ended: bool) -> None:
        path, timeout = headers.get(":path", ""), headers.get("grpc-timeout")
        stream = self._streams[number] = ServerStream(self, number, path, self._stream_window)
        stream.complete = ended
        if http := rules.http_refusal(headers):
            self.write_headers(number, http, last=True)
            if not ended:
                self.reset(number, Code.NO_ERROR)
            stream.drop()
            return
        problem = self._host.refusal(path)
        if problem is None and timeout is not None:
            seconds = rules.read_timeout(timeout)
            if seconds is None:
                problem = Status("INTERNAL", f"malformed grpc-timeout: {timeout[:40]!r}")
            else:
                stream.set_deadline(seconds)
        if problem is None and ended:
            problem = Status("INTERNAL", "the request has no message")
        if problem is not None:
            stream.finish(problem)

    def _trailers(self, number: int, flags: int) -> None:
        """Take headers after data: they can only say that the request is complete."""
        stream = self._streams.get(number)
        if stream is None:
            return
        if stream.complete or not flags & http2.END_STREAM:
            self.reset(number, Code.PROTOCOL)
            stream.drop()
            return
        self._complete(stream)

    def _settings_frame(self, payload: bytes) -> None:
        for name, value in http2.read_settings(payload):
            http2_rules.check_setting(name, value)
            if name == Setting.INITIAL_WINDOW_SIZE:
                grown, self._stream_window = value - self._stream_window, value
                for stream in self._streams.values():
                    stream.window = http2_rules.grown_window(stream.window, grown)
            elif name == Setting.MAX_FRAME_SIZE:
                self._max_frame = value
        self._write(frame(Kind.SETTINGS, http2.ACK, 0))
        self.flush()

    def _window_frame(self, number: int, grown: int) -> None:
        stream = self._streams.get(number)
        if number == 0:
            self._window += grown
            if grown == 0 or self._window > http2.MAX_WINDOW:
                raise Violation(
                    Code.FLOW_CONTROL if grown else Code.PROTOCOL, "a window grows by nothing, or too far"
                )
        elif number > self._last:
            raise ProtocolError("room for a call that was never begun")
        elif stream is not None:
            stream.window += grown
            if grown == 0 or stream.window > http2.MAX_WINDOW:
                self.reset(number, Code.FLOW_CONTROL if grown else Code.PROTOCOL)
                stream.drop()
        self.flush()

    def _renew(self, number: int, count: int) -> None:
        self._write(frame(Kind.WINDOW_UPDATE, 0, number, http2.number(count)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
