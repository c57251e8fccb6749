"""A real standalone node that gets its pods over HTTPS, and what its read-only port tells everybody."""

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certs import Authority, Pair
from tests.support.data_dir import short_dir
from tests.support.manifests import pod
from tests.support.node import Node, kubelet_node, running
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime, runtime_process

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def runtime() -> Iterator[RunningRuntime]:
    with short_dir() as path, runtime_process(path) as started:
        yield started


class Api:
    """The secured API of a node."""

    def __init__(self, port: int, pair: Pair | None) -> None:
        self._port = port
        self._context = ssl._create_unverified_context()
        if pair is not None:
            self._context.load_cert_chain(pair.certificate, pair.key)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()


def test_manifests_over_https_pod_started_and_removed(runtime: RunningRuntime, tmp_path: Path) -> None:
    authority, port = Authority(tmp_path, "people"), free_port()
    ways = {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": False},
        "x509": {"clientCAFile": str(authority.certificate)},
    }
    with running(kubelet_node(runtime, port=port, authentication=ways)) as node:
        stranger, admin = Api(port, None), Api(port, authority.sign("/CN=somebody"))
        assert stranger.ask("PUT", "/manifests/web.json", pod("web")) == (401, "Unauthorized")
        assert list(node.manifests.iterdir()) == []
        status, refusal = admin.ask("PUT", "/manifests/web.json", pod("web", restartPolicy="Sometimes"))
        assert status == 422
        assert "restartPolicy" in refusal["message"]
        status, taken = admin.ask("PUT", "/manifests/web.json", pod("web"))
        assert status == 201
        started = node.wait_ready("web-n1")
        assert [one["uid"] for one in taken["pods"]] == [started["metadata"]["uid"]]
        _check_spec(node)
        _check_open_ports(node)
        assert admin.ask("DELETE", "/manifests/web.json")[0] == 200
        node.wait_gone("web-n1", started["metadata"]["uid"])


def _check_spec(node: Node) -> None:
    spec = node.get("/spec/")
    assert spec["num_cores"] >= spec["num_physical_cores"] >= spec["num_sockets"] >= 1
    assert spec["memory_capacity"] > 2**28
    assert spec["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _check_open_ports(node: Node) -> None:
    """Whoever says nothing of themselves reads some pages, and does nothing."""
    for port in (node._read_only, node._healthz):
        for method, path in (
            ("POST", "/checkpoint/default/web-n1/main"),
            ("POST", "/exec/default/web-n1/main?command=true&output=1"),
            ("GET", "/exec/default/web-n1/main?command=true&output=1"),
            ("POST", "/run/default/web-n1/main?cmd=true"),
            ("POST", "/portForward/default/web-n1"),
            ("GET", "/containerLogs/default/web-n1/main"),
            ("GET", "/debug/pprof/"),
            ("GET", "/configz"),
            ("GET", "/logs/"),
            ("PUT", "/manifests/x"),
            ("GET", "/runningpods/"),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request(method, path)
                assert connection.getresponse().status == 404, f"{method} {path} on port {port}"
            finally:
                connection.close()
    assert not (node.root / "checkpoints").exists()
