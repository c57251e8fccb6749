"""The read-only port, standalone and in a cluster: which hosts it answers to, and which values it shows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.live_config import ConfigReloader
from pykubelet.agent.servers import ServerDependencies, serving
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.load import load
from pykubelet.config.types import KubeletConfiguration
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.podconfig.event_log import EventLog
from pykubelet.server.metrics.stats_metrics import MAX_SCRAPES
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.stats.machine import machine_info
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope
from tests.support.pod_view import ScriptedView, pod_of
from tests.support.stats_records import node_records
from tests.unit.server.test_stats_metrics import Samples

PROBE = {"httpGet": {"port": 80, "httpHeaders": [{"name": "Authorization", "value": "s3cr3t-probe"}]}}
CONTAINER: dict[str, Any] = {
    "name": "main",
    "image": "busybox",
    "env": [
        {"name": "PASSWORD", "value": "s3cr3t-env"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "startupProbe": PROBE,
    "lifecycle": {"postStart": PROBE, "preStop": PROBE},
}
POD = pod_of(
    "web",
    "u1",
    metadata={
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "s3cr3t-applied", "a": "b"}
    },
    spec={
        "containers": [CONTAINER],
        "initContainers": [CONTAINER | {"name": "init"}],
        "ephemeralContainers": [CONTAINER | {"name": "debug"}],
    },
)


class NotServed:
    """A cluster that serves no API."""

    def review_client(self) -> None:
        return None


@asynccontextmanager
async def read_only_port(
    tmp_path: Path,
    port: int,
    *,
    cluster: bool,
    monkeypatch: pytest.MonkeyPatch,
    source: Samples | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve one pod on the read-only port of a node called node1."""
    monkeypatch.setattr("pykubelet.agent.servers._may_have_clients", lambda _: False)
    config = KubeletConfiguration(
        address="127.0.0.1", read_only_port=port, healthz_port=0, enable_server=True, static_pod_path=""
    )
    settings = AgentSettings(
        KubeletFlags(root_dir=str(tmp_path)), config, FeatureGates({}), "node1.example.com"
    )
    tasks = TaskScope()
    statistics: Any = source or Samples([])
    statistics.machine_info = partial(machine_info, Filesystems(tmp_path, tasks))
    statistics.collector = SimpleNamespace(memory_curves=None)
    statistics.runtime = SimpleNamespace(has_metrics=False)
    parts = ServerDependencies(
        settings=settings,
        ips=["127.0.0.1"],
        flag_values={},
        started=datetime.now(UTC),
        registry=CollectorRegistry(),
        cri=cast(Any, None),
        engine=cast(Any, ScriptedView(listed=[POD])),
        cluster=cast(Any, NotServed()) if cluster else None,
        checks={},
        runtime_checks={},
        statistics=statistics,
        eviction=cast(Any, SimpleNamespace(report=None)),
        reloader=ConfigReloader(load([]), config),
        events=EventLog(),
        log_readers=LogReaders(),
        images=cast(Any, SimpleNamespace(pulls=list)),
        image_gc=cast(Any, None),
    )
    async with tasks, serving(parts), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session


HOSTS = [
    "evil.example",
    "evil.example:10255",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[evil]",
    "::g",
]


@pytest.mark.parametrize("path", ["/pods", "/metrics", "/healthz", "/spec/", "/nothing"])
async def test_read_only_port_standalone_foreign_host_forbidden(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Verify that a web page that resolves its own name to 127.0.0.1 (DNS rebinding) reads nothing."""
    async with read_only_port(tmp_path, unused_tcp_port, cluster=False, monkeypatch=monkeypatch) as session:
        for host in HOSTS:
            async with session.get(path, headers={"Host": host}) as response:
                assert response.status == 403, host
                assert "Host" in await response.text()


async def test_read_only_port_standalone_own_hosts_accepted(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [
        "127.0.0.1",
        "192.0.2.7:10255",
        "[::1]",
        "[::1]:10255",
        "localhost",
        "LOCALHOST:10255",
        "localhost.",
    ]
    own += ["node1.example.com", "Node1.Example.com.:10255", socket.gethostname()]
    async with read_only_port(tmp_path, unused_tcp_port, cluster=False, monkeypatch=monkeypatch) as session:
        for host in own:
            async with session.get("/pods", headers={"Host": host}) as response:
                assert response.status == 200, host


async def test_read_only_port_standalone_pods_without_values(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with read_only_port(tmp_path, unused_tcp_port, cluster=False, monkeypatch=monkeypatch) as session:
        async with session.get("/pods") as response:
            text = await response.text()
            (pod,) = (await response.json())["items"]
    assert "s3cr3t" not in text
    assert pod["metadata"]["annotations"] == {"a": "b"}
    for kind, name in (("containers", "main"), ("initContainers", "init"), ("ephemeralContainers", "debug")):
        (container,) = pod["spec"][kind]
        assert container["name"] == name
        assert container["env"] == [{"name": "PASSWORD"}, CONTAINER["env"][1]]
        assert container["livenessProbe"]["httpGet"]["httpHeaders"] == [{"name": "Authorization"}]
    assert POD.spec.containers[0].env[0].value == "s3cr3t-env", "the engine's own pod changed"


async def test_read_only_port_cluster_as_upstream(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with read_only_port(tmp_path, unused_tcp_port, cluster=True, monkeypatch=monkeypatch) as session:
        async with session.get("/pods", headers={"Host": "alias.of.node.example:10255"}) as response:
            assert response.status == 200
            (pod,) = (await response.json())["items"]
    assert pod["spec"]["containers"][0]["env"] == CONTAINER["env"]


async def test_read_only_port_scrapes_at_limit_other_servers_are_scraped(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Samples(node_records(1))
    source.ready.clear()
    path, control = "/metrics/cadvisor", aiohttp.UnixConnector(str(tmp_path / SOCKET_NAME))
    async with (
        read_only_port(
            tmp_path, unused_tcp_port, cluster=True, monkeypatch=monkeypatch, source=source
        ) as session,
        aiohttp.ClientSession("http://localhost", connector=control) as by_root,
    ):

        async def status_of(client: aiohttp.ClientSession) -> int:
            async with client.get(path) as response:
                await response.read()
                return response.status

        scrapes = [asyncio.create_task(status_of(session)) for _ in range(MAX_SCRAPES)]
        async with asyncio.timeout(30):
            while len(source.prepared) < MAX_SCRAPES:
                await asyncio.sleep(0.01)
        assert await status_of(session) == 503
        # The control socket has the routes of the API.
        other = asyncio.create_task(status_of(by_root))
        async with asyncio.timeout(30):
            while len(source.prepared) == MAX_SCRAPES and not other.done():
                await asyncio.sleep(0.01)
        source.ready.set()
        assert await other == 200
        assert await asyncio.gather(*scrapes) == [200] * MAX_SCRAPES
