"""`/metrics/cadvisor` and `/metrics/resource` over HTTP: compression, profiles, limits, slow clients."""

from __future__ import annotations

import asyncio
import gc
import gzip
import socket
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from pykubelet.agent.servers import _statistics_routes
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.server.auth.identity import USER, User
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.metrics.stats_metrics import (
    Handler,
    ScrapeLimit,
    accepts_gzip,
    cadvisor_routes,
    resource_routes,
)
from pykubelet.server.pipeline import counting_middleware
from pykubelet.stats.cadvisor.metrics import LEAN_NAMES
from pykubelet.stats.cri.runtime_stats import CriMetricList
from pykubelet.stats.samples import FilesystemUsage, MachineFacts, Record
from pykubelet.util.tasks import RenderTurns
from tests.support import stats_records
from tests.support.prometheus_text import Series, parse
from tests.support.stats_records import FILESYSTEM, MACHINE, node_records
from tests.support.waiting import until

TIMEOUT_SECONDS = 30.0


class Samples:
    """A source with fixed samples, whose preparation may wait or fail."""

    def __init__(self, records: list[Record], *, error: Exception | None = None) -> None:
        self._records = records
        self._error = error
        self.ready = asyncio.Event()
        self.ready.set()
        self.prepared: list[bool] = []
        self.from_runtime: CriMetricList | None = None
        self.host_filesystems = SimpleNamespace(hints={})
        self.sandboxes: dict[str, pb.PodSandboxStats] | None = None

    async def prepare(self, *, detailed: bool) -> None:
        self.prepared.append(detailed)
        await self.ready.wait()
        if self._error is not None:
            raise self._error

    def records(self) -> Sequence[Record]:
        return self._records

    def filesystems(self) -> Sequence[FilesystemUsage]:
        return [FILESYSTEM]

    def machine(self) -> MachineFacts:
        return MACHINE

    def device_name(self, major: int, minor: int) -> str:
        return stats_records.device_name(major, minor)

    def has_pressure(self) -> bool:
        return True

    async def runtime_metrics(self) -> CriMetricList | None:
        return self.from_runtime

    async def runtime_sandboxes(self) -> Mapping[str, pb.PodSandboxStats] | None:
        return self.sandboxes


class Site:
    """A server with both routes."""

    def __init__(self, source: Samples, limit: ScrapeLimit, port: int, client: aiohttp.ClientSession) -> None:
        self.source = source
        self.limit = limit
        self.port = port
        self._client = client

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, aiohttp.ClientResponse]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._client.get(f"http://127.0.0.1:{self.port}{path}", headers=sent) as response:
            return response.status, await response.read(), response

    async def connect(
        self, path: str = "/metrics/cadvisor"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request whose response is not read beyond small buffers."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return reader, writer


@web.middleware
async def user_of_header(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the user that a header names."""
    if name := request.headers.get("user"):
        request[USER] = User(name)
    return await handler(request)


@asynccontextmanager
async def site(source: Samples, limit: ScrapeLimit | None = None) -> AsyncIterator[Site]:
    limit = limit or ScrapeLimit()
    counting = counting_middleware(ServerMetrics(CollectorRegistry()), "readonly")
    app = web.Application(middlewares=[counting, user_of_header])
    app.add_routes([*cadvisor_routes(source, limit), *resource_routes(source, limit)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(auto_decompress=False) as client:
            yield Site(source, limit, port, client)
    finally:
        await runner.cleanup()


async def test_cadvisor_route_gzip_accepted_page_compressed() -> None:
    async with site(Samples(node_records(20))) as node:
        status, plain, response = await node.get("/metrics/cadvisor", Accept_Encoding="identity")
        assert status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "Content-Encoding" not in response.headers
        status, body, response = await node.get("/metrics/cadvisor", Accept_Encoding="gzip")
        assert response.headers["Content-Encoding"] == "gzip"
        assert len(body) < len(plain) / 10
        pages = [parse(plain.decode()), parse(gzip.decompress(body).decode())]
        assert pages[0].keys() == pages[1].keys()
        assert "container_pressure_io_stalled_seconds_total" in {series.name for series in pages[0]}
        assert node.source.prepared == [True, True]


async def test_cadvisor_route_lean_profile_only_its_metrics() -> None:
    async with site(Samples(node_records(2))) as node:
        _, body, _ = await node.get("/metrics/cadvisor?profile=lean", Accept_Encoding="identity")
        assert {series.name for series in parse(body.decode())} == LEAN_NAMES
        status, body, _ = await node.get("/metrics/cadvisor?profile=fat")
        assert (status, body) == (400, b"profile is invalid: set full or lean\n")
        assert (await node.get("/metrics/cadvisor?profile=full"))[0] == 200


async def test_resource_route_page_without_details() -> None:
    async with site(Samples(node_records(2))) as node:
        status, body, _ = await node.get("/metrics/resource", Accept_Encoding="identity")
        assert status == 200
        assert parse(body.decode())[Series("resource_scrape_error")] == 0
        assert node.source.prepared == [False]


@pytest.mark.parametrize(("version", "names"), [("1.35", {"scrape_error"}), ("", set())])
async def test_servers_resource_metrics_hidden_unless_version_is_set(version: str, names: set[str]) -> None:
    config = KubeletConfiguration(show_hidden_metrics_for_version=version)
    parts: Any = SimpleNamespace(statistics=Samples([]), settings=SimpleNamespace(config=config))
    routes = _statistics_routes(parts, ScrapeLimit, RenderTurns())
    app = web.Application()
    app.add_routes([route for route in routes if route.path == "/metrics/resource"])
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/metrics/resource")
        found = {series.name for series in parse(await response.text())}
    assert found == {"resource_scrape_error"} | names


async def test_servers_cadvisor_metrics_have_file_systems_of_hints() -> None:
    source = Samples([stats_records.record("node", "/system.slice")])
    source.host_filesystems.hints = {"/system.slice": frozenset({FILESYSTEM.mount_point})}
    parts: Any = SimpleNamespace(statistics=source, settings=SimpleNamespace(config=KubeletConfiguration()))
    app = web.Application()
    app.add_routes(_statistics_routes(parts, ScrapeLimit, RenderTurns()))
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/metrics/cadvisor")
        found = [
            series.get("id")
            for series in parse(await response.text())
            if series.name == "container_fs_limit_bytes"
        ]
    assert sorted(found) == ["/", "/system.slice"]


async def test_resource_route_statistics_of_runtime_replace_those_of_cgroups() -> None:
    source = Samples(node_records(2))
    source.sandboxes = {}
    async with site(source) as node:
        _, body, _ = await node.get("/metrics/resource", Accept_Encoding="identity")
    names = {series.name for series in parse(body.decode())}
    assert "node_cpu_usage_seconds_total" in names
    assert not any(name.startswith(("container_", "pod_")) for name in names)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TimeoutError()])
async def test_stats_routes_failed_preparation_scrape_error_reported(error: Exception) -> None:
    async with site(Samples(node_records(2), error=error)) as node:
        _, body, _ = await node.get("/metrics/resource", Accept_Encoding="identity")
        assert parse(body.decode()) == {Series("resource_scrape_error"): 1}
        _, body, _ = await node.get("/metrics/cadvisor", Accept_Encoding="identity")
        values = parse(body.decode())
        assert values[Series("container_scrape_error")] == 1
        assert not [series for series in values if series.get("id")]


async def test_cadvisor_route_head_headers_only() -> None:
    async with site(Samples(node_records(1))) as node:
        async with aiohttp.request("HEAD", f"http://127.0.0.1:{node.port}/metrics/cadvisor") as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_cadvisor_route_client_disconnects_midway_scrape_ends() -> None:
    async with site(Samples(node_records(300))) as node:
        reader, writer = await node.connect()
        assert await reader.readexactly(1000)
        assert node.limit.active == 1
        writer.transport.abort()
        await until(lambda: node.limit.active == 0)
        status, body, _ = await node.get("/metrics/cadvisor?profile=lean", Accept_Encoding="identity")
        assert status == 200
        assert parse(body.decode())


async def test_cadvisor_route_concurrent_scrapes_limited() -> None:
    source = Samples(node_records(1))
    source.ready.clear()
    async with site(source, ScrapeLimit(3)) as node:
        scrapes = [asyncio.create_task(node.get("/metrics/cadvisor")) for _ in range(3)]
        await until(lambda: node.limit.active == 3)
        status, body, _ = await node.get("/metrics/resource")
        assert (status, body) == (503, b"3 scrapes are in progress: retry later\n")
        source.ready.set()
        assert [status for status, _, _ in await asyncio.gather(*scrapes)] == [200, 200, 200]
        assert (await node.get("/metrics/resource"))[0] == 200


async def test_cadvisor_route_user_at_limit_others_are_served() -> None:
    source = Samples(node_records(1))
    source.ready.clear()
    async with site(source, ScrapeLimit(3, max_per_user=2)) as node:
        scrapes = [asyncio.create_task(node.get("/metrics/cadvisor", user="a")) for _ in range(2)]
        await until(lambda: node.limit.active == 2)
        status, body, _ = await node.get("/metrics/resource", user="a")
        assert (status, body) == (503, b"2 scrapes by this user are in progress: retry later\n")
        scrapes.append(asyncio.create_task(node.get("/metrics/resource", user="b")))
        await until(lambda: node.limit.active == 3)
        assert (await node.get("/metrics/resource", user="c"))[0] == 503
        source.ready.set()
        assert [status for status, _, _ in await asyncio.gather(*scrapes)] == [200, 200, 200]
        assert node.limit.active == 0
        assert (await node.get("/metrics/resource", user="a"))[0] == 200


async def test_cadvisor_route_client_that_does_not_read_cut_at_timeout() -> None:
    async with site(Samples(node_records(300)), ScrapeLimit(1, timeout_seconds=0.5)) as node:
        reader, writer = await node.connect()
        await until(lambda: node.limit.active == 1)
        await until(lambda: node.limit.active == 0)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                # The response is chunked: a complete one ends with a chunk of size 0.
                line = await reader.readuntil(b"\n")
                assert line != b"0\r\n"
        writer.close()


async def test_cadvisor_route_500_pods_slow_client_bounded_memory() -> None:
    async with site(Samples(node_records(500))) as node:
        await node.get("/metrics/cadvisor", Accept_Encoding="gzip")
        gc.collect()
        tracemalloc.start()
        try:
            reader, writer = await node.connect()
            read = 0
            while read < 5_000_000:
                read += len(await reader.read(4096))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.transport.abort()
        await until(lambda: node.limit.active == 0)
        assert peak < 3_000_000, peak


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ([], False),
        (["gzip"], True),
        (["deflate, GZIP;q=0.5"], True),
        (["gzip;q=0"], False),
        (["gzip; q=0.000"], False),
        (["identity", "gzip"], True),
        (["xgzip"], False),
    ],
)
def test_accepts_gzip_header_values_interpreted(headers: list[str], accepted: bool) -> None:
    assert accepts_gzip(headers) is accepted


def runtime_gauge(name: str, value: int) -> tuple[pb.MetricDescriptor, pb.Metric]:
    return (
        pb.MetricDescriptor(name=name, help="Of the runtime.", label_keys=["id"]),
        pb.Metric(name=name, metric_type=pb.GAUGE, label_values=["a"], value=pb.UInt64Value(value=value)),
    )


@pytest.mark.parametrize("profile", ["full", "lean"])
async def test_cadvisor_metrics_of_runtime_replace_those_of_cgroups(profile: str) -> None:
    source = Samples(node_records(2))
    gauges = [runtime_gauge("container_fuel_bytes", 7), runtime_gauge("container_fs_usage_bytes", 8)]
    source.from_runtime = CriMetricList(
        [described for described, _ in gauges],
        [pb.PodSandboxMetrics(pod_sandbox_id="a", metrics=[metric for _, metric in gauges])],
    )
    async with site(source) as server:
        status, body, _ = await server.get(f"/metrics/cadvisor?profile={profile}", Accept_Encoding="identity")
    assert status == 200
    text = body.decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    found = parse(text)
    expected = {Series("container_fs_usage_bytes", (("id", "a"),)): 8.0}
    if profile == "full":
        expected[Series("container_fuel_bytes", (("id", "a"),))] = 7.0
        assert "machine_cpu_cores" in types
    assert {series: value for series, value in found.items() if "machine_" not in series.name} == expected
    assert not source.prepared
