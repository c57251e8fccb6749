"""gRPC calls to node plugins, which listen on their own unix sockets.

Plugins restart, hang and crash, so each call uses a new connection: it reaches the process that listens at
that time, and a dead plugin costs nothing between calls. Calls are too rare for the connection setup to
matter.

- A call to a dead plugin fails immediately with code Unavailable, one to a hung plugin with
  DeadlineExceeded after its timeout.
- CancelledError only means that the calling task was cancelled.
- Requests and responses are never logged: they may contain credentials.
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
Response = TypeVar("Response", bound=Message)
_RETRY_SECONDS = 0.1
"""Seconds between attempts to connect to a plugin that is not listening yet."""

# After these codes it is unknown whether the plugin performed, or still performs, the call.
_UNCERTAIN = frozenset(("Canceled", "DeadlineExceeded", "Unavailable", "ResourceExhausted", "Aborted"))


class PluginError(Exception):
    """A call to a plugin failed; the text equals upstream's, which appears in events."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        """Status code, spelled as `NotFound`."""
        self.message = message

    @property
    def is_final(self) -> bool:
        """Whether the plugin has certainly finished the call, without success."""
        return self.code not in _UNCERTAIN

    def __str__(self) -> str:
        return f"rpc error: code = {self.code} desc = {self.message}"


class PluginUnreachable(PluginError):
    """No process listens at the plugin's socket, or it does not implement gRPC."""


async def call_plugin(
    socket: str,
    method: str,
    request: Message,
    response_type: type[Response],
    *,
    timeout: float,
    connect_timeout: float = 0.0,
) -> Response:
    """Call a plugin: `socket` is a path, `method` the full gRPC method; times are in seconds.

    With a `connect_timeout`, waits for a plugin that is not listening yet. Raises PluginError.
    """
    started, code = perf_counter(), "Unknown"
    try:
        connection = await _connect(socket, connect_timeout, timeout)
        try:
            call = connection.call(method, request.SerializeToString(), timeout=timeout)
            message = await call.wait_response()
        finally:
            connection.close(Status("CANCELLED"))
        if call.status is None or call.status.code != "OK" or message is None:
            status = call.status or Status("UNKNOWN")
            failure = from_status(method, "INTERNAL" if status.code == "OK" else status.code, status.message)
            raise PluginError(failure.code, failure.message)
        code = "OK"
        return response_type.FromString(message)
    except PluginError as err:
        code = err.code
        raise
    except DecodeError:
        code = "Internal"
        raise PluginError(code, "the answer cannot be decoded") from None
    finally:
        log.v(5).info(
            "Called plugin",
            socket=socket,
            call=method.rpartition("/")[2],
            code=code,
            seconds=round(perf_counter() - started, 6),
        )


async def _connect(socket: str, connect_timeout: float, timeout: float) -> Connection:
    """Connect, retrying for `connect_timeout` seconds while the plugin is not listening yet."""
    loop = asyncio.get_running_loop()
    end = loop.time() + connect_timeout
    while True:
        try:
            endpoint = Endpoint.parse(socket)
            return await connect_unix(endpoint.path, min(timeout, HANDSHAKE_SECONDS))
        except EndpointError as err:
            raise PluginUnreachable("Unavailable", str(err)) from None
        except OSError as err:
            if loop.time() >= end:
                reason = err.strerror or str(err)
                if connect_timeout:
                    reason = f"nobody has answered at {socket} for {connect_timeout:g} seconds: {reason}"
                raise PluginUnreachable("Unavailable", reason) from None
        await asyncio.sleep(_RETRY_SECONDS)
