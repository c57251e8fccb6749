"""As much of SPDY/3.1 as a client needs that opens streams and sends and receives bytes on them.

Every CRI runtime serves interactive commands over SPDY, and also over WebSocket; but the WebSocket
protocol that they know (v4) cannot say "no more input", so that `… | pykubelet exec -i POD -- cat`
would never end. SPDY can.

Only frames are here, no sockets: bytes in, frames out, and the other way round. What a client of a
remote command has no use for is left out: headers that the server sends are not even decompressed
(that would need the protocol's dictionary), and there is no flow control, because the servers have none.
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

MOST_DATA = 16 * 1024
"""How much data to send at most in one frame, so that the other streams get their turn."""


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes on a stream; `last` says that there will be no more."""

    stream: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """A stream was given up."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for an answer with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class GoAway:
    """The connection is being closed."""


Frame = Data | Reset | Ping | GoAway


class FrameReader:
    """Cuts received bytes into frames; frames that say nothing to us are left out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Take bytes as they came and give the frames that are whole now."""
        self._buffer += received
        while len(self._buffer) >= _HEADER.size:
            first, second = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + (second & _LENGTH)
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            if frame := _read(first, second >> 24, payload):
                yield frame


class FrameWriter:
    """Writes frames; headers share one compression over the whole connection."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj()
        self._next_stream = 1

    def open_stream(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Open a stream; gives its number and the frame."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        pairs = b"".join(_text(name.lower()) + _text(value) for name, value in headers.items())
        block = self._compressor.compress(struct.pack(">I", len(headers)) + pairs)
        block += self._compressor.flush(zlib.Z_SYNC_FLUSH)
        # No associated stream, no priority, no slot.
        return stream, _control(_SYN_STREAM, struct.pack(">IIH", stream, 0, 0) + block)

    def data(self, stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Send bytes on a stream, in as many frames as it takes; `last` closes our half of it."""
        pieces = [data[start : start + MOST_DATA] for start in range(0, len(data), MOST_DATA)] or [b""]
        flags = [0] * (len(pieces) - 1) + [_FIN if last else 0]
        return b"".join(
            _HEADER.pack(stream, flag << 24 | len(piece)) + piece
            for piece, flag in zip(pieces, flags, strict=True)
        )

    def pong(self, ping: Ping) -> bytes:
        """Answer a ping."""
        return _control(_PING, struct.pack(">I", ping.number))


def _control(kind: int, payload: bytes) -> bytes:
    return _HEADER.pack((_CONTROL | _VERSION) << 16 | kind, len(payload)) + payload


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">I", len(encoded)) + encoded


def _read(first: int, flags: int, payload: bytes) -> Frame | None:
    if not first >> 31:
        return Data(first & _STREAM_ID, payload, bool(flags & _FIN))
    kind = first & 0xFFFF
    if kind == _GOAWAY:
        return GoAway()
    if len(payload) < 4 or kind not in (_RST_STREAM, _PING):
        return None
    (number,) = struct.unpack_from(">I", payload)
    return Ping(number) if kind == _PING else Reset(number & _STREAM_ID)
