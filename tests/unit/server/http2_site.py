"""Servers that speak HTTP/2, and connections to them, for tests."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pykubelet.server.connections import app_runner, serve_connections
from pykubelet.server.http2.connection import Http2Connection
from pykubelet.server.listeners import listening_socket
from pykubelet.server.tls import ServingTls, TlsSettings
from tests.support import api_node
from tests.support.api_node import STAMP, Node, write_log
from tests.support.certs import Authority, Pair
from tests.support.server_clients import client_context
from tests.unit.server.http2_client import Client, http2_client

authority, pairs, start = api_node.authority, api_node.pairs, api_node.start


@asynccontextmanager
async def talking(node: Node, client: str = "admin", **options: Any) -> AsyncIterator[Client]:
    context = client_context(node.authority, node.clients[client].get("pair"))
    async with http2_client(node.port, context, **options) as talk:
        yield talk


def token_of(node: Node, client: str) -> list[tuple[str, str]]:
    token = node.clients[client].get("token")
    return [("authorization", f"Bearer {token}")] if token else []


async def echo(request: web.Request) -> web.Response:
    body = await request.read()
    headers = {name: request.headers.getall(name) for name in request.headers}
    return web.json_response(
        {"method": request.method, "path": request.raw_path, "headers": headers, "size": len(body)}
    )


async def nothing(request: web.Request) -> web.Response:
    return web.Response(status=int(request.match_info["status"]), headers={"X-Here": "yes"})


async def break_off(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"so far")
    if request.match_info["how"] == "abort":
        assert request.transport is not None
        request.transport.abort()
    raise ValueError("a secret of the inside")


async def compressed(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    answer.enable_compression(web.ContentCoding.gzip)
    await answer.prepare(request)
    for _ in range(100):
        await answer.write(b"again " * 1000)
    return answer


async def long(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * 100_000)


async def no_header(_: web.Request) -> web.Response:
    return web.Response(headers={"X-Two": "one\r\nX-Evil: two"})


class Slow:
    """A handler that waits, and counts."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.at_work = self.begun = self.cancelled = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.at_work += 1
        self.begun += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_work -= 1
        return web.Response(text="done")


ROUTES = [
    web.route("*", "/echo{rest:.*}", echo),
    web.get("/status/{status}", nothing),
    web.get("/break/{how}", break_off),
    web.get("/compressed", compressed),
    web.get("/long", long),
    web.get("/no-header", no_header),
]


class Site:
    """A server for tests with connections of its own settings."""

    def __init__(self, port: int, authority: Authority, slow: Slow) -> None:
        self.port, self.authority, self.slow = port, authority, slow

    def talking(self, **options: Any) -> Any:
        return http2_client(self.port, client_context(self.authority), **options)


@asynccontextmanager
async def site_of(authority: Authority, pairs: dict[str, Pair], *, most: int = 100) -> AsyncIterator[Site]:
    slow, app = Slow(), web.Application()
    app.add_routes([*ROUTES, web.get("/slow", slow.answer)])
    tls = ServingTls(TlsSettings(), lambda: (pairs["server"].certificate, pairs["server"].key))
    with listening_socket("test", "127.0.0.1", 0) as listener:
        async with (
            app_runner(app) as server,
            serve_connections(server, listener, tls.context, max_connections=most),
        ):
            yield Site(listener.getsockname()[1], authority, slow)


@pytest.fixture
async def site(authority: Authority, pairs: dict[str, Pair]) -> AsyncIterator[Site]:
    async with site_of(authority, pairs) as made:
        yield made


def alive(kind: type) -> int:
    """How many there are of something; those that only wait for the collector do not count."""
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


def standing() -> list[Http2Connection]:
    """The server's side of the connections that stand."""
    gc.collect()  # else those of earlier tests may be among them
    found = [found for found in gc.get_objects() if isinstance(found, Http2Connection)]
    return [connection for connection in found if connection.transport is not None]


def write_long_log(node: Node, lines: int = 40_000) -> str:
    texts = [f"line {number} {'x' * 200}" for number in range(lines)]
    write_log(node, *(f"{STAMP.format(5)} stdout F {text}" for text in texts))
    return "".join(f"{text}\n" for text in texts)
