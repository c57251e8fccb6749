"""One connection to a runtime: calls go out, named errors come back, everything is measured.

gRPC is untyped, so it ends here: the rest of the room sees protobuf messages and CriError only.

Guarantees:

- A call never waits for a dead runtime: it fails at once with Unavailable (after five seconds if
  something accepts the connection and stays silent). The channel reconnects by itself, about a
  second at the latest after the runtime listens again.
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
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pykubelet.cri.endpoint import Endpoint
from pykubelet.cri.errors import BadResponse, CriError, Unavailable, from_status
from pykubelet.cri.metrics import CriMetrics
from pykubelet.logs import get_logger

log = get_logger(__name__)
_trace = log.v(5)

Answer = TypeVar("Answer", bound=Message)
Check = Callable[[Answer], str]
"""Looks at an answer and returns what is wrong with it, or nothing."""

FOREVER = math.inf
"""The timeout of a call that may take as long as it takes."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Go's servers refuse a socket's path as the name of a host.
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    # A failed connect to a unix socket is nearly free, so a runtime that restarts is found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name this bounds one attempt: a socket that accepts and stays silent.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Two agents in one process must not share a connection's state.
    ("grpc.use_local_subchannel_pool", 1),
]


class Channel:
    """A connection that is made on the first call and remade when it breaks."""

    def __init__(self, endpoint: Endpoint, metrics: CriMetrics) -> None:
        self.endpoint = endpoint
        self.metrics = metrics
        self._grpc = grpc.aio.insecure_channel(endpoint.target, options=_OPTIONS)
        self._stubs: dict[str, Any] = {}
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
            stub = self._stub(self._grpc.unary_unary, method, request, answer)
            response: Answer = await stub(request, timeout=_deadline(timeout), metadata=tuple(headers))
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
            call = self._stub(self._grpc.unary_stream, method, request, answer)(
                request, timeout=_deadline(timeout)
            )
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    async def close(self) -> None:
        """End the connection; calls under way fail with Unavailable."""
        self._closed = True
        await self._grpc.close()

    def _stub(self, kind: Any, method: str, request: Message, answer: type[Answer]) -> Any:
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = kind(
                method,
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
        return stub

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
        except grpc.aio.AioRpcError as err:
            failure = from_status(name, err.code().name, err.details())
            code = failure.code
            raise failure from None
        except CriError as err:
            code = err.code
            raise
        except asyncio.CancelledError:
            code = "Canceled"
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._closed:
                raise
            # gRPC cancels what is under way when the channel closes; nobody cancelled this task.
            message = f"the connection to {self.endpoint} was closed"
            raise Unavailable(name, "Unavailable", message) from None
        finally:
            seconds = perf_counter() - started
            if operation:
                self.metrics.observe(operation, seconds, failed=code != "OK")
            if _trace:
                _trace.info(
                    "Called the runtime", call=name, code=code, seconds=round(seconds, 6), **_subject(request)
                )


def _deadline(timeout: float) -> float | None:
    return None if timeout == FOREVER else timeout


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
