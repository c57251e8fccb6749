"""A gRPC server on a Unix socket: the services that the agent offers to programs on its machine.

Device plugins register with the agent and monitors ask it who has which device, a few small calls per
minute. grpcio's server would cost a thread, a C core and several megabytes for that; the frames are there
already (`http2.py`), so this is what a server needs besides: methods by name, statuses, deadlines.

    methods = {"/v1beta1.Registration/Register": Unary(pb.RegisterRequest, register)}
    async with serving(path, methods):
        ...

Guarantees:

- A handler runs in a task of its own, which is cancelled when the client leaves, its deadline passes or
  the server ends. A handler's fault is an answer with a status, and never the end of the agent.
- What clients can make grow is bounded (`Limits`): the size of a request, the requests in memory, the
  calls of a connection, the connections. Nobody is read from who does not read.
- What is not HTTP/2 ends its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from pykubelet.cri.endpoint import MAX_PATH_BYTES
from pykubelet.cri.grpc_status import CODES, Status
from pykubelet.cri.server_connection import ServerConnection
from pykubelet.cri.server_rules import Limits
from pykubelet.cri.server_stream import ServerStream
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

__all__ = ["GrpcError", "Limits", "Server", "Streaming", "Unary", "serving"]

log = get_logger(__name__)

_BACKLOG = 32
_DEFAULTS = Limits()
_OK = Status("OK")


class GrpcError(Exception):
    """What a handler raises to refuse: one of gRPC's codes in upper case, and words for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        assert code in CODES
        self.status = Status(code, message)


@dataclass(frozen=True, slots=True)
class Unary:
    """A method that is answered once; `handler` takes a message of the type `request`."""

    request: type[Message]
    handler: Callable[[Any], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method that is answered as often as its handler yields; it is closed when the client leaves."""

    request: type[Message]
    handler: Callable[[Any], AsyncGenerator[Message, None]]


Methods = Mapping[str, Unary | Streaming]
"""Methods by their full path: `/package.Service/Method`."""


@asynccontextmanager
async def serving(path: Path, methods: Methods, limits: Limits = _DEFAULTS) -> AsyncIterator[Server]:
    """Serve on a socket at this path until the block is left; what lies there before is replaced.

    The folder must exist. Raises OSError when there can be no socket.
    """
    listener = _listen(path)
    made = path.stat().st_ino
    async with TaskScope() as scope:
        server = Server(methods, limits, scope)
        accepting: asyncio.Server | None = None
        try:
            loop = asyncio.get_running_loop()
            accepting = await loop.create_unix_server(server.connection, sock=listener, backlog=_BACKLOG)
            yield server
        finally:
            # While ours is open, no other file can have the same number.
            _remove(path, made)
            (accepting or listener).close()
            server.close()


class Server:
    """The calls and connections of one socket."""

    def __init__(self, methods: Methods, limits: Limits, scope: TaskScope) -> None:
        self.limits = limits
        self.held = 0
        """Bytes of requests that are not complete yet, of all connections."""
        self._methods = methods
        self._services = {path.rpartition("/")[0] for path in methods}
        self._scope = scope
        self._connections: set[ServerConnection] = set()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    def connection(self) -> ServerConnection:
        """Give the protocol of a new connection."""
        return ServerConnection(self)

    def close(self) -> None:
        """End all connections."""
        for connection in tuple(self._connections):
            connection.close()

    # What connections ask

    def enter(self, connection: ServerConnection) -> bool:
        """Take a connection in; False when there are too many."""
        if len(self._connections) >= self.limits.connections:
            log.v(2).info("Turned away a gRPC client, too many are connected", limit=self.limits.connections)
            return False
        self._connections.add(connection)
        return True

    def leave(self, connection: ServerConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    def refusal(self, path: str) -> Status | None:
        """Say why a method cannot be called; None when it can."""
        if path in self._methods:
            return None
        service, _, method = path.rpartition("/")
        if service in self._services:
            text = f"unknown method {method} for service {service.removeprefix('/')}"
        else:
            text = f"unknown service {service.removeprefix('/')}"
        return Status("UNIMPLEMENTED", text)

    def start(self, stream: ServerStream, path: str, message: bytes) -> asyncio.Task[None]:
        """Answer a call whose request is complete."""
        return self._scope.start(self._answer(stream, path, message), name=f"gRPC {path}")

    async def _answer(self, stream: ServerStream, path: str, message: bytes) -> None:
        method = self._methods[path]
        try:
            request = method.request.FromString(message)
            if isinstance(method, Unary):
                await stream.send((await method.handler(request)).SerializeToString())
            else:
                async with aclosing(method.handler(request)) as answers:
                    async for answer in answers:
                        await stream.send(answer.SerializeToString())
            status = _OK
        except DecodeError:
            status = Status("INTERNAL", "the request cannot be decoded")
        except GrpcError as err:
            status = err.status
        except Exception as err:  # the boundary of a call: its caller is told, the agent goes on
            log.error(err, "A gRPC call failed", method=path)
            status = Status("UNKNOWN", f"{type(err).__name__}: {err}")
        stream.finish(status)


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"cannot listen at {path}: it is too long for a socket (at most {MAX_PATH_BYTES} bytes): "
            "choose a shorter directory",
        )
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
    except OSError as err:
        listener.close()
        raise OSError(err.errno, f"cannot listen at {path}: {err.strerror or err}") from None
    return listener


def _remove(path: Path, made: int) -> None:
    """Remove our socket; the next agent may be listening there already."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == made:
            path.unlink()
