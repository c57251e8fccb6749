"""gRPC server on a Unix socket, for the kubelet's node-local services.

Device plugins register with the kubelet and monitoring agents query the pod resources API: a few small calls
per minute. grpcio's server would cost a thread, a C core and several megabytes for that; `http2.py` has the
frames, and this module adds methods, statuses and deadlines.

    methods = {"/v1beta1.Registration/Register": Unary(pb.RegisterRequest, register)}
    async with serving(path, methods):
        ...

Guarantees:

- A handler runs in a task of its own, which is cancelled when the client disconnects, its deadline expires or
  the server stops. A handler's exception becomes a status and never ends the kubelet.
- What clients can consume is bounded (`Limits`): the size of a request, the bytes of incomplete requests, the
  calls of a connection, the connections; so are its frames without progress of a call (`FrameBudget`). A
  client that does not read is not read from.
- A violation of HTTP/2 ends its connection with GOAWAY, and a violation of gRPC its call with a status.

A request is buffered until it is complete; then its handler starts. Responses wait for the client's
flow-control window, with at most one unsent message per call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import string
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from google.protobuf.message import DecodeError, Message

from pykubelet.logs import get_logger
from pykubelet.transport import http2
from pykubelet.transport import http2 as http2_rules
from pykubelet.transport.endpoint import MAX_PATH_BYTES
from pykubelet.transport.grpc_connection import CODES, Status
from pykubelet.transport.http2 import (
    HEADER_BYTES,
    Code,
    FrameBudget,
    FrameType,
    HeaderBlocks,
    Http2Error,
    ProtocolError,
    Setting,
    frame,
)
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
PREFIX = struct.Struct(">?L")
"""Prefix of each message: the compressed flag and the length."""
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per server.

    `request` and `headers` are bytes per call, `calls` are concurrent calls per connection, `buffered` are
    the bytes of incomplete requests of all connections.
    """

    request: int = 1024 * 1024
    headers: int = HEADER_BYTES
    calls: int = 64
    connections: int = 64
    buffered: int = 8 * 1024 * 1024


def http_rejection(headers: dict[str, str]) -> bytes | None:
    """Return the response headers for a request that is not gRPC; None for a gRPC request."""
    if headers.get(":method") != "POST":
        status = "405"
    elif headers.get("content-type", "").partition(";")[0].partition("+")[0] != "application/grpc":
        status = "415"
    else:
        return None
    return http2.more_headers([(":status", status)])


def read_timeout(text: str) -> float | None:
    """Parse a grpc-timeout value, digits and a unit; return seconds, or None if it is not valid."""
    amount, unit = text[:-1], text[-1:]
    digits = amount.isascii() and amount.isdigit() and len(amount) <= _MAX_DIGITS
    return int(amount) * _UNITS[unit] if digits and unit in _UNITS else None


def request_problem(request: bytearray, limit: int) -> Status | None:
    """Return the status for a request that is already known to be invalid; None if it is valid so far."""
    if len(request) < PREFIX.size:
        return None
    compressed, size = PREFIX.unpack_from(request)
    if compressed:
        return Status("UNIMPLEMENTED", "compressed requests are not understood here")
    if size > limit:
        return Status("RESOURCE_EXHAUSTED", f"received message larger than max ({size} vs. {limit})")
    if len(request) > PREFIX.size + size:
        return Status("INTERNAL", "more than one message was sent")
    return None


def request_message(request: bytearray) -> bytes | None:
    """Return the message of a request that has ended; None if it is incomplete."""
    if len(request) < PREFIX.size or PREFIX.unpack_from(request)[1] != len(request) - PREFIX.size:
        return None
    return bytes(request[PREFIX.size :])


HEADERS = b"\x88" + http2.more_headers([("content-type", "application/grpc")])
"""Response headers: status 200 and the gRPC content type."""

# Clients reject trailers that are too long, and would get no status at all.
_LONGEST_MESSAGE = 2000
_LATE = Status("DEADLINE_EXCEEDED", "context deadline exceeded")

# grpc-message is percent-encoded except for printable ASCII.
_PLAIN = "".join(char for char in string.printable[:95] if char != "%")


class ServerStream:
    """A call in progress."""

    def __init__(self, connection: ServerConnection, number: int, path: str, window: int) -> None:
        self.path = path
        self.window = window
        """Bytes that may be sent to the client."""
        self.receive_window = http2.FIRST_WINDOW
        """Bytes that the client may send."""
        self.request = bytearray()
        self.complete = False
        """Whether the client has ended its side of the stream."""
        self.unsent = b""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._number = number
        self._headers_sent = False
        self._is_finished = False
        self._sent: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: bytes) -> None:
        """Send a message; wait until flow control has let all of it through."""
        if self._is_finished:
            return
        if not self._headers_sent:
            self._headers_sent = True
            self._connection.write_headers(self._number, HEADERS, last=False)
        self.unsent = PREFIX.pack(False, len(message)) + message
        self._connection.flush()
        if self.unsent:
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent

    def finish(self, status: Status) -> None:
        """End the call with a status; only the first call of this has an effect."""
        if self._is_finished:
            return
        trailers = [("grpc-status", str(CODES.index(status.code)))]
        if status.message:
            trailers.append(("grpc-message", quote(status.message[:_LONGEST_MESSAGE], safe=_PLAIN)))
        block = http2.more_headers(trailers)
        self._connection.write_headers(
            self._number, block if self._headers_sent else HEADERS + block, last=True
        )
        if not self.complete:
            self._connection.reset(self._number, Code.NO_ERROR)
        self.drop()

    def drop(self) -> None:
        """Remove the call and cancel its handler."""
        self._is_finished = True
        self.unsent = b""
        self._connection.forget(self._number)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def set_deadline(self, seconds: float) -> None:
        """End the call with DEADLINE_EXCEEDED after so many seconds, unless it has ended."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.finish, _LATE)

    def sent(self) -> None:
        """Record that all of the message is written to the transport."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)


HANDSHAKE_SECONDS = 10.0
"""Seconds that a client may take to send its preface and SETTINGS."""
_RENEW_BELOW_BYTES = http2.FIRST_WINDOW // 2
_POINTS_PER_CALL = 16.0
"""Points of the frame budget for a call that its handler has completed."""


class ServerConnection(asyncio.Protocol):
    """One HTTP/2 connection of a client, as an asyncio protocol."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._headers = HeaderBlocks(server.limits.headers)
        self._buffer = b""
        self._streams: dict[int, ServerStream] = {}
        self._running = 0
        """Handlers that have not ended, including those of calls that have."""
        self._last = 0
        """Number of the newest call's stream."""
        self._preface_received = self._settings_received = False
        self._paused = False
        self._window = http2.FIRST_WINDOW
        self._stream_window = http2.FIRST_WINDOW
        self._max_frame = http2.MAX_FRAME
        self._receive_window = http2.FIRST_WINDOW
        self._timer: asyncio.TimerHandle | None = None
        self._budget = FrameBudget(asyncio.get_running_loop().time)

    def close(self, code: Code = Code.NO_ERROR, reason: str = "") -> None:
        """Close the connection with GOAWAY, `reason` as debug data, and end all its calls."""
        if self._transport is not None and not self._transport.is_closing():
            last = http2.number(self._last)
            self._write(frame(FrameType.GOAWAY, 0, 0, last + http2.number(code) + reason.encode()[:200]))
            if self._paused:
                self._transport.abort()  # the client does not read: a graceful close would not end
            else:
                self._transport.close()
        self._abandon()

    # Called by calls

    def write_headers(self, stream: int, block: bytes, *, last: bool) -> None:
        """Send headers or trailers, split into frames of MAX_FRAME bytes, which every client accepts."""
        flags, kind = http2.END_STREAM if last else 0, FrameType.HEADERS
        while len(block) > http2.MAX_FRAME:
            self._write(frame(kind, flags, stream, block[: http2.MAX_FRAME]))
            block, flags, kind = block[http2.MAX_FRAME :], 0, FrameType.CONTINUATION
        self._write(frame(kind, flags | http2.END_HEADERS, stream, block))

    def reset(self, stream: int, code: Code) -> None:
        """Send RST_STREAM for a call."""
        self._write(frame(FrameType.RST_STREAM, 0, stream, http2.number(code)))

    def forget(self, stream: int) -> None:
        """Remove a call that has ended."""
        if ended := self._streams.pop(stream, None):
            self._server.buffered -= len(ended.request)
            ended.request.clear()

    def flush(self) -> None:
        """Send the response data that flow control allows."""
        for number, stream in tuple(self._streams.items()):
            while stream.unsent and not self._paused:
                size = min(len(stream.unsent), self._max_frame, self._window, stream.window)
                if size <= 0:
                    break
                part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
                self._window -= size
                stream.window -= size
                self._budget.credit_bytes(size)
                self._write(frame(FrameType.DATA, 0, number, part))
            if not stream.unsent:
                stream.sent()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the server and send the settings; close the connection if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._server.enter(self):
            self.close(Code.ENHANCE_YOUR_CALM, "too many connections")
            return
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._silent)
        self._write(http2.settings({Setting.MAX_CONCURRENT_STREAMS: self._server.limits.calls}))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all calls of the client."""
        self._abandon()

    def pause_writing(self) -> None:
        """Stop reading while the client does not read: replies to its PINGs alone would fill the memory."""
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading, and send what is pending."""
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames."""
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        at, end = 0, len(data)
        try:
            if not self._preface_received:
                if not http2.PREFACE.startswith(data[: len(http2.PREFACE)]):
                    raise ProtocolError("it does not speak HTTP/2")
                if end < len(http2.PREFACE):
                    self._buffer = data
                    return
                self._preface_received, at = True, len(http2.PREFACE)
            while end - at >= http2.HEAD_BYTES and self._open:
                size, kind, flags, number = http2.read_head(data, at)
                if size > http2.MAX_FRAME:
                    raise Http2Error(Code.FRAME_SIZE, "a frame is too large")
                start = at + http2.HEAD_BYTES
                if end - start < size:
                    break
                self._frame(kind, flags, number, data[start : start + size])
                at = start + size
        except ProtocolError as err:
            self.close(err.code if isinstance(err, Http2Error) else Code.PROTOCOL, str(err))
        else:
            self._buffer = data[at:]

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _silent(self) -> None:
        self.close(Code.PROTOCOL, "it does not introduce itself")

    def _abandon(self) -> None:
        self._server.leave(self)
        self._buffer = b""
        if self._timer is not None:
            self._timer.cancel()
        for stream in tuple(self._streams.values()):
            stream.drop()

    # Frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if not self._settings_received:
            if kind != FrameType.SETTINGS or flags & http2.ACK:
                raise ProtocolError("its first frame is not its settings")
            self._settings_received = True
            if self._timer is not None:
                self._timer.cancel()
        if self._headers.interrupted != (kind == FrameType.CONTINUATION):
            raise ProtocolError("headers are interrupted, or continued without a beginning")
        http2_rules.check_frame(kind, flags, number, payload)
        self._budget.charge(kind, len(payload))
        match kind:
            case FrameType.DATA:
                self._data_frame(flags, number, payload)
            case FrameType.HEADERS:
                block = http2_rules.header_block(flags, payload)
                self._header_block(self._headers.begin(number, flags, block))
            case FrameType.CONTINUATION:
                self._header_block(self._headers.resume(number, flags, payload))
            case FrameType.RST_STREAM:
                if number > self._last:
                    raise ProtocolError("a call that was never begun is reset")
                if stream := self._streams.get(number):
                    stream.drop()
            case FrameType.SETTINGS if not flags & http2.ACK:
                self._settings_frame(payload)
            case FrameType.PING if not flags & http2.ACK:
                self._write(frame(FrameType.PING, http2.ACK, 0, payload))
            case FrameType.WINDOW_UPDATE:
                self._window_frame(number, http2.read_number(payload))
            case FrameType.PUSH_PROMISE:
                raise ProtocolError("it pushes")

    def _data_frame(self, flags: int, number: int, payload: bytes) -> None:
        if number > self._last:
            raise ProtocolError("data of a call that was never begun")
        self._receive_window -= len(payload)
        if self._receive_window < 0:
            raise Http2Error(Code.FLOW_CONTROL, "more data than there is room for")
        if self._receive_window <= _RENEW_BELOW_BYTES:
            self._renew(0, http2.FIRST_WINDOW - self._receive_window)
            self._receive_window = http2.FIRST_WINDOW
        content = http2.unpadded(flags, payload)
        stream = self._streams.get(number)
        if stream is None:
            return  # the call ended while this frame was in flight
        if stream.complete:
            self.reset(number, Code.STREAM_CLOSED)
            stream.drop()
            return
        stream.receive_window -= len(payload)
        if stream.receive_window < 0:
            raise Http2Error(Code.FLOW_CONTROL, "more data than there is room for")
        if stream.receive_window <= _RENEW_BELOW_BYTES:
            self._renew(number, http2.FIRST_WINDOW - stream.receive_window)
            stream.receive_window = http2.FIRST_WINDOW
        stream.request += content
        self._server.buffered += len(content)
        self._budget.credit_bytes(len(content))
        problem = request_problem(stream.request, self._server.limits.request)
        if self._server.buffered > self._server.limits.buffered:
            problem = Status("RESOURCE_EXHAUSTED", "too many requests are under way")
        if problem is not None:
            stream.finish(problem)
        elif flags & http2.END_STREAM:
            self._complete(stream)

    def _complete(self, stream: ServerStream) -> None:
        stream.complete = True
        message = request_message(stream.request)
        self._server.buffered -= len(stream.request)
        stream.request.clear()
        if message is None:
            stream.finish(Status("INTERNAL", "the request ended before its message"))
            return
        self._running += 1
        stream.task = self._server.start(stream, stream.path, message)
        stream.task.add_done_callback(self._ended)

    def _ended(self, handler: asyncio.Task[None]) -> None:
        self._running -= 1
        if not handler.cancelled():  # calls that the client resets earn nothing
            self._budget.credit(_POINTS_PER_CALL)

    def _header_block(self, complete: tuple[int, int, bytes] | None) -> None:
        if complete is None:
            return
        number, flags, block = complete
        # Also for a rejected call: HPACK is stateful, and the decoder must see every block.
        headers = dict(self._headers.decode(block))
        if number <= self._last:
            self._trailers(number, flags)
            return
        self._last = number
        if max(len(self._streams), self._running) >= self._server.limits.calls:
            self.reset(number, Code.REFUSED_STREAM)
            return
        self._start_call(number, headers, ended=bool(flags & http2.END_STREAM))

    def _start_call(self, number: int, headers: dict[str, str], *, ended: bool) -> None:
        path, timeout = headers.get(":path", ""), headers.get("grpc-timeout")
        stream = self._streams[number] = ServerStream(self, number, path, self._stream_window)
        stream.complete = ended
        if http := http_rejection(headers):
            self.write_headers(number, http, last=True)
            if not ended:
                self.reset(number, Code.NO_ERROR)
            stream.drop()
            return
        problem = self._server.unknown_method(path)
        if problem is None and timeout is not None:
            seconds = read_timeout(timeout)
            if seconds is None:
                problem = Status("INTERNAL", f"malformed grpc-timeout: {timeout[:40]!r}")
            else:
                stream.set_deadline(seconds)
        if problem is None and ended:
            problem = Status("INTERNAL", "the request has no message")
        if problem is not None:
            stream.finish(problem)

    def _trailers(self, number: int, flags: int) -> None:
        """Handle headers after data, which may only end the request."""
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
        self._write(frame(FrameType.SETTINGS, http2.ACK, 0))
        self.flush()

    def _window_frame(self, number: int, grown: int) -> None:
        stream = self._streams.get(number)
        if number == 0:
            self._window += grown
            if grown == 0 or self._window > http2.MAX_WINDOW:
                raise Http2Error(
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
        self._write(frame(FrameType.WINDOW_UPDATE, 0, number, http2.number(count)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


__all__ = ["GrpcError", "Limits", "Server", "StreamingMethod", "UnaryMethod", "serving"]
_BACKLOG = 32
_DEFAULTS = Limits()
_OK = Status("OK")


class GrpcError(Exception):
    """Raised by a handler to fail its call: a gRPC code in upper case, and a message for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        assert code in CODES
        self.status = Status(code, message)


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """A unary method; `handler` takes a message of the type `request`."""

    request: type[Message]
    handler: Callable[[Any], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class StreamingMethod:
    """A server-streaming method; its generator is closed when the client disconnects.

    A client that does not accept a message within `send_timeout` seconds gets RESOURCE_EXHAUSTED.
    """

    request: type[Message]
    handler: Callable[[Any], AsyncGenerator[Message, None]]
    send_timeout: float | None = None


Methods = Mapping[str, UnaryMethod | StreamingMethod]
"""Methods by full path: `/package.Service/Method`."""


@asynccontextmanager
async def serving(path: Path, methods: Methods, limits: Limits = _DEFAULTS) -> AsyncIterator[Server]:
    """Serve on a socket at this path until the block is left; an existing file there is replaced.

    The directory must exist. Raises OSError if the socket cannot be created.
    """
    listener = _listen(path)
    inode = path.stat().st_ino
    async with TaskScope() as scope:
        server = Server(methods, limits, scope)
        accepting: asyncio.Server | None = None
        try:
            loop = asyncio.get_running_loop()
            accepting = await loop.create_unix_server(server.connection, sock=listener, backlog=_BACKLOG)
            yield server
        finally:
            # While this socket is open, no other file can have its inode number.
            _remove(path, inode)
            (accepting or listener).close()
            server.close()


class Server:
    """The calls and connections of one socket."""

    def __init__(self, methods: Methods, limits: Limits, scope: TaskScope) -> None:
        self.limits = limits
        self.buffered = 0
        """Bytes of incomplete requests of all connections."""
        self._methods = methods
        self._services = {path.rpartition("/")[0] for path in methods}
        self._scope = scope
        self._connections: set[ServerConnection] = set()

    @property
    def connections(self) -> int:
        """Number of connected clients."""
        return len(self._connections)

    def connection(self) -> ServerConnection:
        """Return the protocol of a new connection."""
        return ServerConnection(self)

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._connections):
            connection.close()

    # Called by connections

    def enter(self, connection: ServerConnection) -> bool:
        """Register a connection; False if there are too many."""
        if len(self._connections) >= self.limits.connections:
            log.v(2).info("Rejected gRPC connection over limit", limit=self.limits.connections)
            return False
        self._connections.add(connection)
        return True

    def leave(self, connection: ServerConnection) -> None:
        """Unregister a connection."""
        self._connections.discard(connection)

    def unknown_method(self, path: str) -> Status | None:
        """Return the status for a method that does not exist; None if it exists."""
        if path in self._methods:
            return None
        service, _, method = path.rpartition("/")
        if service in self._services:
            text = f"unknown method {method} for service {service.removeprefix('/')}"
        else:
            text = f"unknown service {service.removeprefix('/')}"
        return Status("UNIMPLEMENTED", text)

    def start(self, stream: ServerStream, path: str, message: bytes) -> asyncio.Task[None]:
        """Start the handler of a call whose request is complete."""
        return self._scope.start(self._run_handler(stream, path, message), name=f"gRPC {path}")

    async def _run_handler(self, stream: ServerStream, path: str, message: bytes) -> None:
        method = self._methods[path]
        try:
            request = method.request.FromString(message)
            if isinstance(method, UnaryMethod):
                await stream.send((await method.handler(request)).SerializeToString())
            else:
                async with aclosing(method.handler(request)) as responses:
                    async for response in responses:
                        await _send_in_time(stream, response.SerializeToString(), method.send_timeout)
            status = _OK
        except DecodeError:
            status = Status("INTERNAL", "the request cannot be decoded")
        except GrpcError as err:
            status = err.status
        except Exception as err:  # the boundary of a call: the client gets a status, the kubelet continues
            log.error(err, "Failed to handle gRPC call", method=path)
            status = Status("UNKNOWN", f"{type(err).__name__}: {err}")
        stream.finish(status)


async def _send_in_time(stream: ServerStream, message: bytes, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stream.send(message)
    except TimeoutError:
        text = f"the client did not read a message within {seconds:g} s"
        raise GrpcError("RESOURCE_EXHAUSTED", text) from None


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"cannot listen at {path}: it is too long for a socket (at most {MAX_PATH_BYTES} bytes): "
            "choose a shorter directory",
        )
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
    except OSError as err:
        listener.close()
        raise OSError(err.errno, f"cannot listen at {path}: {err.strerror or err}") from None
    return listener


def _remove(path: Path, inode: int) -> None:
    """Remove this server's socket, unless the next kubelet process has already replaced it."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()
