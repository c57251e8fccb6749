"""`/stats/summary` on the read-only port: methods, parameter, permission, errors, limits and slow clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.server.auth.identity import required_attributes
from pykubelet.server.listeners import http_server
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.pipeline import counting_middleware
from pykubelet.server.stats import summary_routes
from pykubelet.server.streams.streaming import StreamLimits
from pykubelet.stats.summary import SummaryInputs
from tests.unit.stats.summary_facts import node_inputs


class Source:
    """Facts of a node; waits for `hold` if there is one."""

    def __init__(self, inputs: SummaryInputs, hold: asyncio.Event | None = None) -> None:
        self.inputs = inputs
        self.hold = hold
        self.requests: list[bool] = []

    async def summary_inputs(self, only_cpu_and_memory: bool) -> SummaryInputs:
        self.requests.append(only_cpu_and_memory)
        if self.hold is not None:
            await self.hold.wait()
        return self.inputs


@asynccontextmanager
async def served(source: Source, port: int, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    metrics = ServerMetrics(CollectorRegistry())
    routes = summary_routes(source, **options)
    async with (
        http_server("read-only", "127.0.0.1", port, routes, [counting_middleware(metrics, "readonly")]),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session


@pytest.mark.parametrize("path", ["/stats/summary", "/stats/summary/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_summary_get_and_post_return_document(path: str, method: str, unused_tcp_port: int) -> None:
    source = Source(node_inputs(2))
    async with served(source, unused_tcp_port) as session, session.request(method, path) as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        document = await response.json()
    assert document["node"]["nodeName"] == "node1"
    assert [pod["podRef"]["name"] for pod in document["pods"]] == ["pod-0", "pod-1"]
    assert source.requests == [False]


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE"])
async def test_summary_other_methods_not_allowed(method: str, unused_tcp_port: int) -> None:
    async with (
        served(Source(node_inputs(1)), unused_tcp_port) as session,
        session.request(method, "/stats/summary") as response,
    ):
        assert response.status == 405


@pytest.mark.parametrize(
    ("query", "form", "expected"),
    [
        ("", None, False),
        ("?only_cpu_and_memory=true", None, True),
        ("?only_cpu_and_memory=True", None, False),
        ("?only_cpu_and_memory=1", None, False),
        ("?only_cpu_and_memory=true&only_cpu_and_memory=true", None, False),
        ("", {"only_cpu_and_memory": "true"}, True),
        ("?only_cpu_and_memory=true", {"only_cpu_and_memory": "true"}, False),
    ],
)
async def test_summary_parameter_once_and_true_limits_document(
    query: str, form: dict[str, str] | None, expected: bool, unused_tcp_port: int
) -> None:
    source = Source(node_inputs(1))
    method = "GET" if form is None else "POST"
    async with (
        served(source, unused_tcp_port) as session,
        session.request(method, f"/stats/summary{query}", data=form) as response,
    ):
        document = await response.json()
    assert source.requests == [expected]
    assert ("fs" in document["node"]) is not expected


async def test_summary_large_form_rejected(unused_tcp_port: int) -> None:
    async with (
        served(Source(node_inputs(1)), unused_tcp_port) as session,
        session.post("/stats/summary", data={"x": "y" * 1_000_000}) as response,
    ):
        assert response.status == 413


async def test_summary_no_sample_yet_returns_internal_error(unused_tcp_port: int) -> None:
    async with (
        served(Source(node_inputs(0, records=[])), unused_tcp_port) as session,
        session.get("/stats/summary") as response,
    ):
        assert response.status == 500
        assert response.content_type == "text/plain"
        assert await response.text() == (
            'Internal Error: failed to get root cgroup stats: cgroup stats not found for "/": '
            "unable to find data in memory cache"
        )


async def test_summary_hanging_source_returns_internal_error(unused_tcp_port: int) -> None:
    source = Source(node_inputs(1), asyncio.Event())
    async with (
        served(source, unused_tcp_port, source_timeout=0.05) as session,
        session.get("/stats/summary") as response,
    ):
        assert response.status == 500
        assert await response.text() == "Internal Error: failed to collect statistics: timed out"


async def test_summary_too_many_requests_rejected_until_one_ends(unused_tcp_port: int) -> None:
    hold = asyncio.Event()
    source = Source(node_inputs(1), hold)
    async with served(source, unused_tcp_port, limits=StreamLimits(3, 3)) as session:

        async def status() -> int:
            async with session.get("/stats/summary") as response:
                await response.read()
                return response.status

        waiting = [asyncio.create_task(status()) for _ in range(3)]
        async with asyncio.timeout(30):
            while len(source.requests) < 3:
                await asyncio.sleep(0.01)
        assert await status() == 429
        hold.set()
        assert await asyncio.gather(*waiting) == [200, 200, 200]
        assert await status() == 200


async def test_summary_500_pods_streamed_completely(unused_tcp_port: int) -> None:
    async with served(Source(node_inputs(500, containers=2)), unused_tcp_port) as session:
        async with session.get("/stats/summary") as response:
            assert response.headers["Transfer-Encoding"] == "chunked"
            document = json.loads(await response.read())
    assert len(document["pods"]) == 500
    assert len(document["pods"][-1]["containers"]) == 2


async def request_and_stop_reading(port: int) -> socket.socket:
    """Request a large document with a small receive buffer, and read only its beginning."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, b"GET /stats/summary HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
    return client


async def wait_free(session: aiohttp.ClientSession) -> None:
    """Wait until a slot is free again."""
    async with asyncio.timeout(30):
        while True:
            async with session.get("/stats/summary?only_cpu_and_memory=true") as response:
                await response.read()
                if response.status == 200:
                    return
            await asyncio.sleep(0.01)


async def test_summary_client_disconnects_midway_frees_its_slot(unused_tcp_port: int) -> None:
    source = Source(node_inputs(1500, containers=2))
    async with served(source, unused_tcp_port, limits=StreamLimits(1, 1)) as session:
        client = await request_and_stop_reading(unused_tcp_port)
        async with session.get("/stats/summary") as response:
            assert response.status == 429
        client.close()
        await wait_free(session)


async def test_summary_client_does_not_read_connection_closed(unused_tcp_port: int) -> None:
    source = Source(node_inputs(1500, containers=2))
    async with served(source, unused_tcp_port, limits=StreamLimits(1, 1), write_timeout=0.2) as session:
        client = await request_and_stop_reading(unused_tcp_port)
        await wait_free(session)
        loop = asyncio.get_running_loop()
        received = b""
        async with asyncio.timeout(30):
            try:
                while data := await loop.sock_recv(client, 1 << 20):
                    received = (received + data)[-10:]
            except ConnectionResetError:
                pass
        assert not received.endswith(b"0\r\n\r\n")
        client.close()


async def test_summary_large_document_other_tasks_run(unused_tcp_port: int) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with served(Source(node_inputs(500)), unused_tcp_port) as session:
        counting = asyncio.create_task(count())
        async with session.get("/stats/summary") as response:
            size = len(await response.read())
        counting.cancel()
    assert turns >= size // (32 * 1024)


@pytest.mark.parametrize(("method", "verb"), [("GET", "get"), ("POST", "create")])
def test_summary_permission_is_nodes_stats(method: str, verb: str) -> None:
    for path in ("/stats/summary", "/stats/summary/"):
        (needed,) = required_attributes(method, path)
        assert (needed.verb, needed.subresource) == (verb, "stats")
