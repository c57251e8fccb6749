"""Clients that misbehave: each gets a status or is hung up on, and nobody else suffers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pykubelet.server.auth.reviews import TokenReviews
from pykubelet.util.tasks import TaskScope
from tests.support.certs import Authority, Pair
from tests.support.server_clients import client_context
from tests.unit.server import https_node
from tests.unit.server.https_node import ROUTES, Node, Starter

authority, stranger, pairs, start = (
    https_node.authority,
    https_node.stranger,
    https_node.pairs,
    https_node.start,
)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET //pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods/../run HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /logs/%2e%2e/etc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods%2Fx HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /pods%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET http://evil/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"BREW /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"\x16\x03\x01\x00\x00garbage\r\n\r\n", b"400"),
        (b"GET /pods HTTP/9.9\r\n\r\n", b"40"),
        (b"GET /pods HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"400"),
        (b"GET /pods HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5_000 + b"\r\n", b"400"),
        (b"GET /" + b"p" * 1_200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /pods?" + b"p" * 500_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /debug/fail HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"500"),
        (
            b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"z" * 1_100_000,
            b"413",
        ),
        (b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (
            b"PUT /manifests/x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
    ],
)
async def test_https_malformed_request_returns_status_only(
    start: Starter, request_: bytes, status: bytes
) -> None:
    node = await start(open_to_all=True, anonymous=True)
    answer = await node.raw(request_)
    first = answer.partition(b"\r\n")[0]
    assert first.startswith(b"HTTP/1."), answer[:500]
    assert first.split()[1].startswith(status), answer[:500]
    assert b"Traceback" not in answer
    assert b"secret" not in answer
    assert (await node.ask("/pods"))[0] == 200


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_https_idle_connections_evicted_for_new_ones(start: Starter, authority: Authority) -> None:
    node = await start(open_to_all=True, anonymous=True, most=20)
    before = open_files()
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(60):
            reader, writer = await asyncio.open_connection(
                "localhost", node.port, ssl=client_context(authority)
            )
            stack.callback(writer.close)
            readers.append(reader)
        assert (await node.ask("/pods"))[0] == 200
        # Also for those who do not even begin to speak TLS.
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", node.port)
            stack.callback(writer.close)
        assert (await node.ask("/pods"))[0] == 200
        async with asyncio.timeout(30):
            while sum(reader.at_eof() for reader in readers) < 40:
                await asyncio.sleep(0.01)
    deadline = time.monotonic() + 30
    while open_files() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_https_busy_connections_not_evicted(
    start: Starter, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(_: web.Request) -> web.Response:
        begun.release()
        await release.wait()
        return web.Response(text="done")

    monkeypatch.setattr(https_node, "ROUTES", [*ROUTES, web.get("/debug/slow", slow)])
    node = await start(open_to_all=True, anonymous=True, most=5)
    async with TaskScope() as scope, asyncio.timeout(60):
        busy = [scope.start(node.ask("/debug/slow"), name="busy") for _ in range(5)]
        for _ in busy:
            await begun.acquire()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await node.ask("/pods")
        release.set()
        assert [await task for task in busy] == [(200, "done")] * 5
    assert (await node.ask("/pods"))[0] == 200


@asynccontextmanager
async def plain_connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    "bytes_", [b"GET /pods HTTP/1.1\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"z" * 100]
)
async def test_https_non_tls_bytes_close_connection(start: Starter, bytes_: bytes) -> None:
    node = await start()
    async with plain_connection(node.port) as (reader, writer), asyncio.timeout(30):
        writer.write(bytes_)
        writer.write_eof()
        while await reader.read(100):
            pass


async def test_https_full_of_unreviewed_tokens_other_clients_served(
    start: Starter, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that requests that wait for a TokenReview do not keep other clients out."""

    reviewed: set[str] = set()

    async def never(self: TokenReviews, token: str) -> None:
        reviewed.add(token)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(TokenReviews, "_review", never)
    node = await start(most=10)
    async with TaskScope() as scope:
        for number in range(10):
            scope.start(left_alone(node, f"bogus-{number}"), name="stranger")
        async with asyncio.timeout(60):
            while len(reviewed) < 10:
                await asyncio.sleep(0.05)
            for _ in range(12):
                assert (await node.ask("/pods", pairs["admin"]))[0] == 200


async def left_alone(node: Node, token: str) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        await node.ask("/pods", token=token)
