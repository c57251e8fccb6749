"""The whole API of a node, served to people of all kinds: for tests that ask it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import unused_port
from prometheus_client import CollectorRegistry, Counter

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.podconfig.pod_history import TimelineEntry
from pykubelet.server.api import (
    ApiServerDependencies,
    AuthDependencies,
    DebugDependencies,
    PodDependencies,
    api_server,
)
from pykubelet.server.manifests import ManifestDirectory
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.transport.errors import from_status
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_server import serving
from tests.support.certs import NAMES, Authority, Pair
from tests.support.pod_view import ScriptedView, pod_of
from tests.support.server_clients import ADMIN_TOKEN, VIEWER_TOKEN, People, client_context
from tests.support.streaming_door import FakeRuntime

STAMP = "2026-01-02T03:04:0{}.123456789Z"


class Runtime(FakeRuntime):
    """Answers for one running container whose log a test writes."""

    log: Path
    checkpoint_error: Any = None

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        if container_id not in ("c1", "c0"):
            raise from_status("ContainerStatus", "NOT_FOUND", "gone")
        path = self.log if container_id == "c1" else self.log.with_name("0.log")
        return pb.ContainerStatusResponse(status=pb.ContainerStatus(id=container_id, log_path=str(path)))

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        assert filter is not None
        if filter.label_selector:
            return await super().list_containers(filter)
        labels = {
            "io.kubernetes.pod.uid": "u1",
            "io.kubernetes.pod.name": "web",
            "io.kubernetes.pod.namespace": "default",
            "io.kubernetes.container.name": "main",
        }
        return [pb.Container(id="c1", labels=labels, image=pb.ImageSpec(image="sha256:1"))]

    async def exec_sync(self, container_id: str, command: Any, timeout_seconds: int = 0) -> Any:
        self.asked.append(list(command))
        code = 3 if command[0] == "fail" else 0
        return pb.ExecSyncResponse(stdout=b"out", stderr=b"err", exit_code=code)

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        self.asked.append((container_id, timeout_seconds))
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        Path(location).write_text("checkpoint")


@dataclass
class Node:
    """The API of a node, and ways to ask it."""

    port: int
    deps: ApiServerDependencies
    authority: Authority
    runtime: Runtime
    view: ScriptedView
    people: People
    folder: Path
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def ask(
        self, path: str, client: str = "admin", method: str = "GET", **options: Any
    ) -> tuple[int, str, Any]:
        how = self.clients[client]
        headers = {"Authorization": f"Bearer {how['token']}"} if "token" in how else {}
        headers |= options.pop("headers", {})
        connector = aiohttp.TCPConnector(ssl=client_context(self.authority, how.get("pair")))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"https://localhost:{self.port}{path}"
            async with session.request(
                method, url, headers=headers, allow_redirects=False, **options
            ) as answer:
                return answer.status, await answer.text(), answer.headers

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        status, text, _ = await self.ask(path, **options)
        return status, text


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("api"), "cluster")


@pytest.fixture(scope="session")
def pairs(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    stranger = Authority(tmp_path_factory.mktemp("api"), "stranger")
    return {
        "server": authority.sign("/CN=node", NAMES),
        "admin": authority.sign("/CN=admin"),
        "nobody special": authority.sign("/CN=jane"),
        "bad certificate": stranger.sign("/CN=admin"),
    }


def running(container_id: str = "containerd://c1", **more: Any) -> dict[str, Any]:
    return {"name": "main", "containerID": container_id, "state": {"running": {}}} | more


def set_status(node: Node, status: dict[str, Any]) -> None:
    document = {"metadata": {"name": "web", "namespace": "default", "uid": "u1"}}
    spec = {"containers": [{"name": "main", "image": "i"}, {"name": "second", "image": "i"}]}
    node.view.listed = [
        from_document(Pod, document | {"spec": spec, "status": {"containerStatuses": [status]}})
    ]


Start = Callable[..., Any]


@pytest.fixture
async def start(authority: Authority, pairs: dict[str, Pair], tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(gates: dict[str, bool] | None = None, **settings: Any) -> Node:
            people = People()
            people.rules = {("token-viewer", "get", "pods"), ("token-viewer", "get", "metrics")}
            api = await stack.enter_async_context(serving(None))
            api.default = people.answer
            transport = Transport(RestConfig(api.url))
            stack.push_async_exit(transport)
            config = KubeletConfiguration(address="127.0.0.1", port=unused_port(), **settings)
            config.authentication.x509.client_ca_file = str(authority.certificate)
            registry = CollectorRegistry()
            runtime = Runtime()
            runtime.log = tmp_path / "pods" / "1.log"
            runtime.log.parent.mkdir()
            runtime.containers["u1/main"] = [pb.Container(id="c1", created_at=2)]
            view = ScriptedView([pod_of("web", "u1", node="")])
            view.notes = {"u1": [TimelineEntry(time=1, component="sync", text="began")]}
            (tmp_path / "logs").mkdir()
            deps = ApiServerDependencies(
                config=config,
                gates=FeatureGates().with_overrides(gates or {}),
                checks={"ping": lambda: None, "syncloop": lambda: None},
                registry=registry,
                metrics=ServerMetrics(registry),
                auth=AuthDependencies(
                    node_name="n1",
                    review_client=ApiClient(transport, TokenBucket(-1, 0), timeout=30),
                    serving_certificate=lambda: (pairs["server"].certificate, pairs["server"].key),
                ),
                pods=PodDependencies(
                    engine=view,
                    resolve_uid=str,
                    runtime=runtime,
                    root_dir=tmp_path / "root",
                    now=lambda: datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
                ),
                debug=DebugDependencies(
                    configz=lambda: {"kubeletconfig": {"kind": "KubeletConfiguration"}},
                    flags=lambda: {"v": "2", "config": "/etc/x"},
                    started=datetime(2026, 1, 1, tzinfo=UTC),
                    node_logs=tmp_path / "logs",
                ),
                manifests=ManifestDirectory(tmp_path / "manifests", "n1", clock=lambda: 0),
            )
            (tmp_path / "manifests").mkdir()
            Counter("prober_probe_total", "Probes.", registry=registry).inc()
            port = await stack.enter_async_context(api_server(deps))
            node = Node(port, deps, authority, runtime, view, people, tmp_path)
            set_status(node, running())
            node.clients = {
                "no credentials": {},
                "bad certificate": {"pair": pairs["bad certificate"]},
                "no permission": {"pair": pairs["nobody special"]},
                "token": {"token": VIEWER_TOKEN},
                "admin token": {"token": ADMIN_TOKEN},
                "admin": {"pair": pairs["admin"]},
            }
            return node

        yield begin


def write_log(node: Node, *lines: str) -> None:
    node.runtime.log.write_text("".join(f"{line}\n" for line in lines))


ENDPOINTS = [
    # method, path, status for admins, status for the token that may get pods and metrics
    ("GET", "/healthz", 200, 403),
    ("GET", "/healthz/ping", 200, 403),
    ("GET", "/healthz/nonsense", 404, 403),
    ("GET", "/pods", 200, 200),
    ("POST", "/pods", 405, 403),
    ("GET", "/runningpods/", 200, 200),
    ("GET", "/metrics", 200, 200),
    ("GET", "/metrics/probes", 200, 200),
    ("GET", "/metrics/nonsense", 404, 200),
    ("GET", "/configz", 200, 403),
    ("GET", "/containerLogs/default/web/main", 200, 403),
    ("GET", "/containerLogs/default/nope/main", 404, 403),
    ("POST", "/exec/default/web/main?output=1", 500, 403),
    ("GET", "/exec/default/web/main?output=1", 500, 403),
    ("POST", "/exec/default/web/u1/main?output=1", 500, 403),
    ("POST", "/attach/default/web/main?output=1", 500, 403),
    ("POST", "/portForward/default/web", 500, 403),
    ("POST", "/run/default/web/main?cmd=ls", 200, 403),
    ("GET", "/run/default/web/main?cmd=ls", 405, 403),
    ("POST", "/checkpoint/default/web/main", 200, 403),
    ("GET", "/checkpoint/default/web/main", 405, 403),
    ("GET", "/logs/", 200, 403),
    ("GET", "/logs/nope", 404, 403),
    ("GET", "/debug/pprof/", 200, 403),
    ("GET", "/debug/pprof/goroutine", 200, 403),
    ("GET", "/debug/pprof/block", 200, 403),
    ("GET", "/debug/pprof/cmdline", 200, 403),
    ("GET", "/debug/tasks", 200, 403),
    ("GET", "/debug/pods/default/web", 200, 403),
    ("GET", "/debug/flags/v", 406, 403),
    ("GET", "/flagz", 200, 403),
    ("GET", "/statusz", 200, 403),
    ("GET", "/manifests/", 200, 403),
    ("GET", "/manifests/nope", 404, 403),
    ("PUT", "/manifests/nope", 422, 403),
    ("DELETE", "/manifests/nope", 404, 403),
    ("POST", "/manifests/nope", 405, 403),
    ("GET", "/nonsense", 404, 403),
    ("GET", "/", 404, 403),
]
