"""cAdvisor's API over HTTP: documents of recorded cgroup trees, selection, bounds, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.server.cadvisor_api.requests import MAX_BODY_BYTES
from pykubelet.server.cadvisor_api.routes import cadvisor_api_routes
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.metrics.stats_metrics import ScrapeLimit
from pykubelet.server.pipeline import counting_middleware
from pykubelet.stats.cgroups.readers import cgroup_reader_factory
from pykubelet.stats.collector import Collector
from pykubelet.stats.machine import machine_info
from pykubelet.stats.samples import Target
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope
from tests.support.cgroup_trees import reader_host, v1_tree, v2_tree
from tests.support.prometheus_text import parse
from tests.support.stats_records import FILESYSTEM, MACHINE, NOW, node_records
from tests.support.waiting import until
from tests.unit.server.test_stats_metrics import Samples

CONTAINER = "/kubepods/pod1"


class Api:
    """A server with the routes."""

    def __init__(self, url: str, client: aiohttp.ClientSession, limit: ScrapeLimit) -> None:
        self.url = url
        self.limit = limit
        self._client = client
        self.sampled: list[str] = []

    def sample_now(self, paths: Iterable[str]) -> None:
        self.sampled += paths

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.send("GET", path)

    async def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        async with self._client.request(method, self.url + path, data=body or None) as response:
            data = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(data) if is_json else data.decode()


@asynccontextmanager
async def api(
    source: Samples, root: Path = Path("/var/lib/kubelet"), limit: ScrapeLimit | None = None
) -> AsyncIterator[Api]:
    limit = limit or ScrapeLimit()
    app = web.Application(middlewares=[counting_middleware(ServerMetrics(CollectorRegistry()), "readonly")])
    async with TaskScope() as tasks, aiohttp.ClientSession() as client:
        tested = Api("", client, limit)
        filesystems = Filesystems(root, tasks)
        info = partial(machine_info, filesystems)
        app.add_routes(cadvisor_api_routes(source, filesystems, info, tested.sample_now, limit))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            tested.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield tested
        finally:
            await runner.cleanup()


async def sampled_tree(cgroups: Cgroups, tmp_path: Path, tasks: TaskScope) -> Samples:
    """Return the samples of the container of a recorded tree, read by the collector."""
    collector = Collector(cgroup_reader_factory(cgroups, reader_host(tmp_path)), tasks)
    names = {"namespace": "production", "pod": "web", "pod_uid": "1", "container": "server"}
    target = Target(path=CONTAINER, kind="container", runtime_id="ab12", image="nginx", created=NOW, **names)
    collector.set_targets("1", [target])
    await collector.sample_due()
    await collector.refresh_details()
    return Samples(list(collector.records()))


@pytest.mark.parametrize("tree", [v1_tree, v2_tree])
async def test_containers_of_recorded_tree_have_spec_and_sample(
    tree: Callable[[Path], Cgroups], tmp_path: Path
) -> None:
    async with TaskScope() as tasks:
        async with api(await sampled_tree(tree(tmp_path), tmp_path, tasks)) as server:
            status, info = await server.get(f"/api/v1.3/containers{CONTAINER}")
    assert status == 200
    assert (info["id"], info["name"], info["aliases"]) == ("ab12", CONTAINER, ["ab12"])
    spec, (stats,) = info["spec"], info["stats"]
    assert spec["labels"]["io.kubernetes.pod.name"] == "web"
    assert spec["image"] == "nginx"
    assert spec["cpu"]["quota"] == 20000
    assert spec["memory"]["limit"] == 134217728
    assert "envs" not in spec
    assert stats["cpu"]["usage"]["total"] in (123456789, 123456000)
    assert stats["cpu"]["cfs"]["throttled_periods"] == 4
    assert (stats["memory"]["usage"], stats["memory"]["working_set"]) == (131072, 101072)
    (disk,) = stats["diskio"]["io_service_bytes"]
    assert (disk["device"], disk["major"], disk["stats"]["Write"]) == ("/dev/vda", 254, 16384)
    assert stats["hugetlb"]["2MB"]["usage"] == 2097152
    assert "filesystem" not in stats  # unknown for containers


async def test_v1_children_subcontainers_and_requested_samples() -> None:
    records = node_records(2)
    async with api(Samples(records)) as server:
        _, root = await server.get("/api/v1.3/containers/")
        assert [child["name"] for child in root["subcontainers"]] == ["/kubepods"]
        assert root["spec"]["memory"]["limit"] == MACHINE.memory
        assert root["stats"][0]["filesystem"][0]["device"] == FILESYSTEM.device
        assert root["stats"][0]["network"]["rx_bytes"] == 12345  # of the first interface
        _, found = await server.get("/api/v1.3/subcontainers/kubepods/burstable")
        assert {info["name"] for info in found} == {
            record.target.path for record in records if record.target.path.startswith("/kubepods/burstable")
        }
        for body, count in (
            (b'{"num_stats": 1}', 1),
            (b'{"num_stats": 0}', 0),
            (b'{"num_stats": -1, "start": "0001-01-01T00:00:00Z", "end": "0001-01-01T00:00:00Z"}', 1),
            (b'{"start": "2100-01-01T00:00:00Z"}', 0),
            (b'{"end": "2001-01-01T00:00:00+01:00"}', 0),
        ):
            status, info = await server.send("POST", "/api/v1.3/containers/kubepods", body)
            assert (status, len(info.get("stats", []))) == (200, count), body


async def test_v2_options_select_records_and_samples() -> None:
    records = node_records(3)
    async with api(Samples(records)) as server:
        _, stats = await server.get("/api/v2.0/stats/kubepods?type=name&count=1")
        assert list(stats) == ["/kubepods"]
        (sample,) = stats["/kubepods"]
        assert (sample["has_cpu"], sample["has_network"]) == (True, False)
        assert sample["cpu_inst"]["usage"]["total"] == 1
        _, everything = await server.get("/api/v2.0/stats/?recursive=true&count=-1")
        assert set(everything) == {record.target.path for record in records}
        _, newer = await server.get("/api/v2.1/stats/?recursive=true")
        assert set(newer) == set(everything) - {"/"}
        assert newer["/kubepods"]["spec"]["has_memory"]
        assert newer["/kubepods"]["stats"][0]["memory"]["working_set"] == 35_143_680
        assert (await server.get("/api/v2.0/stats/kubepods?count=0"))[1] == {"/kubepods": []}
        _, specs = await server.get("/api/v2.0/spec/kubepods?recursive=true")
        assert set(specs) == set(newer)
        _, summary = await server.get("/api/v2.0/summary/kubepods")
        assert summary["/kubepods"]["latest_usage"] == {"cpu": 0, "memory": 35_143_680}
        assert (await server.get("/api/v2.0/stats/?type=docker&recursive=true"))[1] == {}
        assert not server.sampled
        await server.get("/api/v2.0/stats/kubepods?max_age=1s")
        assert server.sampled == ["/kubepods"]


async def test_host_documents_have_hardware_and_filesystems() -> None:
    async with api(Samples(node_records(1))) as server:
        _, machine = await server.get("/api/v1.3/machine")
        assert machine["num_cores"] > 0
        assert machine.keys() == (await server.get("/api/v2.0/machine"))[1].keys()
        _, attributes = await server.get("/api/v2.0/attributes")
        assert attributes["memory_capacity"] == machine["memory_capacity"]
        assert "docker_version" not in attributes
        _, storage = await server.get("/api/v2.0/storage")
        assert storage[0]["capacity"] > 0
        assert all(entry["mountpoint"].startswith("/") for entry in storage)
        assert (await server.get("/api/v2.0/storage?label=root"))[1] == [
            entry for entry in storage if entry["labels"]
        ]
        assert (await server.get("/api/v2.0/storage?uuid=../../vda"))[0] == 404
        assert (await server.get("/api/v2.0/version")) == (200, "")
        _, (stats,) = await server.get("/api/v2.1/machinestats")
        assert stats["filesystem"][0]["inline"]["io_duration"] == FILESYSTEM.io.io_ms * 1_000_000
        _, text = await server.get("/metrics")
        assert "machine_cpu_cores" in {series.name for series in parse(text)}


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api", 400, "Supported API versions: v1.0,v1.1,v1.2,v1.3,v2.0,v2.1"),
        ("/api/", 400, "Supported API versions"),
        ("/api/v1.3", 400, "Supported request types: 'containers,machine,subcontainers'"),
        ("/api/v9", 400, "unsupported API version 'v9'"),
        ("/api/v1.0/subcontainers", 400, "unknown request type 'subcontainers'"),
        ("/api/v2.0/ps", 400, "unknown request type 'ps'"),
        ("/api/v1.3/containers/none", 404, "unknown container '/none'"),
        ("/api/v1.3/subcontainers/none", 404, "no containers found"),
        ("/api/v2.0/stats/none", 404, "unknown container '/none'"),
        ("/api/v2.0/stats/none?recursive=true", 404, "unknown container '/none'"),
        ("/api/v2.0/stats/a?type=docker", 404, "unable to find container 'a' in 'docker' namespace"),
        ("/api/v2.0/stats/a?type=docker&recursive=true", 400, "invalid request for docker container"),
        ("/api/v2.0/stats/?type=rkt", 400, "unknown 'type' 'rkt'"),
        ("/api/v2.0/stats/?count=x", 400, "failed to parse 'count' option: 'x'"),
        ("/api/v2.0/stats/?count=" + "9" * 5000, 400, "failed to parse 'count' option"),
        ("/api/v2.0/stats/?count=-2", 400, "only -1 and larger values allowed, not -2"),
        ("/api/v2.0/stats/?max_age=soon", 400, "failed to parse 'max_age' option"),
        ("/api/v2.0/storage?label=none", 404, "no filesystem has the label 'none'"),
    ],
)
async def test_request_that_cannot_be_served_is_rejected(path: str, status: int, text: str) -> None:
    async with api(Samples(node_records(1))) as server:
        found, message = await server.get(path)
    assert found == status
    assert text in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"num_stats": -2}', 400),
        (b'{"num_stats": 1e99}', 400),
        (b'{"start": "yesterday"}', 400),
        (b'{"end": "2001-01-01T00:00:00"}', 400),
        (b'{"x":' + b"[" * (MAX_BODY_BYTES - 5), 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
        (b"[" * 1_000_000, 413),
    ],
)
async def test_body_invalid_or_too_large_rejected(body: bytes, status: int) -> None:
    async with api(Samples(node_records(1))) as server:
        try:
            assert (await server.send("POST", "/api/v1.3/containers/", body))[0] == status
        except aiohttp.ClientOSError:  # the server has closed the connection before all was sent
            assert status == 413
        assert (await server.get("/api/v1.3/containers/"))[0] == 200


async def test_statistics_that_cannot_be_read_error_with_reason() -> None:
    async with api(Samples([], error=OSError(5, "Input/output error"))) as server:
        status, text = await server.get("/api/v2.0/stats/")
    assert (status, text) == (500, "failed to read statistics: [Errno 5] Input/output error\n")


async def test_concurrent_requests_limited_and_slow_reader_cut() -> None:
    limit = ScrapeLimit(1, timeout_seconds=0.5)
    async with api(Samples(node_records(2000)), limit=limit) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(b"GET /api/v1.3/subcontainers/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: limit.active == 1)
        assert (await server.get("/api/v2.0/stats/"))[0] == 503
        await until(lambda: limit.active == 0)
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                received += data
        assert received.startswith(b"HTTP/1.1 200")
        assert not received.endswith(b"0\r\n\r\n")  # the end of a complete response
        writer.close()


async def test_large_document_does_not_hold_the_loop() -> None:
    source = Samples(node_records(500))
    async with api(source) as server:
        longest = 0.0
        is_done = False

        async def watch() -> None:
            nonlocal longest
            loop = asyncio.get_running_loop()
            while not is_done:
                before = loop.time()
                await asyncio.sleep(0)
                longest = max(longest, loop.time() - before)

        watcher = asyncio.create_task(watch())
        async with aiohttp.request("GET", f"{server.url}/api/v1.3/subcontainers/") as response:
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
        is_done = True
        await watcher
    assert size > 2_000_000
    assert longest < 0.1, longest
