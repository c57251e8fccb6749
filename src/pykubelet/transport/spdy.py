"""SPDY/3.1 frames of a client of the runtime's streaming server, without I/O.

This is the part of SPDY that remote commands and forwarded ports need. Headers from the server are not
decompressed (that needs the protocol's dictionary), and there is no flow control per stream, because the
servers do not implement it: back-pressure is that of the connection.

Data frames are yielded in the pieces in which they arrive; only frame headers and the short control
frames are kept until they are complete, and other frames are skipped, so the parser's memory does not
depend on the server.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_CONTROL = 0x8000
_VERSION = 3
_SYN_STREAM, _RST_STREAM, _PING, _GOAWAY = 1, 3, 6, 7
_FIN = 0x01
_HEADER = struct.Struct(">II")
_LENGTH = 0xFFFFFF
_STREAM_ID = 0x7FFFFFFF
_MAX_CONTROL_BYTES = 64
MAX_DATA_BYTES = 16 * 1024
"""Maximum bytes per data frame of `FrameWriter.data`, so that the streams interleave."""


@dataclass(frozen=True, slots=True)
class Data:
    """Piece of a data frame; `last` is the FIN flag, set on the last piece."""

    stream: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """RST_STREAM frame."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ping:
    """PING frame, to be echoed with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class GoAway:
    """GOAWAY frame: the peer closes the connection."""


Frame = Data | Reset | Ping | GoAway


class SpdyError(Exception):
    """Raised when the server sends a control frame that no server sends."""


class FrameReader:
    """Incremental parser of SPDY frames; irrelevant frame types are skipped."""

    def __init__(self) -> None:
        self._received = b""
        self._position = 0
        self._stream = 0
        self._fin = False
        self._left = 0
        """Bytes of the current data or skipped frame that are not parsed yet."""
        self._skipping = False

    @property
    def buffered(self) -> int:
        """Bytes that were fed and not yet yielded."""
        return len(self._received) - self._position

    def feed(self, received: bytes) -> None:
        """Add received bytes."""
        rest = self._received[self._position :]
        self._received = rest + received if rest else received
        self._position = 0

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that were fed so far. Raises SpdyError.

        Frames that the caller leaves in the iterator are yielded by the next call.
        """
        while True:
            if self._left:
                count = min(self._left, self.buffered)
                if not count:
                    return
                start, self._position = self._position, self._position + count
                self._left -= count
                if not self._skipping:
                    data = self._received[start : self._position]
                    yield Data(self._stream, data, self._fin and not self._left)
                continue
            if self.buffered < _HEADER.size:
                return
            first, second = _HEADER.unpack_from(self._received, self._position)
            length = second & _LENGTH
            if not first >> 31:
                self._position += _HEADER.size
                self._stream, self._fin = first & _STREAM_ID, bool(second >> 24 & _FIN)
                self._left, self._skipping = length, False
                if not length:
                    yield Data(self._stream, b"", self._fin)
                continue
            kind = first & 0xFFFF
            if kind not in (_RST_STREAM, _PING, _GOAWAY):
                self._position += _HEADER.size
                self._left, self._skipping = length, True
                continue
            if length > _MAX_CONTROL_BYTES:
                raise SpdyError(f"a control frame of type {kind} has {length} bytes")
            if self.buffered < _HEADER.size + length:
                return
            start = self._position + _HEADER.size
            self._position = start + length
            payload = self._received[start : self._position]
            if frame := _read_control(kind, payload):
                yield frame


class FrameWriter:
    """Encoder of SPDY frames; all headers of a connection share one compression context."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj()
        self._next_stream = 1

    def open_stream(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the number of a new stream and the SYN_STREAM frame that opens it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        pairs = b"".join(_text(name.lower()) + _text(value) for name, value in headers.items())
        block = self._compressor.compress(struct.pack(">I", len(headers)) + pairs)
        block += self._compressor.flush(zlib.Z_SYNC_FLUSH)
        # No associated stream, priority 0, slot 0.
        return stream, _control(_SYN_STREAM, struct.pack(">IIH", stream, 0, 0) + block)

    def data(self, stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Return bytes as data frames of a stream; `last` closes the sending half."""
        pieces = [data[start : start + MAX_DATA_BYTES] for start in range(0, len(data), MAX_DATA_BYTES)] or [
            b""
        ]
        flags = [0] * (len(pieces) - 1) + [_FIN if last else 0]
        return b"".join(
            _HEADER.pack(stream, flag << 24 | len(piece)) + piece
            for piece, flag in zip(pieces, flags, strict=True)
        )

    def pong(self, ping: Ping) -> bytes:
        """Return the reply to a PING."""
        return _control(_PING, struct.pack(">I", ping.number))


def data_header(stream: int, length: int, *, last: bool = False) -> bytes:
    """Return the header of a data frame with `length` bytes."""
    return _HEADER.pack(stream, (_FIN if last else 0) << 24 | length)


def _control(kind: int, payload: bytes) -> bytes:
    return _HEADER.pack((_CONTROL | _VERSION) << 16 | kind, len(payload)) + payload


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">I", len(encoded)) + encoded


def _read_control(kind: int, payload: bytes) -> Frame | None:
    if kind == _GOAWAY:
        return GoAway()
    if len(payload) < 4:
        return None
    (number,) = struct.unpack_from(">I", payload)
    return Ping(number) if kind == _PING else Reset(number & _STREAM_ID)
