"""Calls to plugins: programs beside the agent that listen on sockets of their own.

Plugins come and go, hang and die, so a connection lives for one call only: a call reaches whoever
listens at that moment, and a dead plugin costs nothing until it is called again. Calls are rare enough
that this costs nothing that matters.

- A call to a dead plugin fails at once with the code Unavailable, one to a silent plugin when its time is
  up with DeadlineExceeded.
- CancelledError means that the calling task was cancelled, and nothing else.
- Requests and answers are never logged: they may hold credentials.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pykubelet.logs import get_logger
from pykubelet.transport.endpoint import Endpoint
from pykubelet.transport.errors import EndpointError, from_status
from pykubelet.transport.grpc_connection import HANDSHAKE_SECONDS, Connection, Status, connect_unix

log = get_logger(__name__)
Answer = TypeVar("Answer", bound=Message)
_AGAIN_SECONDS = 0.1
"""How soon to try again to reach a plugin that is not listening yet."""

# After these it is not known whether the plugin did, or still does, what it was asked for.
_UNCERTAIN = frozenset(("Canceled", "DeadlineExceeded", "Unavailable", "ResourceExhausted", "Aborted"))


class PluginError(Exception):
    """A call to a plugin failed; the text is what events of other kubelets say, too."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        """Spelled as `NotFound`."""
        self.message = message

    @property
    def is_final(self) -> bool:
        """Whether the plugin has certainly ended what it was asked for, without success."""
        return self.code not in _UNCERTAIN

    def __str__(self) -> str:
        return f"rpc error: code = {self.code} desc = {self.message}"


class PluginUnreachable(PluginError):
    """Nobody listens at a plugin's socket, or nobody that speaks gRPC: the plugin is not there."""


async def call_plugin(
    socket: str,
    method: str,
    request: Message,
    answer: type[Answer],
    *,
    timeout: float,
    connect_timeout: float = 0.0,
) -> Answer:
    """Make one call: `socket` is a path, `method` the full path of the method; times in seconds.

    With a `connect_timeout` a plugin that is not listening yet is waited for. Raises PluginError.
    """
    started, code = perf_counter(), "Unknown"
    try:
        connection = await _connected(socket, connect_timeout, timeout)
        try:
            call = connection.call(method, request.SerializeToString(), timeout=timeout)
            message = await call.answer()
        finally:
            connection.close(Status("CANCELLED"))
        if call.status is None or call.status.code != "OK" or message is None:
            status = call.status or Status("UNKNOWN")
            failure = from_status(method, "INTERNAL" if status.code == "OK" else status.code, status.message)
            raise PluginError(failure.code, failure.message)
        code = "OK"
        return answer.FromString(message)
    except PluginError as err:
        code = err.code
        raise
    except DecodeError:
        code = "Internal"
        raise PluginError(code, "the answer cannot be decoded") from None
    finally:
        log.v(5).info(
            "Called a plugin",
            socket=socket,
            call=method.rpartition("/")[2],
            code=code,
            seconds=round(perf_counter() - started, 6),
        )


async def _connected(socket: str, patience: float, timeout: float) -> Connection:
    """Connect; with patience, to a plugin that is not listening yet."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while True:
        try:
            endpoint = Endpoint.parse(socket)
            return await connect_unix(endpoint.path, min(timeout, HANDSHAKE_SECONDS))
        except EndpointError as err:
            raise PluginUnreachable("Unavailable", str(err)) from None
        except OSError as err:
            if loop.time() >= end:
                reason = err.strerror or str(err)
                if patience:
                    reason = f"nobody has answered at {socket} for {patience:g} seconds: {reason}"
                raise PluginUnreachable("Unavailable", reason) from None
        await asyncio.sleep(_AGAIN_SECONDS)
