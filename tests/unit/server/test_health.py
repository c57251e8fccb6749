import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, unused_port

from pykubelet.server.listeners import PortError, http_server
from pykubelet.server.metrics.registry_text import text_format
from pykubelet.server.metrics.server_metrics import HealthMetrics
from pykubelet.server.readonly import Check, health_port_routes, health_routes
from tests.support.metrics_page import Page


def client(checks: dict[str, Check]) -> TestClient[web.Request, web.Application]:
    app = web.Application()
    app.add_routes(health_routes(checks))
    return TestClient(TestServer(app))


GOOD: dict[str, Check] = {"ping": lambda: None, "log": lambda: None, "syncloop": lambda: None}
BAD: dict[str, Check] = {**GOOD, "syncloop": lambda: "stuck since yesterday"}


@pytest.mark.parametrize(
    ("checks", "path", "status", "text"),
    [
        (GOOD, "/healthz", 200, "ok"),
        (GOOD, "/healthz/ping", 200, "ok"),
        (GOOD, "/healthz?verbose", 200, "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n"),
        (
            BAD,
            "/healthz",
            500,
            "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n",
        ),
        (BAD, "/healthz/ping", 200, "ok"),
        (BAD, "/healthz/syncloop", 500, "internal server error: stuck since yesterday\n"),
        (BAD, "/healthz?exclude=syncloop", 200, "ok"),
        (GOOD, "/healthz/nonsense", 404, "404: Not Found"),
        (GOOD, "/nonsense", 404, "404: Not Found"),
        (
            GOOD,
            "/healthz?exclude=x&exclude=log&exclude=a&verbose=1",
            200,
            "[+]ping ok\n[+]log excluded: ok\n[+]syncloop ok\n"
            'warn: some health checks cannot be excluded: no matches for "a","x"\nhealthz check passed\n',
        ),
        (GOOD, "/healthz/", 404, None),
    ],
)
async def test_healthz_checks_return_status_and_text(
    checks: dict[str, Check], path: str, status: int, text: str | None
) -> None:
    async with client(checks) as http, http.get(path) as answer:
        assert answer.status == status
        if text is not None:
            assert await answer.text() == text


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
async def test_healthz_any_method_is_served(method: str) -> None:
    async with client(GOOD) as http, http.request(method, "/healthz") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/healthz", 200, "ok"),
        ("/healthz?verbose", 200, "[+]ping ok\nhealthz check passed\n"),
        ("/healthz/ping", 200, "ok"),
        *(
            (path, 404, "404 page not found\n")
            for path in ("/healthz/", "/healthz/syncloop", "/healthz/log", "/metrics", "/pods", "/")
        ),
    ],
)
async def test_health_port_runs_only_ping(path: str, status: int, text: str) -> None:
    metrics = HealthMetrics()
    app = web.Application()
    app.add_routes(health_port_routes(metrics))
    async with TestClient(TestServer(app)) as http, http.get(path) as answer:
        assert (answer.status, await answer.text()) == (status, text)
    found = Page(text_format(metrics.registry.collect()).decode())
    counted = found.values("kubernetes_healthchecks_total", name="ping", type="healthz", status="success")
    # As upstream, only requests to /healthz itself are counted.
    assert counted == ([1] if path.partition("?")[0] == "/healthz" else [])
    assert found.values("kubernetes_healthchecks_total", name="syncloop") == []


async def test_http_server_serves_only_inside_context() -> None:
    port = unused_port()
    async with aiohttp.ClientSession() as session:
        async with http_server("health", "127.0.0.1", port, health_routes(GOOD)):
            async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                assert await answer.text() == "ok"
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://127.0.0.1:{port}/healthz")


async def test_http_server_port_taken_raises_with_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}: the port is taken by .*choose another"):
            async with http_server("health", "127.0.0.1", port, []):
                pytest.fail("must not serve")


async def test_http_server_unknown_address_raises() -> None:
    with pytest.raises(PortError, match="no such address"):
        async with http_server("health", "203.0.113.7", unused_port(), []):
            pytest.fail("must not serve")
