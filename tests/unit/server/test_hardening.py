"""Faults that other kubelets had, tried here; docs/security.md has the list."""

import ast
import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.server.lookup import PodLookup
from pykubelet.server.readonly import health_routes, read_only_routes, spec_routes
from pykubelet.server.streams.container_actions import ContainerActions
from pykubelet.server.tls import TlsSettings, server_context
from pykubelet.stats.machine import machine_info
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.errors import VolumeError
from tests.support import api_node
from tests.support.api_node import Runtime, Start
from tests.support.pod_view import START, ScriptedView, pod_of
from tests.support.volumes import Shelf, pod_with, volumes_at

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start

SOURCES = Path(__file__).parents[3] / "src" / "pykubelet"


async def test_health_port_other_paths_return_404() -> None:
    app = web.Application()
    app.add_routes(health_routes({"ping": lambda: None}))
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/healthz")).status == 200
        for path in ("/debug/pprof/", "/debug/pprof/profile", "/metrics", "/configz", "/pods", "/logs/", "/"):
            assert (await client.get(path)).status == 404


async def test_api_connection_reused_each_request_authenticated(start: Start) -> None:
    """A connection on which something was allowed, or refused, gives the next request nothing."""
    node = await start()
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=ssl._create_unverified_context()
    )
    upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
    asked = [
        ("POST /exec/default/nope/main?output=1", f"Authorization: Bearer admin-token\r\n{upgrade}", "404"),
        ("GET /pods", "Authorization: Bearer admin-token\r\n", "200"),
        ("GET /pods", "", "401"),
    ]
    try:
        for request, headers, status in asked:
            writer.write(f"{request} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: 0\r\n\r\n".encode())
            async with asyncio.timeout(30):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.split()[1] == status, request
                length = next(line for line in head.lower().splitlines() if "content-length" in line)
                await reader.readexactly(int(length.split(":")[1]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics/../exec/default/web/main", "/metrics/%2e%2e/run/default/web/main", "/./pods", "//pods"),
        *("/pods%2F..%2Frun", "/pods//", "/logs/a%00b", "/logs/%5c..%5cx", "/pods/.", "/pods/%FF"),
    ],
)
async def test_server_ambiguous_path_rejected_before_authorization(start: Start, path: str) -> None:
    """Verify that no path is authorized as one thing and handled as another, over HTTP/1.1."""
    node = await start()
    asked = list(node.people.asked)
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=ssl._create_unverified_context()
    )
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin-token\r\n\r\n".encode())
        async with asyncio.timeout(30):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
    finally:
        writer.close()
    assert head.split()[1] == "400"
    assert node.people.asked == asked


async def test_read_only_port_has_neither_profiles_nor_checkpoints() -> None:
    """Verify that the port that needs no authentication starts no work (CVE-2019-11248, CVE-2025-0426)."""
    app = web.Application()
    view = ScriptedView([pod_of("web", "u1", node="")])
    async with TaskScope() as tasks:
        filesystems = Filesystems(Path("/var/lib/kubelet"), tasks)
    app.add_routes([*read_only_routes(view), *spec_routes(partial(machine_info, filesystems))])
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/pods")).status == 200
        for path in (
            "/debug/pprof/",
            "/debug/pprof/profile",
            "/exec/default/web/main",
            "/run/default/web/main",
        ):
            assert (await client.get(path)).status == 404
        for path in ("/checkpoint/default/web/main", "/run/default/web/main", "/exec/default/web/main"):
            assert (await client.post(path)).status == 404


def test_server_context_minimum_version_is_tls_1_2() -> None:
    assert server_context(TlsSettings()).minimum_version >= ssl.TLSVersion.TLSv1_2


async def test_checkpoint_endpoint_concurrent_requests_serialized(tmp_path: Path) -> None:
    at_work, most = 0, 0

    class Slow(Runtime):
        async def checkpoint_container(
            self, container_id: str, location: str, timeout_seconds: int = 0
        ) -> None:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            await asyncio.sleep(0.01)
            at_work -= 1

    runtime = Slow()
    runtime.containers["u1/main"] = [pb.Container(id="c1", created_at=1)]
    lookup = PodLookup(ScriptedView([pod_of("web", "u1", node="")]), runtime, str)
    app = web.Application()
    app.add_routes(ContainerActions(lookup, tmp_path / "c", lambda: START).checkpoint_routes())
    async with TestClient(TestServer(app)) as client:
        answers = await asyncio.gather(*(client.post("/checkpoint/default/web/main") for _ in range(5)))
        assert [answer.status for answer in answers] == [200] * 5
    assert most == 1
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0


async def test_git_repo_volume_mount_raises(tmp_path: Path) -> None:
    volume = {"name": "code", "gitRepo": {"repository": "/somebody/elses", "directory": "."}}
    with pytest.raises(VolumeError, match="gitRepo volumes are not supported"):
        await volumes_at(tmp_path, Shelf()).mount(pod_with(volume))


def _code_of(check: Callable[[ast.AST], bool]) -> list[str]:
    """Where the agent's code has something."""
    return [
        f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
        for path in sorted(SOURCES.rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if check(node)
    ]


def test_source_code_uses_no_shell() -> None:
    def is_shell(node: ast.AST) -> bool:
        if isinstance(node, ast.keyword) and node.arg == "shell":
            return not (isinstance(node.value, ast.Constant) and node.value.value is False)
        return isinstance(node, ast.Attribute) and node.attr in ("create_subprocess_shell", "system", "popen")

    assert _code_of(is_shell) == []
