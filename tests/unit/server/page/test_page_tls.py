"""The page on another address than loopback: TLS with the API's authentication and authorization."""

import contextlib
from collections.abc import AsyncIterator

import aiohttp

from pykubelet.agent.page import _secure_server
from pykubelet.server.page.routes import Page
from pykubelet.server.page.security import HEADERS
from pykubelet.util.tasks import TaskScope
from tests.support import api_node
from tests.support.api_node import Node, Start
from tests.support.ports import free_port
from tests.support.server_clients import client_context
from tests.unit.server.page.test_routes import Source

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start
PATHS = ("/", "/pods", "/data/node", "/events?view=no", "/static/page.js", "/nothing", "/pod/default/none")


@contextlib.asynccontextmanager
async def secure_page(node: Node) -> AsyncIterator[str]:
    port = free_port()
    async with TaskScope() as tasks:
        page = Page(Source(), tasks)
        async with _secure_server("127.0.0.1", port, page.routes(), node.deps):
            yield f"https://localhost:{port}"
            page.close()


async def statuses(node: Node, url: str, client: str, **headers: str) -> set[int]:
    """Return the statuses of all paths; each response has the security headers."""
    connector = aiohttp.TCPConnector(ssl=client_context(node.authority, node.clients[client].get("pair")))
    found = set()
    async with aiohttp.ClientSession(connector=connector) as session:
        for path in PATHS:
            async with session.get(url + path, headers=headers) as response:
                assert HEADERS.items() <= dict(response.headers).items(), (path, response.status)
                found.add(response.status)
        async with session.post(url, headers=headers) as response:
            assert HEADERS.items() <= dict(response.headers).items()
            assert response.status in (401, 403, 405)
    return found


async def test_secure_page_each_client_gets_its_status_with_security_headers(start: Start) -> None:
    node = await start()
    async with secure_page(node) as url:
        assert await statuses(node, url, "admin") == {200, 404}
        assert await statuses(node, url, "no credentials") == {401}
        assert await statuses(node, url, "bad certificate") == {401}
        assert await statuses(node, url, "no permission") == {403}


async def test_secure_page_rejects_requests_of_other_sites_before_authentication(start: Start) -> None:
    node = await start()
    async with secure_page(node) as url:
        for client in ("admin", "no credentials"):
            assert await statuses(node, url, client, Origin="https://evil.example") == {403}
            assert await statuses(node, url, client, Origin=url, Host="evil.example") == {403}
            cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
            assert await statuses(node, url, client, **cross) == {403}
        assert node.people.asked == []
        assert await statuses(node, url, "admin", Origin=url) == {200, 404}
