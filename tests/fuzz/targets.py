"""What is fuzzed: each target has good input to begin with, and takes any bytes without anything unexpected.

A target raises whatever its code raises by mistake; what the code is meant to raise is caught here.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet.config.errors import ConfigError
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.load import load
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.oom_watcher import KmsgError, OomState, follow, parse_record
from pykubelet.podconfig.static_pods import static_pods
from pykubelet.server.api import (
    ApiServerDependencies,
    AuthDependencies,
    DebugDependencies,
    PodDependencies,
    api_routes,
)
from pykubelet.server.connections import app_runner, serve_connections
from pykubelet.server.listeners import listening_socket
from pykubelet.server.logs.log_files import last_lines, parse_entries
from pykubelet.server.manifests import ManifestDirectory
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.pipeline import counting_middleware
from tests.fuzz.paths import SEEDS as PATHS
from tests.fuzz.paths import paths
from tests.support.api_node import Runtime
from tests.support.pod_view import ScriptedView, pod_of

ROOT = Path(__file__).parents[2]
Take = Callable[[bytes], Awaitable[None]]
_A_MOMENT = 0.1


@dataclass(frozen=True)
class Target:
    """Something that reads bytes."""

    seeds: list[bytes]
    open: Callable[[], contextlib.AbstractAsyncContextManager[Take]]


@contextlib.asynccontextmanager
async def _manifests() -> AsyncIterator[Take]:
    async def take(data: bytes) -> None:
        with contextlib.suppress(ConfigError):
            static_pods(data, source="file", origin="/m/x.yaml", node_name="n", now=0)

    yield take


@contextlib.asynccontextmanager
async def _configuration() -> AsyncIterator[Take]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"

        async def take(data: bytes) -> None:
            path.write_bytes(data)
            with contextlib.suppress(ConfigError):
                load([f"--config={path}"])

        yield take


@contextlib.asynccontextmanager
async def _log_lines() -> AsyncIterator[Take]:
    async def take(data: bytes) -> None:
        for entry in parse_entries(data):
            assert entry.nanoseconds is not None
            assert entry.fixed_stamp
        last_lines(reversed(data.split(b"\n")), 3)

    yield take


@contextlib.asynccontextmanager
async def _kmsg_lines() -> AsyncIterator[Take]:
    async def take(data: bytes) -> None:
        state = OomState()
        for line in data.split(b"\0"):
            with contextlib.suppress(KmsgError):
                record = parse_record(line)
                state, kill = follow(state, record)
                assert kill is None or (record.from_kernel and kill.pid >= 0)

    yield take


@contextlib.asynccontextmanager
async def _requests() -> AsyncIterator[Take]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("logs", "manifests", "root"):
            (folder / each).mkdir()
        (folder / "logs" / "a.log").write_text("text\n")
        registry = CollectorRegistry()
        metrics = ServerMetrics(registry)
        runtime = Runtime()
        runtime.log = folder / "logs" / "a.log"
        deps = ApiServerDependencies(
            config=KubeletConfiguration(enable_system_log_query=True, enable_debug_flags_handler=False),
            gates=FeatureGates().with_overrides({"NodeLogQuery": True}),
            checks={},
            registry=registry,
            metrics=metrics,
            auth=AuthDependencies(node_name="n", review_client=None, serving_certificate=lambda: None),
            pods=PodDependencies(
                engine=ScriptedView([pod_of("web", "u1", node="")]),
                resolve_uid=str,
                runtime=runtime,
                root_dir=folder / "root",
                now=lambda: datetime.now(UTC),
            ),
            debug=DebugDependencies(
                configz=dict, flags=dict, started=datetime.now(UTC), node_logs=folder / "logs"
            ),
            manifests=ManifestDirectory(folder / "manifests", "n", clock=lambda: 0),
        )
        app = web.Application(middlewares=[counting_middleware(metrics, "readwrite")])
        app.add_routes(api_routes(deps))
        with listening_socket("fuzz", "127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            async with app_runner(app) as server, serve_connections(server, listener):
                yield lambda data: _ask(port, data, folder)


async def _ask(port: int, data: bytes, folder: Path) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_A_MOMENT):
                answer = await reader.read(65536)
        # Many a spoiled request has no end, which the server would wait for.
        writer.write_eof()
        async with asyncio.timeout(2):
            while chunk := await reader.read(65536):
                answer = (answer + chunk)[-65536:]
    except (TimeoutError, OSError):
        pass
    finally:
        writer.close()
    assert b"Internal Server Error\n" not in answer, answer[:300]
    assert b"Traceback" not in answer, answer[:300]
    assert {path.name for path in folder.iterdir()} == {"logs", "manifests", "root"}


def _request(method: str, path: str, *headers: str, body: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: n", "Connection: close", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


_POD = yaml.safe_dump(
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "b", "image": "c"}]},
    }
)
_UPGRADE = ("Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")

TARGETS = {
    "requests": Target(
        [
            _request("GET", "/pods"),
            _request("GET", "/healthz/ping?verbose=1"),
            _request(
                "GET", "/logs/a.log", "Range: bytes=0-2", "If-Modified-Since: Fri, 02 Jan 2026 12:00:00 GMT"
            ),
            _request("GET", "/logs/?query=a&tailLines=3&pattern=x&boot=-1&sinceTime=2026-01-02T03:04:05Z"),
            _request(
                "GET", "/containerLogs/default/web/main?follow=false&tailLines=3&sinceSeconds=4&limitBytes=5"
            ),
            _request(
                "POST", "/exec/default/web/main?command=ls&output=1&input=1", "X-Stream-Protocol-Version: v4"
            ),
            _request(
                "GET",
                "/exec/default/web/u1/main?command=ls&output=1",
                "Sec-WebSocket-Protocol: v5",
                *_UPGRADE,
            ),
            _request("POST", "/portForward/default/web?port=80,81", "Upgrade: SPDY/3.1"),
            _request("POST", "/run/default/web/main?cmd=ls"),
            _request("POST", "/checkpoint/default/web/main?timeout=3"),
            _request("PUT", "/manifests/a.yaml?replace=true", body=_POD),
            _request("DELETE", "/manifests/a.yaml"),
            _request("GET", "/metrics", "Accept: application/openmetrics-text; version=1.0.0"),
            _request("GET", "/flagz", "Accept: application/json;v=v1beta1;g=config.k8s.io;as=Flagz"),
            _request("GET", "/debug/pods/default/web"),
        ],
        _requests,
    ),
    "manifests": Target(
        [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.yaml"))]
        + [path.read_bytes() for path in sorted((ROOT / "tests/data/golden").glob("given-*.yaml"))],
        _manifests,
    ),
    "configuration": Target(
        [path.read_bytes() for path in sorted((ROOT / "tests/data").glob("kubelet-*.yaml"))]
        + [b"kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nmaxPods: 3\n"],
        _configuration,
    ),
    "paths": Target(PATHS, paths),
    "log lines": Target(
        [
            b"2026-01-02T03:04:05.123456789Z stdout F a line\n2026-01-02T03:04:05Z stderr P a piece\n",
            b"2026-01-02T03:04:05.1+01:00 stdout P:X a\n2026-01-02T03:04:06Z stdout F b\n\nnonsense\n",
        ],
        _log_lines,
    ),
    "kmsg lines": Target(
        [
            (ROOT / "tests/data/kmsg-oom-6.18.txt").read_bytes().replace(b"\n", b"\n\0"),
            b"4,1,2,c;Task in /a\0"
            b"4,2,3,+; killed as a result of limit of /b\0"
            b"3,3,4,-,caller=T1;Killed process 9, UID 48, (a) total-vm:1kB, anon-rss:1kB\n\0",
            b"4,1,2,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
            b"task_memcg=/a,task=b,pid=3,uid=4\n\0"
            b"3,2,3,-;Out of memory: Killed process 3 (b) total-vm:1kB\n SUBSYSTEM=x\n DEVICE=\\x5c\n\0",
            b"6,1,2,-;Tasks in /a are going to be killed due to memory.oom.group set\n\0",
        ],
        _kmsg_lines,
    ),
}
