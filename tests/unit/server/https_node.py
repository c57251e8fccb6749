"""A secured server with a few pages, and ways to ask it, for tests."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.server.api import https_server
from pykubelet.server.auth.identity import USER
from pykubelet.server.auth.request_auth import AlwaysAllow, Authenticator, ClientCertificates
from pykubelet.server.auth.reviews import AccessReviews, TokenReviews
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.tls import ServingTls, TlsSettings
from pykubelet.util.rate_limiter import TokenBucket
from pykubelet.util.tasks import TaskScope
from tests.support.api_server import serving
from tests.support.certs import NAMES, Authority, Pair
from tests.support.server_clients import People, client_context


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("https"), "cluster")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("https"), "stranger")


@pytest.fixture(scope="session")
def pairs(authority: Authority, stranger: Authority) -> dict[str, Pair]:
    return {
        "server": authority.sign("/CN=node", NAMES),
        "second": authority.sign("/CN=second", NAMES),
        "admin": authority.sign("/O=system:masters/CN=admin"),
        "viewer": authority.sign("/CN=viewer"),
        "expired": authority.sign("/CN=admin", begins=-7200, ends=-3600),
        "foreign": stranger.sign("/O=system:masters/CN=admin"),
    }


async def who(request: web.Request) -> web.Response:
    return web.Response(text=request[USER].name)


async def echo_size(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def fail(request: web.Request) -> web.Response:
    raise ValueError("a secret of the inside")


ROUTES = [
    web.get("/pods", who),
    web.get("/healthz", who),
    web.get("/stats/summary", who),
    web.post("/run/{a}/{b}/{c}", who),
    web.put("/manifests/{name}", echo_size),
    web.get("/debug/fail", fail),
]


class Node:
    """A secured server, and ways to ask it."""

    def __init__(self, port: int, authority: Authority, folder: Path, registry: CollectorRegistry) -> None:
        self.port, self.authority, self.folder, self.registry = port, authority, folder, registry
        self.people = People()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def ask(
        self, path: str, pair: Pair | None = None, token: str = "", method: str = "GET", **options: Any
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(ssl=client_context(self.authority, pair))
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            async with session.request(method, self.url + path, **options) as answer:
                return answer.status, await answer.text()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes over TLS and give everything that comes back."""
        reader, writer = await asyncio.open_connection(
            "localhost", self.port, ssl=client_context(self.authority)
        )
        writer.write(data)
        try:
            async with asyncio.timeout(30):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def metric(self, line: str) -> float:
        for found in generate_latest(self.registry).decode().splitlines():
            if found.startswith(line + " "):
                return float(found.rpartition(" ")[2])
        return 0.0


Starter = Callable[..., Any]


@pytest.fixture
async def start(authority: Authority, pairs: dict[str, Pair], tmp_path: Path) -> AsyncIterator[Starter]:
    async with AsyncExitStack() as stack:

        async def begin(
            *, anonymous: bool = False, open_to_all: bool = False, most: int = 100, **settings: Any
        ) -> Node:
            registry = CollectorRegistry()
            metrics = ServerMetrics(registry)
            node = Node(0, authority, tmp_path, registry)
            scope = await stack.enter_async_context(TaskScope())
            api = await stack.enter_async_context(serving(None))
            api.default = node.people.answer
            transport = Transport(RestConfig(api.url))
            stack.push_async_exit(transport)
            client = ApiClient(transport, TokenBucket(-1, 0), timeout=30)
            for name in ("crt", "key"):
                pair = pairs["server"]
                shutil.copy(pair.certificate if name == "crt" else pair.key, tmp_path / f"kubelet.{name}")
            shutil.copy(authority.certificate, tmp_path / "ca.crt")
            node.port = await stack.enter_async_context(
                https_server(
                    "::",
                    0,
                    ROUTES,
                    tls=ServingTls(
                        TlsSettings(request_certificates=True, **settings),
                        lambda: (tmp_path / "kubelet.crt", tmp_path / "kubelet.key"),
                    ),
                    authenticator=Authenticator(
                        ClientCertificates(tmp_path / "ca.crt", metrics),
                        TokenReviews(client, scope, 60, metrics),
                        anonymous=anonymous,
                    ),
                    authorizer=AlwaysAllow()
                    if open_to_all
                    else AccessReviews(
                        client, scope, lambda: "n1", metrics, allowed_ttl_seconds=60, denied_ttl_seconds=60
                    ),
                    metrics=metrics,
                    max_connections=most,
                )
            )
            return node

        yield begin
