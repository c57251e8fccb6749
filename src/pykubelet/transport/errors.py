"""Exceptions of calls to the container runtime and other gRPC servers.

    CriError                  a call failed; see `.call`, `.code`, `.message`
    ├─ Unavailable            the server is not reachable; the next call reconnects
    ├─ NotFound               the container, sandbox or image does not exist
    ├─ AlreadyExists
    ├─ ResourceExhausted      also: a response larger than the message limit
    ├─ DeadlineExceeded       no response in time
    │  └─ CommandTimedOut     a command in a container exceeded its timeout
    ├─ Unimplemented          the runtime does not implement the call
    ├─ BadResponse            the response violates the protocol
    └─ ConnectError           no usable runtime at the endpoint; the text is one line with a remedy
       └─ EndpointError       the endpoint itself is not valid (also a ValueError)

Codes are spelled as in upstream's events (`NotFound`, not `NOT_FOUND`), because users and scripts search for
them.
"""

from __future__ import annotations

from collections.abc import Sequence


class CriError(Exception):
    """Raised when a call to the runtime fails."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(call, code, message)
        self.call = call
        self.code = code
        self.message = message

    @property
    def rpc_text(self) -> str:
        """The failure without the call's name, as pod events contain it."""
        return f"rpc error: code = {self.code} desc = {self.message}"

    def __str__(self) -> str:
        return f"{self.call}: {self.rpc_text}"


class Unavailable(CriError):
    """Raised when the runtime is not reachable."""


class NotFound(CriError):
    """Raised when the object of the call does not exist."""


class AlreadyExists(CriError):
    """Raised when an object of that name exists."""


class ResourceExhausted(CriError):
    """Raised when a limit is reached, of the runtime or of the message size."""


class DeadlineExceeded(CriError):
    """Raised when the runtime does not respond in time."""


class CommandTimedOut(DeadlineExceeded):
    """Raised when a command in a container exceeds its timeout."""

    def __init__(self, command: Sequence[str], timeout_seconds: int, message: str) -> None:
        super().__init__("ExecSync", "DeadlineExceeded", message)
        self.command = list(command)
        self.timeout_seconds = timeout_seconds

    def __str__(self) -> str:
        return f'command timed out: "{" ".join(self.command)}" timed out after {self.timeout_seconds}s'


class Unimplemented(CriError):
    """Raised when the runtime does not implement the call."""


class BadResponse(CriError):
    """Raised when a response lacks required fields or cannot be decoded."""

    def __init__(self, call: str, message: str) -> None:
        super().__init__(call, "Internal", message)

    def __str__(self) -> str:
        return f"{self.call}: the runtime's answer is not valid: {self.message}"


class ConnectError(CriError):
    """Raised when there is no usable runtime at an endpoint."""

    def __init__(self, message: str, code: str = "Unavailable") -> None:
        super().__init__("Connect", code, message)

    def __str__(self) -> str:
        return self.message


class EndpointError(ConnectError, ValueError):
    """Raised for an endpoint that is not valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "InvalidArgument")


_CLASSES: dict[str, type[CriError]] = {
    cls.__name__: cls
    for cls in (Unavailable, NotFound, AlreadyExists, ResourceExhausted, DeadlineExceeded, Unimplemented)
}


def from_status(call: str, status: str, details: str | None) -> CriError:
    """Return the exception for a gRPC status code, given by its upper-case name."""
    code = "Canceled" if status == "CANCELLED" else status.title().replace("_", "")
    message = details or "no details were given"
    if code == "DeadlineExceeded" and message == "Deadline Exceeded":
        # Go clients of the runtime report their own deadline with this text.
        message = "context deadline exceeded"
    return _CLASSES.get(code, CriError)(call, code, message)
