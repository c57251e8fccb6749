"""Export to a real collector (grpcio): batches, failures of all kinds, bounds, and the stop."""

import asyncio
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from pykubelet.tracing import exporter as exporting
from pykubelet.tracing.exporter import MAX_BATCH_SPANS, MAX_QUEUED_BYTES, MAX_QUEUED_SPANS, SpanExporter
from pykubelet.tracing.otlp import CollectorAddress
from pykubelet.tracing.span import Tracer
from pykubelet.util.backoff import Backoff
from tests.support.ports import free_port
from tests.support.trace_collector import Collector, attributes, collecting
from tests.support.waiting import until


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


def new_exporter(address: str, pause: float = 0.01) -> SpanExporter:
    backoff = Backoff(first=pause, limit=pause, rng=lambda: 0.0)
    return SpanExporter(CollectorAddress.parse(address), {"service.name": "kubelet"}, "1", backoff=backoff)


class CountingBackoff(Backoff):
    """Back-off without a delay worth mentioning; counts the failed attempts."""

    def __init__(self) -> None:
        super().__init__(first=0.01, limit=0.01, rng=lambda: 0.0)
        self.count = 0

    def next(self, now: float, cause: object = None) -> float:
        self.count += 1
        return super().next(now, cause)


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [found for found in caplog.records if found.levelno >= logging.ERROR]


def record(exporter: SpanExporter, count: int, value: str = "v") -> None:
    tracer = Tracer(exporter, 1.0)
    for number in range(count):
        with tracer.start(f"span-{number}", {"k": value}):
            pass


@asynccontextmanager
async def running(exporter: SpanExporter) -> AsyncIterator[None]:
    task = asyncio.ensure_future(exporter.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
        await exporter.flush(1)


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "BATCH_SECONDS", 0.05)


async def test_exporter_spans_arrive_in_batches_with_resource(collector: Collector) -> None:
    exporter = new_exporter(collector.address)
    async with running(exporter):
        record(exporter, MAX_BATCH_SPANS + 10)
        await until(lambda: len(collector.spans) == MAX_BATCH_SPANS + 10)
    assert [len(request.resource_spans[0].scope_spans[0].spans) for request in collector.requests] == [
        512,
        10,
    ]
    resource = collector.requests[0].resource_spans[0]
    assert resource.resource.attributes[0].value.string_value == "kubelet"
    assert resource.scope_spans[0].scope.name == "pykubelet"
    assert attributes(collector.spans[0]) == {"k": "v"}
    assert exporter.dropped == 0


async def test_exporter_unix_socket_is_reached() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="otel-") as folder,
        collecting(f"unix:{folder}/otel.sock") as collector,
    ):
        exporter = new_exporter(f"unix://{folder}/otel.sock")
        record(exporter, 1)
        await exporter.flush(5)
        assert len(collector.spans) == 1


async def test_exporter_collector_comes_late_gets_the_spans(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    exporter = new_exporter(f"127.0.0.1:{port}")
    async with running(exporter):
        record(exporter, 3)
        await until(lambda: failures(caplog))
        with collecting(f"127.0.0.1:{port}") as collector:
            await until(lambda: len(collector.spans) == 3)


async def test_exporter_unreachable_collector_bounded_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connects = CountingBackoff()
    address = CollectorAddress.parse(f"127.0.0.1:{free_port()}")
    exporter = SpanExporter(address, {"service.name": "kubelet"}, "1", backoff=connects)
    with caplog.at_level(logging.INFO, logger="pykubelet.tracing"):
        async with running(exporter):
            record(exporter, 10)
            await until(lambda: failures(caplog))
            began = time.process_time()
            record(exporter, 3 * MAX_QUEUED_SPANS)
            assert time.process_time() - began < 5
            assert exporter.queued == MAX_QUEUED_SPANS
            assert exporter.dropped == 2 * MAX_QUEUED_SPANS + 10
            sent = connects.count
            await until(lambda: connects.count > sent + 2)
    assert len(failures(caplog)) == 1


async def test_exporter_queue_full_drops_without_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = new_exporter("127.0.0.1:1")
    record(exporter, MAX_QUEUED_SPANS)
    monkeypatch.delattr(exporting, "encode_span")
    record(exporter, 5)
    assert (exporter.queued, exporter.dropped) == (MAX_QUEUED_SPANS, 5)


async def test_exporter_host_name_not_valid_drops_and_continues() -> None:
    exporter = new_exporter(f"{'a' * 64}.example:4317")
    async with running(exporter):
        record(exporter, 5)
        await until(lambda: exporter.dropped == 5)


async def test_exporter_large_spans_bounded_by_bytes() -> None:
    exporter = new_exporter("127.0.0.1:1")
    record(exporter, 100, "€" * 100_000)
    kept = exporter.queued
    record(exporter, MAX_QUEUED_SPANS, "€" * 100_000)
    assert kept == 100
    assert exporter.queued * 1536 <= MAX_QUEUED_BYTES
    assert exporter.dropped


async def test_exporter_batch_too_old_is_dropped(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "RETRY_SECONDS", 0.2)
    collector.failure = grpc.StatusCode.UNAVAILABLE
    exporter = new_exporter(collector.address)
    async with running(exporter):
        record(exporter, 5)
        await until(lambda: exporter.dropped == 5)
        assert collector.attempts > 1
        collector.failure = None
        record(exporter, 2)
        await until(lambda: len(collector.spans) == 2)


async def test_exporter_rejected_batch_is_dropped_without_retry(collector: Collector) -> None:
    collector.failure = grpc.StatusCode.INVALID_ARGUMENT
    exporter = new_exporter(collector.address)
    async with running(exporter):
        record(exporter, 5)
        await until(lambda: exporter.dropped == 5)
    assert collector.attempts == 1


async def test_exporter_partial_success_counts_rejected(collector: Collector) -> None:
    collector.response.partial_success.rejected_spans = 2
    exporter = new_exporter(collector.address)
    record(exporter, 5)
    await exporter.flush(5)
    assert exporter.dropped == 2
    assert exporter.queued == 0


async def test_exporter_flush_hanging_collector_is_bounded(collector: Collector) -> None:
    collector.hang.clear()
    exporter = new_exporter(collector.address)
    record(exporter, 5)
    began = time.monotonic()
    await exporter.flush(0.3)
    assert time.monotonic() - began < 3


async def test_exporter_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(exporting, "RETRY_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = new_exporter(f"127.0.0.1:{silent.getsockname()[1]}")
        async with running(exporter):
            record(exporter, 5)
            await until(lambda: exporter.dropped == 5)


async def test_exporter_cancelled_while_connecting_leaves_no_connection() -> None:
    accepted: list[asyncio.StreamReader] = []
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(reader)
        with suppress(ConnectionError):
            while await reader.read(1000):
                pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        exporter = new_exporter(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with running(exporter):
            record(exporter, 1)
            await until(lambda: accepted)
        async with asyncio.timeout(5):
            await closed.wait()
    finally:
        server.close()


def test_tracing_off_imports_neither_exporter_nor_messages() -> None:
    code = "import sys, pykubelet.agent.kubelet; print([m for m in sys.modules if 'pykubelet.tracing' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pykubelet.tracing', 'pykubelet.tracing.span']"
