"""Connection to a container runtime: protobuf calls with metrics, logging and CriError failures.

`transport/grpc_connection.py` implements the protocol; the clients in `client.py` and `containerd.py` make
the calls.

Guarantees:

- A call never waits for a dead runtime: it fails immediately with Unavailable (after five seconds if the
  connection is accepted and no HTTP/2 settings follow). The next call connects again.
- A call without a timeout (a pull, an event stream) ends when its task is cancelled or the connection
  breaks.
- CancelledError means that the calling task was cancelled, and nothing else.
- Requests and responses are never logged, only the ids in them: they may contain credentials.

The metrics are upstream's. They are registered in the caller's registry, because two kubelets can run in one
process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.logs import get_logger
from pykubelet.tracing.span import SpanKind, Tracer
from pykubelet.transport.endpoint import Endpoint
from pykubelet.transport.errors import BadResponse, CriError, Unavailable, from_status
from pykubelet.transport.grpc_connection import Connection, Status, connect_unix
from pykubelet.util.metrics import SECONDS

log = get_logger(__name__)

# 5 ms to 12 minutes: a status call takes milliseconds, the pull of a large image takes minutes.
_OPERATION_BUCKETS = [0.005 * 2.5**n for n in range(14)]


class CriMetrics:
    """Metrics of the runtime operations of one kubelet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "kubelet_runtime_operations_total",
            "Calls to the container runtime, by operation.",
            ["operation_type"],
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_runtime_operations_duration_seconds",
            "Duration of calls to the container runtime in seconds, by operation.",
            ["operation_type"],
            buckets=_OPERATION_BUCKETS,
            registry=registry,
        )
        self._errors = Counter(
            "kubelet_runtime_operations_errors_total",
            "Failed calls to the container runtime, by operation.",
            ["operation_type"],
            registry=registry,
        )
        self._sandbox_duration = Histogram(
            "kubelet_run_podsandbox_duration_seconds",
            "Duration of sandbox starts in seconds, by runtime handler.",
            ["runtime_handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self._sandbox_errors = Counter(
            "kubelet_run_podsandbox_errors_total",
            "Failed sandbox starts, by runtime handler.",
            ["runtime_handler"],
            registry=registry,
        )

        # Looking up a series by its labels takes longer than counting.
        self._series: dict[str, tuple[Counter, Histogram]] = {}

    def observe(self, operation: str, seconds: float, *, failed: bool) -> None:
        """Record one call that ended after `seconds`."""
        if (series := self._series.get(operation)) is None:
            series = self._total.labels(operation), self._duration.labels(operation)
            self._series[operation] = series
        total, duration = series
        total.inc()
        duration.observe(seconds)
        if failed:
            self._errors.labels(operation).inc()

    def observe_sandbox(self, handler: str, seconds: float, *, failed: bool) -> None:
        """Record one attempt to start a sandbox with this runtime handler."""
        self._sandbox_duration.labels(handler).observe(seconds)
        if failed:
            self._sandbox_errors.labels(handler).inc()


_OK, _CLOSED = Status("OK"), Status("UNAVAILABLE")
_trace = log.v(5)
Response = TypeVar("Response", bound=Message)
Check = Callable[[Response], str]
"""Validates a response; returns what is wrong with it, or ""."""
_Headers = Sequence[tuple[str, str]]
FOREVER = math.inf
"""Timeout of a call without a deadline."""


class Channel:
    """A connection that is established by the first call and re-established after it breaks."""

    def __init__(self, endpoint: Endpoint, metrics: CriMetrics, tracer: Tracer | None = None) -> None:
        self.endpoint = endpoint
        self._tracer = tracer
        self.metrics = metrics
        self.connects = 0
        """Number of connections so far; another value than before may mean another version of the runtime."""
        self._connections: list[Connection] = []
        """The last one takes new calls; the others stay until their calls have ended."""
        self._connecting: asyncio.Future[None] | None = None
        """Done when the connection attempt in progress has succeeded or failed."""
        self._closed = False

    async def call(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        *,
        timeout: float,
        operation: str = "",
        check: Check[Response] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Response:
        """Make a unary call; `method` is its full path, `timeout` is in seconds.

        `operation` is its name in the metrics; without one it is not measured. A response that `check`
        rejects is a failure like any other. `headers` are added to the request. Raises CriError.
        """
        with self._watch(method, request, operation) as trace:
            connection = await self._connected(_name(method))
            call = connection.call(method, request.SerializeToString(), (*trace, *headers), timeout)
            message = await call.wait_response()
            if call.status != _OK or message is None:
                raise self._failure(_name(method), call.status, message)
            response = _parse(_name(method), response_type, message)
            if check is not None and (problem := check(response)):
                raise BadResponse(_name(method), problem)
            return response

    async def stream(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        *,
        timeout: float,
        operation: str = "",
        headers: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Response, None]:
        """Make a server-streaming call and yield its responses. Raises CriError.

        Close the iterator (`contextlib.aclosing`) when leaving it early, so that the runtime stops sending.
        `headers` are added to the request.
        """
        with self._watch(method, request, operation) as trace:
            connection = await self._connected(_name(method))
            call = connection.call(method, request.SerializeToString(), (*trace, *headers), timeout)
            try:
                while (message := await call.read()) is not None:
                    yield _parse(_name(method), response_type, message)
                if call.status != _OK:
                    raise self._failure(_name(method), call.status, None)
            finally:
                call.cancel()

    async def close(self) -> None:
        """Close the connections; calls in progress fail with Unavailable."""
        self._closed = True
        for connection in self._connections:
            connection.close(Status("UNAVAILABLE", f"the connection to {self.endpoint} was closed"))

    async def _connected(self, name: str) -> Connection:
        """Return the connection for a new call; one caller connects, concurrent callers wait for it."""
        while not (self._connections and self._connections[-1].usable):
            if self._connecting is not None:
                await asyncio.shield(self._connecting)
                if self._connections and self._connections[-1].usable:
                    break
                raise Unavailable(name, "Unavailable", f"no connection to {self.endpoint}")
            self._connecting = asyncio.get_running_loop().create_future()
            try:
                await self._connect(name)
            finally:
                self._connecting.set_result(None)
                self._connecting = None
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
            # Reconnecting would not help, and would loop.
            connection.close(_CLOSED)
            raise Unavailable(name, "Unavailable", f"the runtime at {self.endpoint} accepts no calls")
        self._connections = [*(existing for existing in self._connections if existing.open), connection]
        self.connects += 1

    def _failure(self, name: str, status: Status | None, message: bytes | None) -> CriError:
        assert status is not None
        if status == _OK and message is None:
            return BadResponse(name, "the answer is empty")
        return from_status(name, status.code, status.message)

    @contextmanager
    def _watch(self, method: str, request: Message, operation: str) -> Iterator[_Headers]:
        """Measure, trace and log the outcome of a call; yield the headers that carry its trace."""
        name = _name(method)
        if self._closed:
            raise Unavailable(name, "Unavailable", f"the connection to {self.endpoint} is closed")
        started = perf_counter()
        code, failure = "Unknown", "failed in the kubelet"
        span = None
        if self._tracer is not None:
            attributes = {"rpc.method": method[1:], "rpc.system.name": "grpc", **_subject(request)}
            span = self._tracer.start(method[1:], attributes, kind=SpanKind.CLIENT)
        try:
            yield () if span is None else (("traceparent", span.context.traceparent),)
            code = "OK"
        except GeneratorExit:
            # The reader closed the stream.
            code = "OK"
            raise
        except CriError as err:
            code, failure = err.code, err.message
            raise
        except asyncio.CancelledError:
            code, failure = "Canceled", "cancelled"
            raise
        finally:
            seconds = perf_counter() - started
            if span is not None:
                if code != "OK":
                    span.fail(failure)
                span.set_attribute("rpc.response.status_code", code)
                span.end()
            if operation:
                self.metrics.observe(operation, seconds, failed=code != "OK")
            if _trace:
                _trace.info(
                    "Called the runtime", call=name, code=code, seconds=round(seconds, 6), **_subject(request)
                )


def _parse(name: str, kind: type[Response], message: bytes) -> Response:
    try:
        return kind.FromString(message)
    except DecodeError:
        raise BadResponse(name, "it cannot be decoded") from None


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def _subject(request: Message) -> dict[str, str]:
    """Return the ids in a request, the only part of it that may be logged."""
    ids = {
        "containerID": getattr(request, "container_id", ""),
        "podSandboxID": getattr(request, "pod_sandbox_id", ""),
        "image": getattr(getattr(request, "image", None), "image", ""),
    }
    return {key: value for key, value in ids.items() if value}
