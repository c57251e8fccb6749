"""Export of spans to an OpenTelemetry collector by OTLP over gRPC, without TLS, as upstream.

Ended spans are encoded and queued. `run` sends them in batches: when one is full, or some seconds after its
first span. The queue is bounded in spans and bytes; spans above that are dropped and counted. A collector
that is unreachable, slow or out of memory is retried with back-off for a minute per batch, after which the
batch is dropped. It never delays what is traced, and its failures are logged once per type and ten minutes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from pykubelet.logs import get_logger
from pykubelet.tracing.otlp import (
    EXPORT_METHOD,
    CollectorAddress,
    RequestEncoder,
    encode_span,
    rejected_spans,
)
from pykubelet.tracing.span import Span
from pykubelet.transport.grpc_connection import Connection, Status
from pykubelet.util.backoff import Backoff, ErrorLogLimiter

log = get_logger(__name__)
MAX_QUEUED_SPANS = 2048
MAX_QUEUED_BYTES = 2 * 1024 * 1024
MAX_BATCH_SPANS = 512
MAX_BATCH_BYTES = 1024 * 1024
"""Below the 4 MiB that collectors accept."""
BATCH_SECONDS = 5.0
"""Seconds after the first span until a batch that is not full is sent."""
EXPORT_SECONDS = 10.0
"""Seconds until the collector must have accepted a batch."""
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""Seconds for which a batch is retried."""
_RESPONSE_LIMIT = 64 * 1024
_HEADER_LIMIT = 16 * 1024
_RETRIED_CODES = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
)
"""gRPC codes after which OTLP clients retry."""


class ExportError(Exception):
    """Raised when a batch was not accepted; `retry` is whether a later attempt may succeed."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class SpanExporter:
    """Exporter of one kubelet's spans; `resource` are the attributes of the kubelet itself."""

    def __init__(
        self,
        address: CollectorAddress,
        resource: Mapping[str, str],
        version: str,
        *,
        backoff: Backoff | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.dropped = 0
        """Spans that were dropped, because the queue was full or the collector did not accept them."""
        self._address = address
        self._encoder = RequestEncoder(resource, "pykubelet", version)
        self._backoff = backoff or Backoff(first=1.0, limit=15.0)
        self._clock = clock or asyncio.get_running_loop().time
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._first = asyncio.Event()
        self._full = asyncio.Event()
        self._connection: Connection | None = None
        self._error_log = ErrorLogLimiter(log, "Failed to export spans", endpoint=str(address))
        self._logged_drops = 0

    @property
    def queued(self) -> int:
        """Number of spans that wait."""
        return len(self._queue)

    def record(self, span: Span) -> None:
        """Queue a span that has ended, or drop it if the queue is full."""
        if len(self._queue) >= MAX_QUEUED_SPANS:
            self.dropped += 1
            return
        encoded = encode_span(span)
        if self._queued_bytes + len(encoded) > MAX_QUEUED_BYTES:
            self.dropped += 1
            return
        self._queue.append(encoded)
        self._queued_bytes += len(encoded)
        self._first.set()
        if len(self._queue) >= MAX_BATCH_SPANS:
            self._full.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            await self._first.wait()
            try:
                async with asyncio.timeout(BATCH_SECONDS):
                    await self._full.wait()
            except TimeoutError:
                pass
            await self._send_or_drop()

    async def flush(self, seconds: float) -> None:
        """Send what is queued, once and within so many seconds, and close the connection."""
        try:
            async with asyncio.timeout(seconds):
                while self._queue:
                    batch = self._batch()
                    await self._send(batch)
                    self._remove(len(batch))
        except (ExportError, TimeoutError) as err:
            lost = len(self._queue)
            log.info("Dropped spans at the stop", spans=lost, endpoint=str(self._address), err=err)
        finally:
            self._close()

    async def _send_or_drop(self) -> None:
        """Send one batch, retried with back-off; drop it when it is too old or rejected."""
        batch, began = self._batch(), self._clock()
        while True:
            try:
                await self._send(batch)
            except ExportError as err:
                now = self._clock()
                self._error_log.failed(err, now)
                delay = self._backoff.next(now)
                if err.retry and now + delay - began < RETRY_SECONDS:
                    await asyncio.sleep(delay)
                    continue
                self.dropped += len(batch)
            else:
                self._error_log.succeeded(self._clock())
            break
        self._remove(len(batch))
        if self.dropped > self._logged_drops and not self._queue:
            log.v(2).info("Dropped spans", total=self.dropped, endpoint=str(self._address))
            self._logged_drops = self.dropped

    def _batch(self) -> list[bytes]:
        """Return the oldest spans, as many as fit into one request."""
        batch: list[bytes] = []
        size = 0
        for span in islice(self._queue, MAX_BATCH_SPANS):
            size += len(span)
            if batch and size > MAX_BATCH_BYTES:
                break
            batch.append(span)
        return batch

    def _remove(self, count: int) -> None:
        for _ in range(count):
            self._queued_bytes -= len(self._queue.popleft())
        if not self._queue:
            self._first.clear()
        if len(self._queue) < MAX_BATCH_SPANS:
            self._full.clear()

    async def _send(self, batch: list[bytes]) -> None:
        """Send one batch. Raises ExportError."""
        connection = await self._connected()
        call = connection.call(EXPORT_METHOD, self._encoder.encode(batch), (), EXPORT_SECONDS)
        response = await call.wait_response()
        status = call.status or Status("UNKNOWN")
        if status.code != "OK":
            self._close()
            message = f"{status.code}: {status.message[:200]}"
            raise ExportError(message, retry=status.code in _RETRIED_CODES)
        try:
            rejected, reason = rejected_spans(response or b"")
        except ValueError as err:
            raise ExportError(str(err), retry=False) from None
        if rejected > 0:
            self.dropped += min(rejected, len(batch))
            problem = ExportError(f"the collector rejected {rejected} spans: {reason[:200]}", retry=False)
            self._error_log.failed(problem, self._clock())

    async def _connected(self) -> Connection:
        if self._connection is not None and self._connection.usable:
            return self._connection
        self._close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await self._connect()
        except TimeoutError:
            raise ExportError(f"no connection within {CONNECT_SECONDS:g} s", retry=True) from None
        except OSError as err:
            raise ExportError(f"cannot connect: {err.strerror or err}", retry=True) from None
        except UnicodeError as err:
            # Python encodes names by IDNA, which has rules that the configuration does not validate.
            raise ExportError(f"the host's name is not valid: {err}", retry=False) from None
        # Nothing is awaited in between: a cancellation closes the connection in `wait_settings`.
        if not await connection.wait_settings(CONNECT_SECONDS) or not connection.usable:
            connection.close(Status("UNAVAILABLE"))
            raise ExportError("the server does not speak gRPC, or accepts no calls", retry=True)
        self._connection = connection
        return connection

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address

        def protocol() -> Connection:
            authority = "localhost" if address.socket else str(address)
            return Connection(authority, _RESPONSE_LIMIT, _HEADER_LIMIT)

        if address.socket:
            return (await loop.create_unix_connection(protocol, address.socket))[1]
        return (await loop.create_connection(protocol, address.host, address.port))[1]

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close(Status("UNAVAILABLE", "the connection was closed"))
            self._connection = None
