"""HTTP/2 as gRPC uses it: frames, request headers, and validation and limits of what peers send.

Pure: bytes in, bytes out, and time is an argument. Request headers are encoded without compression, which
every server must accept, so that the headers of a method are a constant.

`check_frame`, `check_setting` and `HeaderBlocks` are used by the client and the server, `FrameBudget` by the
client. Peers are not trusted: clients of the kubelet's sockets are any process that may open them, and
servers include pods (gRPC probes). A violation or an exceeded limit raises ProtocolError, and the caller
closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import cast

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME = 16384
"""Largest payload in bytes that is accepted, and that may be sent before the peer's settings allow more."""
FIRST_WINDOW = 65535
"""Initial flow-control window in bytes."""
MAX_WINDOW = 2**31 - 1
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20
_HEAD = struct.Struct(">BHBBL")  # length (8 + 16 bits), kind, flags, stream
HEAD_BYTES = _HEAD.size


class FrameType(IntEnum):
    """Frame types."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """Identifiers of settings."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ProtocolError(Exception):
    """Raised when the peer violates HTTP/2."""


def frame(kind: FrameType, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def read_head(data: bytes | bytearray, at: int) -> tuple[int, int, int, int]:
    """Decode a frame header: payload length, type, flags and stream."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 16 | low, kind, flags, stream & 0x7FFFFFFF


def settings(values: dict[Setting, int]) -> bytes:
    """Encode a SETTINGS frame."""
    payload = b"".join(struct.pack(">HL", name, value) for name, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Decode the payload of a SETTINGS frame. Raises ProtocolError."""
    if len(payload) % 6:
        raise ProtocolError("settings of an odd length")
    return struct.iter_unpack(">HL", payload)


def number(value: int) -> bytes:
    """Encode a 32-bit number: the payload of several frames."""
    return struct.pack(">L", value)


def read_number(payload: bytes) -> int:
    """Decode the 31-bit number at the start of a payload. Raises ProtocolError."""
    if len(payload) < 4:
        raise ProtocolError("a frame is too short")
    return int.from_bytes(payload[:4], "big") & 0x7FFFFFFF


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the content of a DATA or HEADERS frame without its padding. Raises ProtocolError."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than frame")
    return payload[1 : len(payload) - payload[0]]


@lru_cache(maxsize=256)
def request_headers(path: str, authority: str) -> bytes:
    """Encode the headers that are equal in each call of a gRPC method."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            b"\x04" + _text(path),
            b"\x01" + _text(authority),
            b"\x0f\x10" + _text("application/grpc"),  # content-type
            more_headers([("te", "trailers")]),
        )
    )


def more_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode further headers; names are lower-case."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    data = text.encode()
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    written = bytearray((127,))
    size -= 127
    while size > 127:
        written.append(size & 127 | 128)
        size >>= 7
    written.append(size)
    return bytes(written) + data


MAX_CONTINUATIONS = 8
"""Maximum frames of one header block."""
HEADER_BYTES = 16 * 1024
"""Maximum bytes of one header block, compressed and as a list."""
_MAX_SIZE_UPDATES = 2
_LARGEST_FRAME_SETTING = 2**24 - 1
_SIZES = {FrameType.PRIORITY: 5, FrameType.RST_STREAM: 4, FrameType.WINDOW_UPDATE: 4, FrameType.PING: 8}
_ON_CONNECTION = (FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY)
_POINTS = 2000.0
_POINTS_PER_SECOND = 200.0
_BYTES_PER_POINT = 256


class Code(IntEnum):
    """HTTP/2 error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL = 1
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED_STREAM = 7
    COMPRESSION = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(ProtocolError):
    """Raised for a violation that has its own error code."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def check_frame(kind: int, flags: int, stream: int, payload: bytes) -> None:
    """Raise ProtocolError for a frame with a length or stream that its type does not allow."""
    if kind > FrameType.CONTINUATION:
        return  # unknown types must be ignored
    if kind != FrameType.WINDOW_UPDATE and (stream == 0) != (kind in _ON_CONNECTION):
        raise ProtocolError("a frame on the wrong stream")
    if kind == FrameType.HEADERS and stream % 2 == 0:
        raise ProtocolError("a client's calls have odd numbers")
    size = len(payload)
    is_wrong_size = size != _SIZES.get(FrameType(kind), size)
    if kind == FrameType.SETTINGS:
        is_wrong_size = bool(size % 6 or (flags & ACK and size))
    if is_wrong_size or (kind == FrameType.GOAWAY and size < 8):
        raise Http2Error(Code.FRAME_SIZE, "a frame of a wrong length")


def check_setting(name: int, value: int) -> None:
    """Raise ProtocolError for a setting with a value that is not allowed."""
    if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise Http2Error(Code.FLOW_CONTROL, "a window is too large")
    if name == Setting.MAX_FRAME_SIZE and not MAX_FRAME <= value <= _LARGEST_FRAME_SETTING:
        raise ProtocolError("a frame size that no frame may have")


def grown_window(window: int, count: int) -> int:
    """Return a flow-control window after it grew by `count` bytes. Raises Http2Error on overflow."""
    if window + count > MAX_WINDOW:
        raise Http2Error(Code.FLOW_CONTROL, "a window is too large")
    return window + count


def header_block(flags: int, payload: bytes) -> bytes:
    """Return the header block of a HEADERS frame, without padding and priority. Raises ProtocolError."""
    block = unpadded(flags, payload)
    if not flags & PRIORITIZED:
        return block
    if len(block) < 5:
        raise Http2Error(Code.FRAME_SIZE, "headers are too short")
    return block[5:]


class HeaderBlocks:
    """Assembler and HPACK decoder of one connection's header blocks, of at most `limit` bytes each."""

    def __init__(self, limit: int = HEADER_BYTES) -> None:
        self._limit = limit
        self._decoder = hpack.Decoder(max_header_list_size=limit)
        self._incomplete: tuple[int, int, list[bytes], int] | None = None
        """Stream, flags, frames and bytes of an incomplete block."""

    @property
    def interrupted(self) -> bool:
        """Whether the next frame must be a CONTINUATION."""
        return self._incomplete is not None

    @property
    def stateless(self) -> bool:
        """Whether the peer's dynamic table is empty, so that equal blocks mean equal headers."""
        return not self._decoder.header_table.dynamic_entries

    def begin(self, stream: int, flags: int, block: bytes) -> tuple[int, int, bytes] | None:
        """Handle a HEADERS frame; return stream, flags and block if it is complete. Raises ProtocolError."""
        self._incomplete = stream, flags, [], 0
        return self._add(stream, flags, block)

    def resume(self, stream: int, flags: int, block: bytes) -> tuple[int, int, bytes] | None:
        """Handle a CONTINUATION frame as `begin` does a HEADERS frame. Raises ProtocolError."""
        return self._add(stream, flags, block)

    def decode(self, block: bytes) -> list[tuple[str, str]]:
        """Decode a complete block. Raises Http2Error, after which the connection is not usable any more."""
        _check_size_updates(block)
        try:
            return list(cast(Iterable[tuple[str, str]], self._decoder.decode(block)))
        except hpack.OversizedHeaderListError:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "headers are too large") from None
        except (hpack.HPACKError, UnicodeDecodeError):
            # The exception's text contains the block.
            raise Http2Error(Code.COMPRESSION, "headers cannot be decoded") from None

    def _add(self, stream: int, flags: int, part: bytes) -> tuple[int, int, bytes] | None:
        if self._incomplete is None or self._incomplete[0] != stream:
            raise ProtocolError("headers are continued wrongly")
        _, before, parts, size = self._incomplete
        size += len(part)
        parts.append(part)
        if size > self._limit or len(parts) > MAX_CONTINUATIONS:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "headers are too large")
        if flags & END_HEADERS:
            self._incomplete = None
            return stream, before | END_HEADERS, b"".join(parts)
        self._incomplete = stream, before, parts, size
        return None


class FrameBudget:
    """Token bucket that bounds the frames of a peer without progress of a call.

    Every frame costs a point, and one more per setting or per 256 bytes that are not data of a call; calls,
    messages, data and time earn points. Floods of PING, SETTINGS, empty or unknown frames exhaust it in
    milliseconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._points = _POINTS
        self._since = clock()

    def charge(self, kind: int, size: int) -> None:
        """Charge a frame with `size` bytes of payload. Raises Http2Error when the budget is exhausted."""
        cost = 6 if kind == FrameType.SETTINGS else _BYTES_PER_POINT  # each setting is handled separately
        self._points -= 1 if kind == FrameType.DATA else 1 + size // cost
        if self._points >= 0:
            return
        now = self._clock()
        self.credit((now - self._since) * _POINTS_PER_SECOND)
        self._since = now
        if self._points < 0:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "too many frames without progress")

    def credit(self, points: float) -> None:
        """Credit points, up to the bucket's capacity."""
        self._points = min(_POINTS, self._points + points)

    def credit_bytes(self, count: int) -> None:
        """Credit data of calls: one point per 256 bytes; smaller pieces earn nothing."""
        self.credit(count // _BYTES_PER_POINT)


def _check_size_updates(block: bytes) -> None:
    """Raise Http2Error for more HPACK table size updates than an encoder can need."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        if count > _MAX_SIZE_UPDATES:
            raise Http2Error(Code.COMPRESSION, "too many table size updates")
        at += 1
        if block[at - 1] & 0x1F == 0x1F:
            while at < len(block) and block[at] & 0x80:
                at += 1
            at += 1
