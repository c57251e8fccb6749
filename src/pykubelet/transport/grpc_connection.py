"""gRPC client connection over HTTP/2, as an asyncio protocol, and gRPC status codes.

Used for CRI, device, DRA and CSI plugins and gRPC probes. grpcio needs a thread, a C core and a socket pair
to wake the event loop: more than twice the CPU time per call, and 4 MB. A client needs little of HTTP/2:
requests are complete when they are sent, and responses are small.

`Call.answer` waits for the end of a call, `Call.read` for its next message. A call always ends with a gRPC
status, also when the connection breaks (UNAVAILABLE) or its deadline expires (DEADLINE_EXCEEDED); the server
gets a RST_STREAM for a call that ends before its response. Calls raise nothing but CancelledError. A response
without a gRPC status gets the code that the gRPC specification assigns to its HTTP status or reset code.

Servers may be hostile: gRPC probes connect to pods. The limits are those of `http2.py`: size of headers, flow
control, frames without progress; and reading stops while the server does not read. A server that exceeds them
loses its connection, and its calls end with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from pykubelet.transport import http2
from pykubelet.transport import http2 as http2_rules
from pykubelet.transport.http2 import (
    Code,
    FrameBudget,
    FrameType,
    HeaderBlocks,
    Http2Error,
    ProtocolError,
    Setting,
    frame,
)

CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_HTTP_CODES = {400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED"}
_RESET_CODES = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}


@dataclass(frozen=True, slots=True)
class Status:
    """gRPC status of a call: its code in upper case, and the server's message."""

    code: str
    message: str = ""


LATE = Status("DEADLINE_EXCEEDED", "Deadline Exceeded")


def status_in(headers: dict[str, str]) -> Status:
    """Return the status in the trailers of a call."""
    if (code := headers.get("grpc-status")) is not None:
        known = code.isdecimal() and len(code) <= 2 and int(code) < len(CODES)
        return Status(CODES[int(code)] if known else "UNKNOWN", unquote(headers.get("grpc-message", "")))
    http = headers.get(":status", "")
    text = f"the server answered with HTTP status {http[:20] or 'none'} and without a status of gRPC"
    number = int(http) if http.isdecimal() and len(http) == 3 else 0
    return Status(_HTTP_CODES.get(number, "UNAVAILABLE"), text)


def status_of_reset(code: int) -> Status:
    """Return the status of a call that was reset with an HTTP/2 error code."""
    text = f"stream terminated by RST_STREAM with error code: {code}"
    return Status(_RESET_CODES.get(code, "INTERNAL"), text)


MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
"""Bytes of one header block of a runtime or a plugin, which includes error messages."""
HANDSHAKE_SECONDS = 5.0
"""Seconds to wait for the server's SETTINGS frame."""
_CANCEL = http2.number(8)
_LAST_STREAM = 2**30
_STREAM_WINDOW = 32 * 1024 * 1024
_RENEW_BYTES = 4 * 1024 * 1024
"""Bytes after which the flow-control window is extended."""
_MAX_BLOCKS = 64
_LONGEST_KNOWN_BLOCK = 512
_MAX_HEADER_BLOCKS = 8
"""Maximum header blocks of one response: informational ones, headers and trailers."""
_MAX_UNREAD = 65_536
"""Maximum messages of a stream that its reader has not read yet."""
_POINTS_PER_CALL = 16.0
_LONGEST_REASON = 200
_PREFIX = struct.Struct(">?L")
_UNITS = (("m", 1e3), ("S", 1.0), ("M", 1 / 60), ("H", 1 / 3600))
_MAX_DIGITS = 8


class Call:
    """A call in progress."""

    def __init__(self, connection: Connection, stream: int, window: int, limit: int) -> None:
        self.status: Status | None = None
        """Final status; None while the call is in progress."""
        self.unsent = b""
        self.window = window
        """Bytes that may be sent to the server."""
        self.headers: dict[str, str] = {}
        self._limit = limit
        self._connection = connection
        self._stream = stream
        self._data = bytearray()
        self._messages: deque[bytes] = deque()
        self._max_unread = _MAX_UNREAD
        self._header_blocks = 0
        self._receive_window = _STREAM_WINDOW
        """Bytes that the server may send."""
        self._consumed = 0
        self._activity: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf

    async def wait_response(self) -> bytes | None:
        """Wait for the end of the call; return its message, or None. `status` is set then.

        A cancellation resets the call.
        """
        self._max_unread = 1
        try:
            while self.status is None:
                await self._wait()
        finally:
            self.cancel()
        return self._messages.popleft() if self._messages else None

    async def read(self) -> bytes | None:
        """Wait for the next message; None at the end of the call."""
        while not self._messages:
            if self.status is not None:
                return None
            await self._wait()
        message = self._messages.popleft()
        self._consumed += len(message)
        if self._consumed >= _RENEW_BYTES and self.status is None:
            self._connection.renew_window(self._stream, self._consumed)
            self._receive_window += self._consumed
            self._consumed = 0
        return message

    def cancel(self) -> None:
        """Reset the call, unless it has ended."""
        if self.status is None:
            self._connection.reset(self._stream)
            self.end(Status("CANCELLED"))

    def set_deadline(self, seconds: float) -> None:
        """End the call with DEADLINE_EXCEEDED after so many seconds, unless it has ended."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        self._timer = loop.call_later(seconds, self._expire)

    # Called by the connection

    def received(self, data: bytes, size: int) -> None:
        """Handle response data that came in a frame of `size` bytes. Raises Http2Error."""
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2Error(Code.FLOW_CONTROL, "more data than there is room for")
        self._data += data
        while self.status is None and len(self._data) >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(self._data)
            if compressed:
                self._fail("INTERNAL", "the answer is compressed, which was not asked for")
            elif size > self._limit:
                self._fail(
                    "RESOURCE_EXHAUSTED", f"Received message larger than max ({size} vs. {self._limit})"
                )
            elif len(self._data) >= _PREFIX.size + size:
                if len(self._messages) >= self._max_unread:
                    self._fail("RESOURCE_EXHAUSTED", "more messages than the caller takes")
                    return
                self._connection.credit_message()
                self._messages.append(bytes(self._data[_PREFIX.size : _PREFIX.size + size]))
                del self._data[: _PREFIX.size + size]
                self._wake_waiter()
            else:
                return

    def received_headers(self, headers: Iterable[tuple[str, str]], *, last: bool) -> None:
        """Handle headers or trailers. Raises ProtocolError for too many of them."""
        self._header_blocks += 1
        if self._header_blocks > _MAX_HEADER_BLOCKS:
            raise ProtocolError("a response has too many headers")
        self.headers.update(headers)
        if last:
            self.end(status_in(self.headers))

    def was_reset(self, code: int) -> None:
        """Handle RST_STREAM; a server that also enforces the deadline may be faster than this client."""
        status = status_of_reset(code)
        is_late = status.code == "CANCELLED" and asyncio.get_running_loop().time() >= self._deadline
        self.end(LATE if is_late else status)

    def end(self, status: Status) -> None:
        """Set the final status, unless it is set."""
        if self.status is None:
            self.status = status
            self._connection.forget(self._stream)
            if self._timer is not None:
                self._timer.cancel()
            self._wake_waiter()

    def _fail(self, code: str, message: str) -> None:
        self._connection.reset(self._stream)
        self.end(Status(code, message))

    def _expire(self) -> None:
        self._fail(LATE.code, LATE.message)

    def _wake_waiter(self) -> None:
        if self._activity is not None and not self._activity.done():
            self._activity.set_result(None)

    async def _wait(self) -> None:
        self._activity = asyncio.get_running_loop().create_future()
        await self._activity


class Connection(asyncio.Protocol):
    """A client connection, usable once `wait_settings` returned True.

    A message has at most `limit` bytes, the headers of a response at most `header_limit`. The server may send
    `max_blocks` header blocks in total: decoding them is slow.
    """

    def __init__(
        self,
        authority: str,
        limit: int = MAX_MESSAGE_BYTES,
        header_limit: int = MAX_HEADER_BYTES,
        max_blocks: float = math.inf,
    ) -> None:
        self._authority = authority
        self._limit = limit
        self._header_limit = header_limit
        self._blocks_left = max_blocks
        self._transport: asyncio.Transport | None = None
        self._settings_received: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._headers = HeaderBlocks(header_limit)
        self._budget = FrameBudget(asyncio.get_running_loop().time)
        self._known_blocks: dict[bytes, list[tuple[str, str]]] = {}
        """Decoded headers by their block, of servers that do not use the dynamic table."""
        self._buffer = b""
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._open = True
        self._window = http2.FIRST_WINDOW
        self._stream_window = http2.FIRST_WINDOW
        self._max_frame = http2.MAX_FRAME
        self._max_calls = math.inf
        self._unacknowledged = 0

    @property
    def usable(self) -> bool:
        """Whether new calls can be made."""
        return self._open and self._next < _LAST_STREAM and len(self._calls) < self._max_calls

    @property
    def open(self) -> bool:
        """Whether neither side has closed the connection."""
        return self._open

    async def wait_settings(self, seconds: float = HANDSHAKE_SECONDS) -> bool:
        """Wait for the server's SETTINGS frame; False if it does not arrive in time, or other data does."""
        try:
            async with asyncio.timeout(seconds):
                await self._settings_received
        except TimeoutError:
            self.close(Status("UNAVAILABLE", "the server accepts connections and stays silent"))
            return False
        except asyncio.CancelledError:
            self.close(Status("CANCELLED"))
            raise
        return self._open

    def call(
        self, path: str, message: bytes, headers: Iterable[tuple[str, str]] = (), timeout: float = math.inf
    ) -> Call:
        """Start a call; `timeout` is in seconds."""
        stream, self._next = self._next, self._next + 2
        self._budget.credit(_POINTS_PER_CALL)
        call = self._calls[stream] = Call(self, stream, self._stream_window, self._limit)
        if not self._open:
            # No response can arrive: without a timeout the caller would wait indefinitely.
            call.end(Status("UNAVAILABLE", "the connection is closed"))
            return call
        block = http2.request_headers(path, self._authority)
        if timeout != math.inf:
            block += http2.more_headers([("grpc-timeout", grpc_timeout(timeout))])
            call.set_deadline(timeout)
        if headers:
            block += http2.more_headers(headers)
        call.unsent = _PREFIX.pack(False, len(message)) + message
        self._write(frame(FrameType.HEADERS, http2.END_HEADERS, stream, block) + self._sendable(stream, call))
        return call

    def close(self, status: Status) -> None:
        """Close the connection and end all calls with this status."""
        self._open = False
        if not self._settings_received.done():
            self._settings_received.set_result(None)
        for call in list(self._calls.values()):
            call.end(status)
        self._buffer = b""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size():
            # The server does not read: a graceful close would wait until it exits.
            self._transport.abort()
        else:
            self._transport.close()

    # Called by calls

    def credit_message(self) -> None:
        """Credit a message of the server to its frame budget."""
        self._budget.credit(1)

    def reset(self, stream: int) -> None:
        """Send RST_STREAM for a call."""
        self._write(frame(FrameType.RST_STREAM, 0, stream, _CANCEL))

    def forget(self, stream: int) -> None:
        """Remove a call that has ended."""
        self._calls.pop(stream, None)

    def renew_window(self, stream: int, count: int) -> None:
        """Extend a flow-control window by `count` bytes."""
        self._write(frame(FrameType.WINDOW_UPDATE, 0, stream, http2.number(count)))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the connection preface and the settings."""
        self._transport = cast(asyncio.Transport, transport)
        greeting = {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            Setting.MAX_HEADER_LIST_SIZE: self._header_limit,
        }
        self._write(http2.PREFACE + http2.settings(greeting))
        self.renew_window(0, http2.MAX_WINDOW - http2.FIRST_WINDOW)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls with UNAVAILABLE."""
        self.close(Status("UNAVAILABLE", f"the connection broke: {exc}" if exc else "the connection broke"))

    def pause_writing(self) -> None:
        """Stop reading while the server does not read: replies to its PINGs alone would fill the memory."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames."""
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        try:
            while end - at >= http2.HEAD_BYTES and self._open:
                size, kind, flags, stream = http2.read_head(data, at)
                if size > http2.MAX_FRAME:
                    raise ProtocolError("a frame is too large")
                start = at + http2.HEAD_BYTES
                if end - start < size:
                    break
                self._frame(kind, flags, stream, data[start : start + size])
                at = start + size
        except ProtocolError as err:
            reason = str(err)[:_LONGEST_REASON]
            self.close(Status("UNAVAILABLE", f"the server does not speak gRPC: {reason}"))
            return
        self._buffer = data[at:] if self._open else b""

    # Frames

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if not self._settings_received.done():
            if kind != FrameType.SETTINGS or flags & http2.ACK:
                raise ProtocolError("its first frame is not its settings")
            self._settings_received.set_result(None)
        if self._headers.interrupted != (kind == FrameType.CONTINUATION):
            raise ProtocolError("headers are interrupted, or continued without a beginning")
        http2_rules.check_frame(kind, flags, stream, payload)
        if stream >= self._next:
            raise ProtocolError("a frame of a call that was never made")
        self._budget.charge(kind, len(payload))
        match kind:
            case FrameType.DATA:
                self._data_frame(flags, stream, payload)
            case FrameType.HEADERS:
                block = http2_rules.header_block(flags, payload)
                self._header_block(self._headers.begin(stream, flags, block))
            case FrameType.CONTINUATION:
                self._header_block(self._headers.resume(stream, flags, payload))
            case FrameType.RST_STREAM:
                code = http2.read_number(payload)
                if call := self._calls.get(stream):
                    call.was_reset(code)
            case FrameType.SETTINGS if not flags & http2.ACK:
                self._settings_frame(payload)
            case FrameType.PING if not flags & http2.ACK:
                self._write(frame(FrameType.PING, http2.ACK, 0, payload))
            case FrameType.GOAWAY:
                self._goaway_frame(payload)
            case FrameType.WINDOW_UPDATE:
                self._window_frame(stream, http2.read_number(payload))
            case FrameType.PUSH_PROMISE:
                raise ProtocolError("it pushes")

    def _data_frame(self, flags: int, stream: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged >= _RENEW_BYTES:
            self.renew_window(0, self._unacknowledged)
            self._unacknowledged = 0
        call = self._calls.get(stream)
        if call is not None:
            content = http2.unpadded(flags, payload)
            self._budget.credit_bytes(len(content))
            call.received(content, len(payload))
            if flags & http2.END_STREAM:
                call.end(Status("INTERNAL", "the answer ended without a status"))

    def _header_block(self, complete: tuple[int, int, bytes] | None) -> None:
        if complete is None:
            return
        self._blocks_left -= 1
        if self._blocks_left < 0:
            raise ProtocolError("a response has too many headers")
        stream, flags, block = complete
        # Also for a call that has ended: HPACK is stateful, and the decoder must see every block.
        headers = self._known_blocks.get(block) or self._decoded(block)
        if call := self._calls.get(stream):
            call.received_headers(headers, last=bool(flags & http2.END_STREAM))

    def _decoded(self, block: bytes) -> list[tuple[str, str]]:
        headers = self._headers.decode(block)
        # Without a dynamic table equal bytes are equal headers, and need not be decoded again.
        if (
            self._headers.stateless
            and len(block) <= _LONGEST_KNOWN_BLOCK
            and len(self._known_blocks) < _MAX_BLOCKS
        ):
            self._known_blocks[block] = headers
        return headers

    def _settings_frame(self, payload: bytes) -> None:
        for name, value in http2.read_settings(payload):
            http2_rules.check_setting(name, value)
            if name == Setting.INITIAL_WINDOW_SIZE:
                grown, self._stream_window = value - self._stream_window, value
                for call in self._calls.values():
                    call.window = http2_rules.grown_window(call.window, grown)
            elif name == Setting.MAX_FRAME_SIZE:
                self._max_frame = value
            elif name == Setting.MAX_CONCURRENT_STREAMS:
                self._max_calls = value
        self._write(frame(FrameType.SETTINGS, http2.ACK, 0))
        self._send_more()

    def _window_frame(self, stream: int, grown: int) -> None:
        if stream == 0:
            self._window = http2_rules.grown_window(self._window, grown)
        elif call := self._calls.get(stream):
            call.window = http2_rules.grown_window(call.window, grown)
        self._send_more()

    def _goaway_frame(self, payload: bytes) -> None:
        """Make no new calls; calls that the server has accepted continue."""
        last = http2.read_number(payload)
        self._next = _LAST_STREAM
        for stream, call in list(self._calls.items()):
            if stream > last:
                call.end(Status("UNAVAILABLE", "the server is going away"))

    # Sending

    def _sendable(self, stream: int, call: Call) -> bytes:
        """Return the DATA frames of a request that flow control allows now."""
        frames, at, end = [], 0, len(call.unsent)
        while (size := min(end - at, self._max_frame, self._window, call.window)) > 0:
            part, at = call.unsent[at : at + size], at + size
            self._window -= size
            call.window -= size
            self._budget.credit_bytes(size)
            frames.append(frame(FrameType.DATA, 0 if at < end else http2.END_STREAM, stream, part))
        call.unsent = call.unsent[at:]
        return b"".join(frames)

    def _send_more(self) -> None:
        for stream, call in self._calls.items():
            if call.unsent and (frames := self._sendable(stream, call)):
                self._write(frames)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def connect_unix(path: str, seconds: float = HANDSHAKE_SECONDS) -> Connection:
    """Connect to a gRPC server on a Unix socket.

    Raises OSError, also if the server sends no SETTINGS within `seconds`.
    """
    loop = asyncio.get_running_loop()
    # Go servers reject a socket path as :authority.
    _, connection = await loop.create_unix_connection(lambda: Connection("localhost"), path)
    if not await connection.wait_settings(seconds):
        raise ConnectionError("it does not answer as a gRPC server does")
    return connection


def grpc_timeout(seconds: float) -> str:
    """Format a timeout for the grpc-timeout header: at most eight digits and a unit."""
    for unit, per_second in _UNITS:
        amount = math.ceil(max(0.0, seconds) * per_second)
        if len(str(amount)) <= _MAX_DIGITS:
            return f"{amount}{unit}"
    return "99999999H"
