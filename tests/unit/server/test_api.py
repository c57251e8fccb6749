"""Every endpoint of the API: who gets which status, what it says, and what its switches do."""

import asyncio
import json
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import load_pem_x509_certificate
from prometheus_client import CollectorRegistry

from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.server.api import (
    ApiServerDependencies,
    DebugDependencies,
    PodDependencies,
    api_routes,
    api_server,
)
from pykubelet.server.auth.request_auth import AuthConfigError
from pykubelet.server.contention import SAMPLE_SECONDS
from pykubelet.server.listeners import PortError
from pykubelet.server.manifests import ManifestDirectory
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.transport.errors import from_status
from tests.support import api_node
from tests.support.api_node import ENDPOINTS, STAMP, Start, write_log
from tests.support.certs import Authority, Pair
from tests.support.server_clients import ADMIN_TOKEN, client_context

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start


async def test_api_endpoints_each_client_returns_expected_status(start: Start) -> None:
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


def test_api_endpoints_table_covers_all_routes(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    absent: Any = None
    deps = ApiServerDependencies(
        config=KubeletConfiguration(),
        gates=FeatureGates(),
        checks={},
        registry=registry,
        metrics=ServerMetrics(registry),
        auth=absent,
        pods=PodDependencies(engine=absent, resolve_uid=str, runtime=absent, root_dir=tmp_path, now=absent),
        debug=DebugDependencies(configz=dict, flags=dict, started=datetime.now(UTC), node_logs=tmp_path),
        manifests=ManifestDirectory(tmp_path, "n1", clock=lambda: 0),
    )
    roots = {str(getattr(route, "path", "")).split("/")[1] for route in api_routes(deps)}
    assert roots == {path.split("/")[1].partition("?")[0] for _, path, _, _ in ENDPOINTS} - {"nonsense", ""}


async def test_api_endpoints_return_expected_content(start: Start) -> None:
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


async def test_api_invalid_utf8_header_or_path_returns_status(start: Start) -> None:
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
async def test_metrics_endpoint_any_openmetrics_version_returns_text(start: Start, version: str) -> None:
    node = await start()
    accept = {"Accept": f"application/openmetrics-text; version={version}"}
    status, text = await node.get("/metrics", headers=accept)
    assert status == 200
    assert "kubelet_http_requests_total" in text
    assert "_created" not in text


async def test_pprof_profile_concurrent_request_returns_429(start: Start) -> None:
    node = await start()
    assert (await node.get("/debug/pprof/profile?seconds=0"))[0] == 400
    assert (await node.get("/debug/pprof/profile?seconds=x"))[0] == 400
    first, second = await asyncio.gather(
        node.get("/debug/pprof/profile?seconds=1"), node.get("/debug/pprof/profile?seconds=1")
    )
    assert sorted((first[0], second[0])) == [200, 429]
    assert "function calls" in first[1] + second[1]


@pytest.mark.parametrize("is_enabled", [False, True])
async def test_pprof_block_waits_only_with_contention_profiling(start: Start, is_enabled: bool) -> None:
    node = await start(enable_contention_profiling=is_enabled)
    held = asyncio.Lock()
    async with held:
        waiter = asyncio.ensure_future(held.acquire())
        await asyncio.sleep(2.5 * SAMPLE_SECONDS)
        status, text = await node.get("/debug/pprof/block")
    await waiter
    assert (status, text.splitlines()[:2]) == (200, ["--- contention:", "cycles/second=1000000000"])
    assert ("Lock.acquire" in text) == is_enabled


async def test_api_handshake_names_client_cas(start: Start, authority: Authority) -> None:
    node = await start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.maximum_version = False, ssl.TLSVersion.TLSv1_2
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(hello.read())
    name = load_pem_x509_certificate(authority.certificate.read_bytes()).subject.public_bytes()
    received = b""
    async with asyncio.timeout(10):
        # The first one is the issuer of the server's own certificate.
        while received.count(name) < 2:
            received += await reader.read(65536)
    writer.close()


async def test_run_endpoint_returns_output_or_error(start: Start) -> None:
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


async def test_checkpoint_endpoint_returns_location_or_error(start: Start) -> None:
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


async def test_debug_flags_v_put_sets_verbosity(start: Start) -> None:
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
async def test_api_disabled_handlers_return_405_or_404(
    start: Start, settings: dict[str, Any], path: str, method: str, expected: tuple[int, str]
) -> None:
    node = await start(**settings)
    assert await node.get(path, method=method) == expected


async def test_api_server_port_taken_or_bad_ciphers_raises(start: Start, pairs: dict[str, Pair]) -> None:
    node = await start()
    with pytest.raises(PortError, match="the port is taken"):
        async with api_server(node.deps):
            pytest.fail("must not serve")
    node.deps.config.tls_cipher_suites = ["TLS_RSA_WITH_RC4_128_SHA"]
    with pytest.raises(AuthConfigError, match="tlsCipherSuites"):
        async with api_server(node.deps):
            pytest.fail("must not serve")
