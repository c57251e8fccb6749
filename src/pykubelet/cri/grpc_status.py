"""How a call of gRPC ends: its codes, and how they are read off the wire; for clients and servers alike.

Pure. An end without a status of gRPC gets the code that gRPC's documents give to what came instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

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
    """How a call ended: one of gRPC's codes in upper case, and the server's words."""

    code: str
    message: str = ""


LATE = Status("DEADLINE_EXCEEDED", "Deadline Exceeded")


def status_in(headers: dict[str, str]) -> Status:
    """Read how a call ended from its trailers."""
    if (code := headers.get("grpc-status")) is not None:
        known = code.isdecimal() and len(code) <= 2 and int(code) < len(CODES)
        return Status(CODES[int(code)] if known else "UNKNOWN", unquote(headers.get("grpc-message", "")))
    http = headers.get(":status", "")
    text = f"the server answered with HTTP status {http[:20] or 'none'} and without a status of gRPC"
    number = int(http) if http.isdecimal() and len(http) == 3 else 0
    return Status(_HTTP_CODES.get(number, "UNAVAILABLE"), text)


def status_of_reset(code: int) -> Status:
    """How a call ended that was reset, by HTTP/2's code for the reason."""
    text = f"stream terminated by RST_STREAM with error code: {code}"
    return Status(_RESET_CODES.get(code, "INTERNAL"), text)
