"""What can go wrong between the agent and its runtime, as a small tree.

    CriError                  a call failed; `.call`, `.code`, `.message` say which and why
    ├─ Unavailable            nobody answers; the channel keeps trying to reconnect by itself
    ├─ NotFound               the container, sandbox or image does not exist
    ├─ AlreadyExists
    ├─ ResourceExhausted      also: an answer larger than a message may be
    ├─ DeadlineExceeded       no answer in time
    │  └─ CommandTimedOut     a command in a container ran longer than it may
    ├─ Unimplemented          this runtime does not offer the call
    ├─ BadResponse            the runtime answered, with something no runtime may answer
    └─ ConnectError           no usable runtime at the endpoint; the text is one line with a remedy
       └─ EndpointError       the endpoint itself is wrong (also a ValueError)

The codes are spelled as in every other kubelet's events (`NotFound`, not `NOT_FOUND`), because
people and scripts search for them.
"""

from __future__ import annotations

from collections.abc import Sequence


class CriError(Exception):
    """A call to the runtime failed."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(call, code, message)
        self.call = call
        self.code = code
        self.message = message

    @property
    def rpc_text(self) -> str:
        """The failure without the call's name, in the words that pod events carry."""
        return f"rpc error: code = {self.code} desc = {self.message}"

    def __str__(self) -> str:
        return f"{self.call}: {self.rpc_text}"


class Unavailable(CriError):
    """The runtime cannot be reached now."""


class NotFound(CriError):
    """The object of the call does not exist."""


class AlreadyExists(CriError):
    """An object of that name exists."""


class ResourceExhausted(CriError):
    """A limit was reached, of the runtime or of a message's size."""


class DeadlineExceeded(CriError):
    """The runtime did not answer in time."""


class CommandTimedOut(DeadlineExceeded):
    """A command in a container ran longer than it may."""

    def __init__(self, command: Sequence[str], timeout_seconds: int, message: str) -> None:
        super().__init__("ExecSync", "DeadlineExceeded", message)
        self.command = list(command)
        self.timeout_seconds = timeout_seconds

    def __str__(self) -> str:
        return f'command timed out: "{" ".join(self.command)}" timed out after {self.timeout_seconds}s'


class Unimplemented(CriError):
    """This runtime does not offer the call."""


class BadResponse(CriError):
    """The runtime's answer lacks what every answer must have."""

    def __init__(self, call: str, message: str) -> None:
        super().__init__(call, "Internal", message)

    def __str__(self) -> str:
        return f"{self.call}: the runtime's answer is not valid: {self.message}"


class ConnectError(CriError):
    """There is no usable runtime at an endpoint."""

    def __init__(self, message: str, code: str = "Unavailable") -> None:
        super().__init__("Connect", code, message)

    def __str__(self) -> str:
        return self.message


class EndpointError(ConnectError, ValueError):
    """An endpoint that cannot be one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "InvalidArgument")


_CLASSES: dict[str, type[CriError]] = {
    cls.__name__: cls
    for cls in (Unavailable, NotFound, AlreadyExists, ResourceExhausted, DeadlineExceeded, Unimplemented)
}


def from_status(call: str, status: str, details: str | None) -> CriError:
    """Make the error for a gRPC status, given by its upper-case name."""
    code = "Canceled" if status == "CANCELLED" else status.title().replace("_", "")
    message = details or "no details were given"
    if code == "DeadlineExceeded" and message == "Deadline Exceeded":
        # What every other client of the runtime calls its own deadline.
        message = "context deadline exceeded"
    return _CLASSES.get(code, CriError)(call, code, message)
