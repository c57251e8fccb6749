"""What a client of our gRPC server may do: the rules of gRPC, as pure functions, and the limits.

Those of HTTP/2 are in `http2_rules`. A rule of a call that is broken ends the call with a status.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pykubelet.cri import http2
from pykubelet.cri.grpc_status import Status
from pykubelet.cri.http2_rules import HEADER_BYTES

PREFIX = struct.Struct(">?L")
"""What precedes each message: whether it is compressed, and its length."""

_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take.

    `request` and `headers` are bytes of a call, `calls` are those of a connection at once, `held` are the
    bytes of all requests that are not complete yet, of all connections.
    """

    request: int = 1024 * 1024
    headers: int = HEADER_BYTES
    calls: int = 64
    connections: int = 64
    held: int = 8 * 1024 * 1024


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
