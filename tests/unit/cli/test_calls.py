"""`pykubelet top --calls` with the metrics of a node."""

import json
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from typer.testing import CliRunner

from pykubelet.cli.pods.calls import CallStats, calls_of
from pykubelet.cli.pykubelet import app
from pykubelet.cri.channel import CriMetrics
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import answering, pykubelet
from tests.support.pod_view import ScriptedView


def metrics() -> bytes:
    """Return the metrics of a kubelet with calls to its runtime and two addresses of an API server."""
    registry = CollectorRegistry()
    cri = CriMetrics(registry)
    for seconds, failed in ((0.1, False), (0.3, True)):
        cri.observe("list_pods", seconds, failed=failed)
    cri.observe("version\x1b", 0.002, failed=False)
    rest = Histogram("rest_client_request_duration_seconds", "x", ["verb", "host"], registry=registry)
    rest.labels("GET", "a").observe(0.25)
    rest.labels("GET", "b").observe(0.75)
    Counter("other_total", "x", ["operation_type"], registry=registry).labels("list_pods").inc(9)
    return generate_latest(registry)


def test_calls_of_metrics_sums_hosts_and_sorts_by_total_time() -> None:
    assert calls_of(metrics().decode().split("\n")) == [
        CallStats("runtime", "list_pods", 2, 0.4, 1),
        CallStats("runtime", "version\x1b", 1, 0.002, 0),
        CallStats("api-server", "GET", 2, 1.0, None),
    ]
    assert calls_of([]) == []


async def test_top_calls_table_and_documents(data_dir: Path) -> None:
    instance = Instance.at(data_dir)

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=metrics())

    async with answering(instance, ScriptedView(), [web.get("/metrics", respond)]):
        table = await pykubelet(instance, "top", "--calls")
        document = await pykubelet(instance, "top", "--calls", "-o", "json")
        names = await pykubelet(instance, "top", "--calls", "-o", "name")
    assert (table.code, table.err) == (0, "")
    assert [line.split() for line in table.out.splitlines()] == [
        ["TARGET", "CALL", "COUNT", "MEAN", "ERRORS"],
        ["runtime", "list_pods", "2", "200.0ms", "1"],
        ["runtime", "version\\x1b", "1", "2.0ms", "0"],
        ["api-server", "GET", "2", "500.0ms", "-"],
    ]
    assert json.loads(document.out)["calls"][0] == {
        "target": "runtime",
        "operation": "list_pods",
        "count": 2,
        "seconds": 0.4,
        "errors": 1,
    }
    assert names.out.split("\n")[:2] == ["runtime/list_pods", "runtime/version\\x1b"]


async def test_top_calls_of_node_without_metrics_is_one_line(data_dir: Path) -> None:
    async with answering(Instance.at(data_dir), ScriptedView()):
        ran = await pykubelet(Instance.at(data_dir), "top", "--calls")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("pykubelet top: the node does not serve its metrics (status 404)")


def test_top_calls_with_a_pod_or_the_node_is_wrong_usage() -> None:
    for arguments in (("web", "--calls"), ("--node", "--calls"), ("--calls", "-w", "-o", "json")):
        assert CliRunner().invoke(app, ["top", *arguments]).exit_code == 2
