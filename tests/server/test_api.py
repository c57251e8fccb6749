"""Every endpoint of the API: who gets which status, what it says, and what its switches do."""

import asyncio
import json
import os
import time
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
from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.errors import from_status
from pykubelet.kube.access import Access
from pykubelet.kube.client import ApiClient
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.transport import Transport
from pykubelet.pods.journal import Note
from pykubelet.server.access import AccessProblem
from pykubelet.server.api import ApiParts, api_routes, api_server
from pykubelet.server.manifests import ManifestFolder
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.node_logs import open_below
from pykubelet.server.sockets import PortError
from tests.kube.certs import NAMES, Authority, Pair
from tests.kube.servers import serving
from tests.server.people import ADMIN_TOKEN, VIEWER_TOKEN, People, client_context
from tests.server.test_streaming import FakeRuntime
from tests.server.view import ScriptedView, pod_of

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
    parts: ApiParts
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
            transport = Transport(Access(api.url))
            stack.push_async_exit(transport)
            config = KubeletConfiguration(address="127.0.0.1", port=unused_port(), **settings)
            config.authentication.x509.client_ca_file = str(authority.certificate)
            registry = CollectorRegistry()
            runtime = Runtime()
            runtime.log = tmp_path / "pods" / "1.log"
            runtime.log.parent.mkdir()
            runtime.containers["u1/main"] = [pb.Container(id="c1", created_at=2)]
            view = ScriptedView([pod_of("web", "u1", node="")])
            view.notes = {"u1": [Note(time=1, station="sync", text="began")]}
            (tmp_path / "logs").mkdir()
            parts = ApiParts(
                config=config,
                gates=FeatureGates().with_overrides(gates or {}),
                node_name="n1",
                root_dir=tmp_path / "root",
                view=view,
                resolve=str,
                runtime=runtime,
                checks={"ping": lambda: None, "syncloop": lambda: None},
                configz={"kubeletconfig": {"kind": "KubeletConfiguration"}},
                flags=lambda: {"v": "2", "config": "/etc/x"},
                registry=registry,
                metrics=ServerMetrics(registry),
                client=ApiClient(transport, TokenBucket(-1, 0), timeout=5),
                certificate=lambda: (pairs["server"].certificate, pairs["server"].key),
                started=datetime(2026, 1, 1, tzinfo=UTC),
                now=lambda: datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
                node_logs=tmp_path / "logs",
                manifests=ManifestFolder(tmp_path / "manifests", "n1", clock=lambda: 0),
            )
            (tmp_path / "manifests").mkdir()
            Counter("prober_probe_total", "Probes.", registry=registry).inc()
            port = await stack.enter_async_context(api_server(parts))
            node = Node(port, parts, authority, runtime, view, people, tmp_path)
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


async def test_every_endpoint_for_everybody(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(5)} stdout F hello")
    wrong = []
    for method, path, admin, token in ENDPOINTS:
        expected = {
            "no credentials": 401,
            "bad certificate": 401,
            "no permission": 403,
            "token": 404 if (token, admin) == (200, 404) else token,
            "admin token": admin,
            "admin": admin,
        }
        for client, status in expected.items():
            got, text, _ = await node.ask(path, client, method)
            if got != status:
                wrong.append((method, path, client, status, got, text[:200]))
            if status in (401, 403):
                assert text.startswith(("Unauthorized", "Forbidden (user="))
    assert wrong == []


def test_the_table_above_is_complete(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    parts: Any = type("Parts", (), {})()
    for name in ApiParts.__dataclass_fields__:
        setattr(parts, name, None)
    parts.config, parts.gates = KubeletConfiguration(), FeatureGates()
    parts.checks, parts.root_dir, parts.registry = {}, tmp_path, registry
    parts.manifests = ManifestFolder(tmp_path, "n1", clock=lambda: 0)
    parts.metrics, parts.started, parts.node_logs = ServerMetrics(registry), datetime.now(UTC), tmp_path
    roots = {str(getattr(route, "path", "")).split("/")[1] for route in api_routes(parts)}
    assert roots == {path.split("/")[1].partition("?")[0] for _, path, _, _ in ENDPOINTS} - {"nonsense", ""}


async def test_what_the_pages_say(start: Start) -> None:
    node = await start()
    assert json.loads((await node.get("/pods"))[1])["items"][0]["metadata"]["name"] == "web"
    running_pods = json.loads((await node.get("/runningpods/"))[1])
    assert running_pods["kind"] == "PodList"
    assert running_pods["items"][0]["spec"]["containers"] == [
        {"name": "main", "image": "sha256:1", "resources": {}}
    ]
    assert json.loads((await node.get("/configz"))[1]) == {"kubeletconfig": {"kind": "KubeletConfiguration"}}
    _, metrics = await node.get("/metrics")
    assert "kubelet_http_requests_total{" in metrics
    assert "prober_probe_total" not in metrics
    _, probes = await node.get("/metrics/probes")
    assert "prober_probe_total 1\n" in probes
    assert "kubelet_http" not in probes
    assert "\nkubelet flagz\nWarning" in (await node.get("/flagz"))[1]
    assert "config=/etc/x\nv=2\n" in (await node.get("/flagz"))[1]
    accept = {"Accept": "application/json;v=v1beta1;g=config.k8s.io;as=Flagz"}
    flags = json.loads((await node.get("/flagz", headers=accept))[1])
    assert (flags["kind"], flags["apiVersion"]) == ("Flagz", "config.k8s.io/v1beta1")
    assert flags["flags"] == {"v": "2", "config": "/etc/x"}
    assert (await node.get("/flagz", headers={"Accept": "application/json"}))[0] == 406
    accept = {"Accept": "application/json;v=v1beta1;g=config.k8s.io;as=Statusz"}
    status = json.loads((await node.get("/statusz", headers=accept))[1])
    assert status["startTime"] == "2026-01-01T00:00:00Z"
    assert "/pods" in status["paths"]
    assert "began" in (await node.get("/debug/pods/default/web"))[1]
    assert (await node.get("/debug/pods/default/nope"))[0] == 404
    assert "accept\n" in (await node.get("/debug/tasks"))[1]


async def test_words_that_are_no_text(start: Start) -> None:
    node = await start()
    request = (
        "GET {} HTTP/1.1\r\nHost: x\r\nAccept: application/j\udcc0\udcaf;as=Flagz\r\nConnection: close\r\n"
    )
    for path, status in (
        ("/flagz", b"406"),
        ("/pods", b"200"),
        ("/containerLogs/default/%F0%9F/main", b"400"),
    ):
        token = f"Authorization: Bearer {ADMIN_TOKEN}\r\n\r\n"
        text = (request.format(path) + token).encode("utf-8", "surrogateescape")
        reader, writer = await asyncio.open_connection(
            "localhost", node.port, ssl=client_context(node.authority)
        )
        try:
            writer.write(text)
            async with asyncio.timeout(30):
                assert (await reader.readline()).split()[1] == status
        finally:
            writer.close()


@pytest.mark.parametrize("version", ["x", "1.x.0", "", "9" * 5000, "1.0.0", "0.0.4"])
async def test_metrics_in_any_version(start: Start, version: str) -> None:
    node = await start()
    accept = {"Accept": f"application/openmetrics-text; version={version}"}
    status, text = await node.get("/metrics", headers=accept)
    assert status == 200
    assert "kubelet_http_requests_total" in text
    assert "_created" not in text


async def test_profiles(start: Start) -> None:
    node = await start()
    assert (await node.get("/debug/pprof/profile?seconds=0"))[0] == 400
    assert (await node.get("/debug/pprof/profile?seconds=x"))[0] == 400
    first, second = await asyncio.gather(
        node.get("/debug/pprof/profile?seconds=1"), node.get("/debug/pprof/profile?seconds=1")
    )
    assert sorted((first[0], second[0])) == [200, 429]
    assert "function calls" in first[1] + second[1]


async def test_run(start: Start) -> None:
    node = await start()
    assert await node.get("/run/default/web/main?cmd=ls%20-l", method="POST") == (200, "outerr")
    assert node.runtime.asked == [["ls", "-l"]]
    assert await node.get("/run/default/web/main?cmd=fail", method="POST") == (
        500,
        "command 'fail' exited with 3: err",
    )
    assert await node.get("/run/default/web/nope?cmd=x", method="POST") == (
        500,
        'container not found ("nope")',
    )
    assert await node.get("/run/default/nope/main?cmd=x", method="POST") == (404, "pod does not exist")
    assert (await node.get("/run/default/web/u9/main?cmd=x", method="POST"))[0] == 500


async def test_checkpoints(start: Start) -> None:
    node = await start()
    status, text = await node.get("/checkpoint/default/web/main?timeout=1&timeout=7", method="POST")
    assert status == 200
    [location] = json.loads(text)["items"]
    assert Path(location).read_text() == "checkpoint"
    assert Path(location).name.startswith("checkpoint-web_default-main-2026-02-0")
    assert node.runtime.asked == [("c1", 7)]
    for path, expected in [
        ("/checkpoint/default/web/main?timeout=x", (404, "cannot parse value of timeout parameter")),
        ("/checkpoint/default/nope/main", (404, "pod does not exist")),
        ("/checkpoint/default/web/nope", (404, "container nope does not exist")),
        (
            "/checkpoint/default/web/second",
            (500, "checkpointing of default/web/second failed (container second not found)"),
        ),
    ]:
        assert await node.get(path, method="POST") == expected
    node.runtime.checkpoint_error = from_status("CheckpointContainer", "UNIMPLEMENTED", "no criu")
    assert await node.get("/checkpoint/default/web/main", method="POST") == (
        500,
        "checkpointing of default/web/main failed (rpc error: code = Unimplemented desc = no criu)",
    )


async def test_verbosity(start: Start) -> None:
    node = await start()
    assert await node.get("/debug/flags/v", method="PUT", data="x") == (
        400,
        'failed set klog.logging.verbosity x: "x" is no number\n',
    )
    assert await node.get("/debug/flags/v", method="PUT", data="0") == (
        200,
        "successfully set klog.logging.verbosity to 0\n",
    )


@pytest.mark.parametrize(
    ("settings", "path", "method", "expected"),
    [
        (
            {"enable_debugging_handlers": False},
            "/exec/a/b/c",
            "POST",
            (405, "Debug endpoints are disabled.\n"),
        ),
        (
            {"enable_debugging_handlers": False},
            "/run/a/b/c",
            "POST",
            (405, "Debug endpoints are disabled.\n"),
        ),
        ({"enable_debugging_handlers": False}, "/logs/", "GET", (405, "Debug endpoints are disabled.\n")),
        (
            {"enable_debugging_handlers": False},
            "/containerLogs/a/b/c",
            "GET",
            (405, "Debug endpoints are disabled.\n"),
        ),
        (
            {"enable_debugging_handlers": False},
            "/debug/pprof/",
            "GET",
            (405, "Debug endpoints are disabled.\n"),
        ),
        ({"enable_debugging_handlers": False}, "/configz", "GET", (404, "404: Page Not Found")),
        ({"enable_debugging_handlers": False}, "/checkpoint/a/b/c", "POST", (404, "404: Page Not Found")),
        ({"enable_debugging_handlers": False}, "/healthz", "GET", (200, "ok")),
        ({"enable_system_log_handler": False}, "/logs/x", "GET", (405, "logs endpoint is disabled.\n")),
        (
            {"enable_profiling_handler": False},
            "/debug/pprof/x",
            "GET",
            (405, "profiling endpoint is disabled.\n"),
        ),
        (
            {"enable_debug_flags_handler": False},
            "/debug/flags/v",
            "PUT",
            (405, "flags endpoint is disabled.\n"),
        ),
        (
            {"gates": {"ContainerCheckpoint": False}},
            "/checkpoint/a/b/c",
            "POST",
            (404, "404: Page Not Found"),
        ),
        ({"gates": {"ComponentFlagz": False}}, "/flagz", "GET", (404, "404: Page Not Found")),
        ({"gates": {"ComponentStatusz": False}}, "/statusz", "GET", (404, "404: Page Not Found")),
    ],
)
async def test_switches(
    start: Start, settings: dict[str, Any], path: str, method: str, expected: tuple[int, str]
) -> None:
    node = await start(**settings)
    assert await node.get(path, method=method) == expected


async def test_starting_says_what_is_wrong(start: Start, pairs: dict[str, Pair]) -> None:
    node = await start()
    with pytest.raises(PortError, match="the port is taken"):
        async with api_server(node.parts):
            pytest.fail("must not serve")
    node.parts.config.tls_cipher_suites = ["TLS_RSA_WITH_RC4_128_SHA"]
    with pytest.raises(AccessProblem, match="tlsCipherSuites"):
        async with api_server(node.parts):
            pytest.fail("must not serve")


# Containers' logs.


async def test_log_options(start: Start) -> None:
    node = await start()
    lines = [f"{STAMP.format(n)} {'stderr' if n % 2 else 'stdout'} F line {n}" for n in range(6)]
    write_log(node, *lines)
    stamped = [f"{STAMP.format(n)} line {n}\n" for n in range(6)]
    plain = [f"line {n}\n" for n in range(6)]
    url = "/containerLogs/default/web/main"
    for query, expected in [
        ("", plain),
        ("?timestamps=true", stamped),
        ("?timestamps=false", plain),
        ("?tailLines=2", plain[4:]),
        ("?tail=1", plain[5:]),
        ("?tail=all", plain),
        ("?tailLines=0", []),
        ("?tailLines=100", plain),
        ("?limitBytes=9", ["line 0\nli"]),
        ("?limitBytes=14", plain[:2]),
        ("?sinceTime=2026-01-02T03:04:04Z", plain[4:]),
        ("?sinceTime=2026-01-02T05:04:03.2%2B02:00", plain[4:]),
        ("?sinceSeconds=5", []),
        ("?sinceSeconds=999999999", plain),
        ("?tailLines=3&timestamps=1", stamped[3:]),
        ("?stream=All", plain),
    ]:
        assert await node.get(url + query) == (200, "".join(expected)), query
    decode, invalid = '{"message": "Unable to decode query."}', '{"message": "Invalid request."}'
    for query, refusal in [
        ("?tailLines=x", (400, decode)),
        ("?limitBytes=", (400, decode)),
        ("?sinceTime=yesterday", (400, decode)),
        ("?sinceTime=2026-99-02T03:04:04Z", (400, decode)),
        ("?tailLines=99999999999999999999", (400, decode)),
        ("?tailLines=-1", (422, invalid)),
        ("?limitBytes=0", (422, invalid)),
        ("?sinceSeconds=0", (422, invalid)),
        ("?sinceSeconds=1&sinceTime=2026-01-02T03:04:04Z", (422, invalid)),
        ("?stream=Both", (422, invalid)),
        ("?stream=Stdout&tailLines=1", (422, invalid)),
        (
            "?stream=Stdout",
            (
                400,
                'unable to return the given log stream: "Stdout". '
                "Please enable PodLogsQuerySplitStreams feature gate in kubelet",
            ),
        ),
    ]:
        assert await node.get(url + query) == refusal, query
    assert await node.get("/containerLogs/default/web/nope") == (
        404,
        'container "nope" not found in pod "web"',
    )


async def test_streams_of_a_log(start: Start) -> None:
    node = await start(gates={"PodLogsQuerySplitStreams": True})
    write_log(
        node,
        f"{STAMP.format(1)} stdout P be",
        f"{STAMP.format(1)} stderr F bad",
        f"{STAMP.format(2)} stdout F gin",
        "damaged",
        f"{STAMP.format(3)} stdout F end",
    )
    url = "/containerLogs/default/web/main"
    assert await node.get(f"{url}?stream=Stdout") == (200, "begin\nend\n")
    assert await node.get(f"{url}?stream=Stderr") == (200, "bad\n")
    assert await node.get(url) == (200, "bebad\ngin\nend\n")


@pytest.mark.parametrize(
    ("status", "query", "expected"),
    [
        (running(), "", (200, "now\n")),
        (
            {"name": "main", "state": {"terminated": {"exitCode": 0, "containerID": "containerd://c1"}}},
            "",
            (200, "now\n"),
        ),
        (
            running(lastState={"terminated": {"exitCode": 1, "containerID": "containerd://c0"}}),
            "?previous=1",
            (200, "before\n"),
        ),
        (
            {
                "name": "main",
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "containerID": "containerd://c0"}},
            },
            "",
            (200, "before\n"),
        ),
        (running(), "?previous=1", (400, 'previous terminated container "main" in pod "web" not found')),
        ({"name": "other"}, "", (400, 'container "main" in pod "web" is not available')),
        (
            {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            "",
            (400, 'container "main" in pod "web" is waiting to start: trying and failing to pull image'),
        ),
        (
            {"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}},
            "",
            (400, 'container "main" in pod "web" is waiting to start: ContainerCreating'),
        ),
        (
            {"name": "main", "state": {"terminated": {"exitCode": 0}}},
            "",
            (400, 'container "main" in pod "web" is terminated'),
        ),
        ({"name": "main"}, "", (400, 'container "main" in pod "web" is waiting to start - no logs yet')),
        (running("containerd://lost"), "", (400, "unable to retrieve container logs for containerd://lost")),
    ],
)
async def test_which_run_is_meant(
    start: Start, status: dict[str, Any], query: str, expected: tuple[int, str]
) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F now")
    node.runtime.log.with_name("0.log").write_text(f"{STAMP.format(1)} stdout F before\n")
    set_status(node, status)
    assert await node.get(f"/containerLogs/default/web/main{query}") == expected


async def test_a_log_that_is_gone(start: Start) -> None:
    node = await start()
    status, text = await node.get("/containerLogs/default/web/main")
    assert status == 400
    assert text.endswith("No such file or directory")


async def test_following_a_log_to_its_end(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F one", f"{STAMP.format(1)} stdout F two")
    connector = aiohttp.TCPConnector(ssl=client_context(node.authority, node.clients["admin"]["pair"]))
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(60):
        url = f"https://localhost:{node.port}/containerLogs/default/web/main?follow=true&tailLines=1"
        async with session.get(url) as answer:
            assert await answer.content.readline() == b"two\n"
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(2)} stdout P thr")
                log.flush()
                log.write(f"\n{STAMP.format(2)} stdout F ee\n")
            assert await answer.content.readline() == b"three\n"
            # Rotated: the old file gets its last line, then there is a new one.
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(3)} stdout F four\n")
            node.runtime.log.rename(node.runtime.log.with_name("1.log.old"))
            write_log(node, f"{STAMP.format(4)} stdout F five")
            assert await answer.content.readline() == b"four\n"
            assert await answer.content.readline() == b"five\n"
            set_status(node, {"name": "main", "state": {"terminated": {"exitCode": 0}}})
            with node.runtime.log.open("a") as log:
                log.write(f"{STAMP.format(5)} stdout F unfinished")
            assert await answer.content.read() == b"unfinished\n"


async def test_a_long_log_costs_no_memory_before_a_client_that_does_not_read(start: Start) -> None:
    node = await start()
    line = f"{STAMP.format(1)} stdout F {'x' * 200}\n".encode()
    with node.runtime.log.open("wb") as log:
        for _ in range(100):
            log.write(line * 3000)
    size = node.runtime.log.stat().st_size
    before = _resident()
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"]), limit=2**16
    )
    try:
        writer.write(b"GET /containerLogs/default/web/main?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b" 200 OK" in head
        await asyncio.sleep(1)
        assert _resident() - before < size / 3
    finally:
        writer.transport.abort()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_client_that_hangs_up_is_not_followed_for(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(1)} stdout F one")

    def watches() -> int:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(str(link) == "anon_inode:inotify" for link in links)

    before = watches()
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"])
    )
    writer.write(b"GET /containerLogs/default/web/main?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"one\n"), 30)
    writer.transport.abort()
    deadline = time.monotonic() + 30
    while watches() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert watches() == before


# The machine's logs.


async def test_files_of_the_machine(start: Start) -> None:
    node = await start()
    logs = node.parts.node_logs
    (logs / "pods").mkdir()
    (logs / "pods" / "a b.log").write_text("inside")
    (logs / "link.log").symlink_to("pods/a b.log")
    (logs / "absolute.log").symlink_to(logs / "pods" / "a b.log")
    (logs / "<odd>.log").write_text("")
    secret = node.folder / "secret"
    secret.write_text("secret")
    (logs / "escape.log").symlink_to(secret)
    (logs / "up").symlink_to("..")
    (logs / "pods" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(logs / "pipe")
    for path, expected in [
        ("/logs/pods/a%20b.log", (200, "inside")),
        ("/logs/link.log", (200, "inside")),
        ("/logs/absolute.log", (200, "inside")),
        ("/logs/escape.log", (403, "403 Forbidden\n")),
        ("/logs/up/secret", (403, "403 Forbidden\n")),
        ("/logs/pods/passwd", (403, "403 Forbidden\n")),
        ("/logs/pipe", (403, "403 Forbidden\n")),
        ("/logs/nope", (404, "404 page not found\n")),
        ("/logs/link.log/x", (404, "404 page not found\n")),
    ]:
        assert await node.get(path) == expected, path
    _, listing, headers = await node.ask("/logs/")
    assert '<a href="pods/">pods/</a>\n' in listing
    assert "&lt;odd&gt;.log" in listing
    assert headers["Content-Type"].startswith("text/html")
    status, _, headers = await node.ask("/logs/pods")
    assert (status, headers["Location"]) == (301, "pods/")


def test_links_that_appear_while_a_path_is_opened_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "logs", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    for folder in (root / "sub", outside):
        (folder / "file").write_text(str(folder))
    real = os.path.realpath

    def swap(path: Any, *, strict: bool = False) -> str:
        found = str(real(path, strict=strict))
        if found.endswith("sub/file"):
            (root / "sub").rename(root / "old")
            (root / "sub").symlink_to(outside)
        return found

    monkeypatch.setattr("pykubelet.server.node_logs.os.path.realpath", swap)
    with pytest.raises(OSError):
        open_below(root, "sub/file")
