import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, unused_port

from pykubelet.server.listeners import PortError, http_server
from pykubelet.server.readonly import Check, health_routes


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
        (GOOD, "/healthz/nonsense", 404, "no check 'nonsense'; there are: ping, log, syncloop\n"),
        (GOOD, "/nonsense", 404, "404: Not Found"),
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


async def test_healthz_post_returns_405() -> None:
    async with client(GOOD) as http, http.post("/healthz") as answer:
        assert answer.status == 405


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
