"""What a client of our gRPC server may do: the rules of HTTP/2 and gRPC, as pure functions.

A rule of the connection that is broken ends the connection (`Violation`), one of a call ends the call
with a status.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from pykubelet.cri import http2
from pykubelet.cri.grpc_status import Status
from pykubelet.cri.http2 import Kind, ProtocolError

PREFIX = struct.Struct(">?L")
"""What precedes each message: whether it is compressed, and its length."""
MOST_CONTINUATIONS = 8

_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_DIGITS = 8
_SIZES = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.WINDOW_UPDATE: 4, Kind.PING: 8}
_ON_CONNECTION = (Kind.SETTINGS, Kind.PING, Kind.GOAWAY)


class Code(IntEnum):
    """Why a stream or a connection ends, in HTTP/2's numbers."""

    NO_ERROR = 0
    PROTOCOL = 1
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED_STREAM = 7
    COMPRESSION = 9
    CALM_DOWN = 11


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take.

    `request` and `headers` are bytes of a call, `calls` are those of a connection at once, `held` are the
    bytes of all requests that are not complete yet, of all connections.
    """

    request: int = 1024 * 1024
    headers: int = 16 * 1024
    calls: int = 64
    connections: int = 64
    held: int = 8 * 1024 * 1024


class Violation(ProtocolError):
    """The peer broke a rule that has a number of its own."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def check_frame(kind: int, flags: int, stream: int, payload: bytes) -> None:
    """Raise ProtocolError for a frame of a length or on a stream that its kind cannot have."""
    if kind > Kind.CONTINUATION:
        return  # kinds that are not known are to be skipped
    if kind != Kind.WINDOW_UPDATE and (stream == 0) != (kind in _ON_CONNECTION):
        raise ProtocolError("a frame on the wrong stream")
    if kind == Kind.HEADERS and stream % 2 == 0:
        raise ProtocolError("a client's calls have odd numbers")
    size = len(payload)
    wrong = size != _SIZES.get(Kind(kind), size)
    if kind == Kind.SETTINGS:
        wrong = bool(size % 6 or (flags & http2.ACK and size))
    if wrong or (kind == Kind.GOAWAY and size < 8):
        raise Violation(Code.FRAME_SIZE, "a frame of a wrong length")


def header_block(flags: int, payload: bytes) -> bytes:
    """Give the headers in a HEADERS frame, without padding and priority; raises ProtocolError."""
    block = http2.unpadded(flags, payload)
    if not flags & http2.PRIORITIZED:
        return block
    if len(block) < 5:
        raise Violation(Code.FRAME_SIZE, "headers are too short")
    return block[5:]


def http_refusal(headers: dict[str, str]) -> bytes | None:
    """Give the headers that answer a request which is not gRPC's; None when it is."""
    if headers.get(":method") != "POST":
        status = "405"
    elif headers.get("content-type", "").partition(";")[0].partition("+")[0] != "application/grpc":
        status = "415"
    else:
        return None
    return http2.more_headers([(":status", status)])


def read_timeout(text: str) -> float | None:
    """Read a timeout as gRPC writes it, digits and a unit; gives seconds, None when it is none."""
    amount, unit = text[:-1], text[-1:]
    digits = amount.isascii() and amount.isdigit() and len(amount) <= _MOST_DIGITS
    return int(amount) * _UNITS[unit] if digits and unit in _UNITS else None


def request_problem(request: bytearray, limit: int) -> Status | None:
    """Say what is wrong with a request as far as it has come; None when nothing is."""
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


def whole_message(request: bytearray) -> bytes | None:
    """Give the message of a request that will not grow any more; None when a part is missing."""
    if len(request) < PREFIX.size or PREFIX.unpack_from(request)[1] != len(request) - PREFIX.size:
        return None
    return bytes(request[PREFIX.size :])
