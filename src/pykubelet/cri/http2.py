"""The parts of HTTP/2 that a gRPC client needs: frames, and the headers of a request.

Pure: bytes in, bytes out. Request headers are written without compression, which every server must
take and which makes all that is the same for each call of a method a constant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME = 16384
"""The longest payload that may be sent unasked, and that we take."""
FIRST_WINDOW = 65535
"""How many bytes may be sent before the receiver says that it can take more."""
MAX_WINDOW = 2**31 - 1

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

_HEAD = struct.Struct(">BHBBL")  # length (8 + 16 bits), kind, flags, stream
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """What a frame is."""

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
    """What a peer can say about itself."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ProtocolError(Exception):
    """The peer does not keep to HTTP/2."""


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def read_head(data: bytes | bytearray, at: int) -> tuple[int, int, int, int]:
    """Read a frame's head: the payload's length, kind, flags and stream."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 16 | low, kind, flags, stream & 0x7FFFFFFF


def settings(values: dict[Setting, int]) -> bytes:
    """Write a SETTINGS frame."""
    payload = b"".join(struct.pack(">HL", name, value) for name, value in values.items())
    return frame(Kind.SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Read a SETTINGS frame's payload; raises ProtocolError."""
    if len(payload) % 6:
        raise ProtocolError("settings of an odd length")
    return struct.iter_unpack(">HL", payload)


def number(value: int) -> bytes:
    """Write a 32-bit number: the payload of several frames."""
    return struct.pack(">L", value)


def read_number(payload: bytes) -> int:
    """Read the 31-bit number that begins a payload; raises ProtocolError."""
    if len(payload) < 4:
        raise ProtocolError("a frame is too short")
    return int.from_bytes(payload[:4], "big") & 0x7FFFFFFF


def unpadded(flags: int, payload: bytes) -> bytes:
    """Give the content of a DATA or HEADERS frame without its padding; raises ProtocolError."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than frame")
    return payload[1 : len(payload) - payload[0]]


@lru_cache(maxsize=256)
def request_headers(path: str, authority: str) -> bytes:
    """Write the headers that each call of a gRPC method has."""
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
    """Write further headers; names are in lower case."""
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
