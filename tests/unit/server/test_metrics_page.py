"""`/metrics` and its siblings: text, negotiation, and slices between which other tasks run."""

from __future__ import annotations

import asyncio
import gzip
import re
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pykubelet.server.metrics.registry_text import MAX_CHUNK_SAMPLES, registry_chunks, text_format
from pykubelet.server.metrics.server_metrics import HealthMetrics, ServerMetrics, metrics_routes
from pykubelet.server.metrics.stats_metrics import ScrapeLimit
from pykubelet.stats.storage.metrics import PodStorageMetrics, PodStorageRow
from pykubelet.util.metrics import CONTENT_TYPE, SECONDS, GaugeSlices, PlainCounter, SlicedCollector
from tests.support.loop_stalls import watched_loop

STALL_SECONDS = 0.1
"""Far above a slice, and far below the time of a page in one go, about a second."""


def busy_registry(pods: int) -> CollectorRegistry:
    """Return a registry with a series per pod in metrics of every type, and a large histogram."""
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    for path in ("/metrics", "/pods", "/exec/a/b/c"):
        with metrics.request("GET", path, "readwrite"):
            pass
    started = Histogram("start_seconds", "Start.", ["pod", "step"], buckets=SECONDS, registry=registry)
    restarts = Counter("restarts_total", "Restarts.", ["pod"], registry=registry)
    errors = PlainCounter("pull_errors", 'Errors "of"\npulls.', ["pod"], registry=registry)
    probes = Counter("prober_probe_total", "Probes.", ["pod"], registry=registry)
    Gauge("unused", "Without series.", ["pod"], registry=registry)
    for number in range(pods):
        pod = f'pod-{number}"\\\n'
        for step in ("sandbox", "pull", "create", "start"):
            started.labels(pod, step).observe(number / 100)
        restarts.labels(pod).inc(number)
        errors.labels(pod).inc(0.5)
        probes.labels(pod).inc()
    rows = [PodStorageRow("default", f"pod-{number}", "", number, None, 10) for number in range(pods)]
    registry.register(PodStorageMetrics(lambda: rows))
    ProcessCollector(registry=registry)
    return registry


@asynccontextmanager
async def client(
    registry: CollectorRegistry, limit: ScrapeLimit | None = None
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    app = web.Application()
    app.add_routes(metrics_routes(registry, HealthMetrics(), limit))
    async with TestClient(TestServer(app), auto_decompress=False) as found:
        yield found


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
        # Numbers of the process change; the library's header of a plain counter has another name.
        if not sample.name.startswith(("process_", "pull_errors"))
    }


def test_registry_chunks_joined_equal_library_text() -> None:
    registry = busy_registry(30)
    text = b"".join(registry_chunks(registry, lambda name: not name.startswith("process_"))).decode()
    collected = (metric for metric in registry.collect() if not metric.name.startswith("process_"))
    assert text == text_format(collected).decode()
    # The library writes the bounds 1.0 and 10.0, Go clients 1 and 10.
    library = re.sub(r'le="(\d+)\.0"', r'le="\1"', generate_latest(registry).decode())
    assert samples(text) == samples(library)
    assert "unused" not in text


def test_registry_chunks_large_histogram_split_into_bounded_chunks() -> None:
    registry = CollectorRegistry()
    large = Histogram("large_seconds", "Large.", ["pod"], buckets=SECONDS, registry=registry)
    for number in range(500):
        large.labels(f"pod-{number}").observe(1)
    chunks = list(registry_chunks(registry, lambda _: True))
    assert max(chunk.count(b"\nlarge") for chunk in chunks) <= MAX_CHUNK_SAMPLES
    assert b"".join(chunks).count(b"# TYPE") == 1
    assert len(chunks) >= 500 * 14 // MAX_CHUNK_SAMPLES


def test_registry_chunks_series_changed_between_chunks_page_valid() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("pods", "Pods.", ["pod"], registry=registry)
    for number in range(3 * MAX_CHUNK_SAMPLES):
        gauge.labels(f"pod-{number}").set(1)
    page = registry_chunks(registry, lambda _: True)
    first = next(page)
    gauge.clear()
    gauge.labels("new").set(1)
    assert len(samples((first + b"".join(page)).decode())) == 3 * MAX_CHUNK_SAMPLES


def test_registry_chunks_memory_does_not_grow_with_series() -> None:
    def peak(pods: int) -> int:
        registry = busy_registry(pods)
        for _ in registry_chunks(registry, lambda _: True):
            pass
        tracemalloc.start()
        try:
            size = sum(len(chunk) for chunk in registry_chunks(registry, lambda _: True))
            assert size > pods * 3500
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # What remains are a copy of the children's references and the rows of pods.
    assert peak(1000) - peak(100) < 500_000


class Slow(SlicedCollector):
    """A collector whose preparation has many steps."""

    steps = 0

    def slices(self) -> Iterator[GaugeSlices | None]:
        for _ in range(10):
            self.steps += 1
            yield None
        yield GaugeSlices("slow", "Slow.", ["a"], lambda: [(("x",), self.steps)])


def test_registry_chunks_sliced_collector_yields_between_steps() -> None:
    registry, slow = CollectorRegistry(), Slow()
    registry.register(slow)
    page = registry_chunks(registry, lambda _: True)
    assert (next(page), slow.steps) == (b"", 1)
    assert b"".join(page) == b'# HELP slow Slow.\n# TYPE slow gauge\nslow{a="x"} 10\n'
    assert text_format(registry.collect()) == b'# HELP slow Slow.\n# TYPE slow gauge\nslow{a="x"} 20\n'


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
    ],
)
async def test_metrics_any_accept_header_returns_text_format(accept: str) -> None:
    registry = busy_registry(1)
    async with (
        client(registry) as http,
        http.get("/metrics", headers={"Accept": accept, "Accept-Encoding": "identity"}) as response,
    ):
        assert (response.status, response.headers["Content-Type"]) == (200, CONTENT_TYPE)
        assert samples((await response.read()).decode())


@pytest.mark.parametrize("path", ["/metrics", "/metrics/probes", "/metrics/slis"])
async def test_metrics_gzip_accepted_page_compressed(path: str) -> None:
    async with client(busy_registry(20)) as http:
        async with http.get(path, headers={"Accept-Encoding": "identity"}) as response:
            plain = await response.read()
            assert "Content-Encoding" not in response.headers
        async with http.get(path, headers={"Accept-Encoding": "gzip"}) as response:
            packed = await response.read()
            assert response.headers["Content-Encoding"] == "gzip"
    assert samples(gzip.decompress(packed).decode()) == samples(plain.decode())
    assert (b"prober_probe_total" in plain) == (path == "/metrics/probes")
    assert b"process_start_time_seconds" in plain


async def test_metrics_large_page_other_tasks_run_between_slices() -> None:
    async with client(busy_registry(1500)) as http, watched_loop() as stalls:
        async with http.get("/metrics", headers={"Accept-Encoding": "identity"}) as response:
            page = await response.read()
    assert len(page) > 5_000_000
    assert stalls.longest_cpu < STALL_SECONDS


async def test_metrics_client_disconnects_midway_slot_released() -> None:
    limit = ScrapeLimit(1)
    async with client(busy_registry(500), limit) as http:
        response = await http.get("/metrics")
        await response.content.readexactly(1000)
        response.close()
        async with asyncio.timeout(30):
            while limit.active:
                await asyncio.sleep(0.01)
        async with http.get("/metrics") as second:
            assert second.status == 200
            await second.read()


class Broken(Collector):
    """A collector that fails."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("fine", "Fine.", value=1)
        raise OSError("no such device")


async def test_metrics_collector_fails_connection_reset() -> None:
    registry = CollectorRegistry()
    registry.register(Broken())
    limit = ScrapeLimit(1)
    async with client(registry, limit) as http:
        with pytest.raises(aiohttp.ClientError):
            async with http.get("/metrics") as response:
                await response.read()
    assert limit.active == 0
