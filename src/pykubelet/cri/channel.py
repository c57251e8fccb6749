"""One connection to a runtime: calls go out, named errors come back, everything is measured.

The rest of the room sees protobuf messages and CriError only; the wire is in `connection.py`.

Guarantees:

- A call never waits for a dead runtime: it fails at once with Unavailable (after five seconds if
  something accepts the connection and stays silent). The next call connects again.
- A call without a timeout (a pull, an event stream) ends when its task is cancelled or the
  connection breaks.
- CancelledError means that the calling task was cancelled, and nothing else.
- Requests and answers are never logged, only the id they are about: they may hold credentials.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pykubelet.cri.connection import Connection, connect_unix
from pykubelet.cri.endpoint import Endpoint
from pykubelet.cri.errors import BadResponse, CriError, Unavailable, from_status
from pykubelet.cri.grpc_status import Status
from pykubelet.cri.metrics import CriMetrics
from pykubelet.logs import get_logger

_OK, _CLOSED = Status("OK"), Status("UNAVAILABLE")

log = get_logger(__name__)
_trace = log.v(5)

Answer = TypeVar("Answer", bound=Message)
Check = Callable[[Answer], str]
"""Looks at an answer and returns what is wrong with it, or nothing."""

FOREVER = math.inf
"""The timeout of a call that may take as long as it takes."""


class Channel:
    """A connection that is made on the first call and remade when it breaks."""

    def __init__(self, endpoint: Endpoint, metrics: CriMetrics) -> None:
        self.endpoint = endpoint
        self.metrics = metrics
        self._connections: list[Connection] = []
        """The last one takes new calls; others are there until their calls have ended."""
        self._attempt: asyncio.Future[None] | None = None
        """Done when whoever is connecting has succeeded or failed."""
        self._closed = False

    async def call(
        self,
        method: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float,
        operation: str = "",
        check: Check[Answer] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Make one call: `method` is its full path, `timeout` in seconds.

        `operation` is the name under which it is measured; without one it is not. An answer that
        `check` objects to is a failure like any other. `headers` go with the request.
        """
        with self._watch(method, request, operation):
            connection = await self._connected(_name(method))
            call = connection.call(method, request.SerializeToString(), headers, timeout)
            message = await call.answer()
            if call.status != _OK or message is None:
                raise self._failure(_name(method), call.status, message)
            response = _parse(_name(method), answer, message)
            if check is not None and (wrong := check(response)):
                raise BadResponse(_name(method), wrong)
            return response

    async def stream(
        self,
        method: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float,
        operation: str = "",
    ) -> AsyncGenerator[Answer, None]:
        """Make one call that is answered many times.

        Close the iterator (`contextlib.aclosing`) when leaving it early, so that the runtime stops.
        """
        with self._watch(method, request, operation):
            connection = await self._connected(_name(method))
            call = connection.call(method, request.SerializeToString(), (), timeout)
            try:
                while (message := await call.read()) is not None:
                    yield _parse(_name(method), answer, message)
                if call.status != _OK:
                    raise self._failure(_name(method), call.status, None)
            finally:
                call.cancel()

    async def close(self) -> None:
        """End the connection; calls under way fail with Unavailable."""
        self._closed = True
        for connection in self._connections:
            connection.close(Status("UNAVAILABLE", f"the connection to {self.endpoint} was closed"))

    async def _connected(self, name: str) -> Connection:
        """Give the connection for a new call; one caller connects, the others wait for it."""
        while not (self._connections and self._connections[-1].usable):
            if self._attempt is not None:
                await asyncio.shield(self._attempt)
                if self._connections and self._connections[-1].usable:
                    break
                raise Unavailable(name, "Unavailable", f"no connection to {self.endpoint}")
            self._attempt = asyncio.get_running_loop().create_future()
            try:
                await self._connect(name)
            finally:
                self._attempt.set_result(None)
                self._attempt = None
        return self._connections[-1]

    async def _connect(self, name: str) -> None:
        try:
            connection = await connect_unix(self.endpoint.path)
        except OSError as err:
            reason = err.strerror or str(err)
            raise Unavailable(
                name, "Unavailable", f"failed to connect to {self.endpoint}: {reason}"
            ) from None
        if self._closed:
            connection.close(_CLOSED)
            raise Unavailable(name, "Unavailable", f"the connection to {self.endpoint} is closed")
        if not connection.usable:
            # Connecting again would not help, and would not end.
            connection.close(_CLOSED)
            raise Unavailable(name, "Unavailable", f"the runtime at {self.endpoint} accepts no calls")
        self._connections = [*(one for one in self._connections if one.open), connection]

    def _failure(self, name: str, status: Status | None, message: bytes | None) -> CriError:
        assert status is not None
        if status == _OK and message is None:
            return BadResponse(name, "the answer is empty")
        return from_status(name, status.code, status.message)

    @contextmanager
    def _watch(self, method: str, request: Message, operation: str) -> Iterator[None]:
        """Turn gRPC's errors into ours, and count and log how the call ended."""
        name = _name(method)
        if self._closed:
            raise Unavailable(name, "Unavailable", f"the connection to {self.endpoint} is closed")
        started = perf_counter()
        code = "Unknown"
        try:
            yield
            code = "OK"
        except GeneratorExit:
            # The reader of a stream has heard enough.
            code = "OK"
            raise
        except CriError as err:
            code = err.code
            raise
        except asyncio.CancelledError:
            code = "Canceled"
            raise
        finally:
            seconds = perf_counter() - started
            if operation:
                self.metrics.observe(operation, seconds, failed=code != "OK")
            if _trace:
                _trace.info(
                    "Called the runtime", call=name, code=code, seconds=round(seconds, 6), **_subject(request)
                )


def _parse(name: str, kind: type[Answer], message: bytes) -> Answer:
    try:
        return kind.FromString(message)
    except DecodeError:
        raise BadResponse(name, "it cannot be decoded") from None


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def _subject(request: Message) -> dict[str, str]:
    """Give the ids that a request is about: all of it that may be logged."""
    ids = {
        "containerID": getattr(request, "container_id", ""),
        "podSandboxID": getattr(request, "pod_sandbox_id", ""),
        "image": getattr(getattr(request, "image", None), "image", ""),
    }
    return {key: value for key, value in ids.items() if value}
