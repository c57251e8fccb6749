"""Heads of HTTP/1.1 requests: what unauthenticated clients can make a server hold."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pykubelet.server import connections as request_heads
from pykubelet.server.connections import FREE_BYTES, MAX_HEAD_BYTES, MAX_TOTAL_HEAD_BYTES
from pykubelet.server.listeners import http_server
from tests.unit.server import https_node
from tests.unit.server.https_node import Node, Starter

authority, stranger, pairs, start = (
    https_node.authority,
    https_node.stranger,
    https_node.pairs,
    https_node.start,
)

MIB = 1024 * 1024
CLIENTS, MOST_SENT = 40, 6 * MIB

SERVER = """
    import asyncio, sys
    import uvloop
    from aiohttp import web
    from pykubelet.server.listeners import http_server

    async def wait(request):
        await asyncio.get_running_loop().create_future()

    async def main():
        async with http_server("test", "127.0.0.1", int(sys.argv[1]), [web.get("/wait", wait)]):
            print("ready", flush=True)
            await asyncio.get_running_loop().create_future()

    uvloop.run(main())
"""


@contextmanager
def server_process(port: int) -> Iterator[int]:
    """Run a server in a process of its own; return its pid."""
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def head(size: int, *, end: bool) -> bytes:
    """Return a request for /wait whose head has about this size."""
    fields = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 30_000) for number in range(size // 30_000))
    return b"GET /wait HTTP/1.1\r\nHost: x\r\n" + fields + (b"\r\n" if end else b"")


def flood(port: int, data: bytes) -> int:
    """Send data over and over on many connections until the server takes no more; return the bytes taken."""
    selector, taken = selectors.DefaultSelector(), dict.fromkeys(range(CLIENTS), 0)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
    flooded.extend(clients)
    for number, client in enumerate(clients):
        client.setblocking(False)
        selector.register(client, selectors.EVENT_WRITE, number)
    progress = time.monotonic()
    while time.monotonic() - progress < 2 and selector.get_map():
        for key, _ in selector.select(0.1):
            client, number = clients[key.data], key.data
            try:
                at = taken[number] % len(data)
                count = client.send(data[at : at + 65_536])
            except (BlockingIOError, ConnectionError):
                count = 0
            if count:
                taken[number] += count
                progress = time.monotonic()
            if not count or taken[number] >= MOST_SENT:
                selector.unregister(client)
    return sum(taken.values())


flooded: list[socket.socket] = []


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while flooded:
        flooded.pop().close()


@pytest.mark.parametrize(
    "data", [head(900_000, end=True), head(2_700_000, end=False)], ids=["pipelined", "unfinished"]
)
def test_server_flood_of_large_heads_bounded_memory(unused_tcp_port: int, data: bytes) -> None:
    with server_process(unused_tcp_port) as pid:
        before = resident_bytes(pid)
        taken = flood(unused_tcp_port, data)
        grown = resident_bytes(pid) - before
        assert grown < 100 * MIB, f"{grown / MIB:.0f} MiB for {taken / MIB:.0f} MiB from {CLIENTS} clients"
        with socket.create_connection(("127.0.0.1", unused_tcp_port), timeout=30) as client:
            client.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 404 ")


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.fixture
def handled() -> list[str]:
    return []


def routes(handled: list[str]) -> list[web.RouteDef]:
    async def note(request: web.Request) -> web.Response:
        handled.append(f"+{request.match_info['name']}")
        body = await request.read()
        await asyncio.sleep(0.01)
        handled.append(f"-{request.match_info['name']}")
        return web.Response(text=f"{request.match_info['name']}:{len(body)};")

    return [web.route("*", "/{name}", note)]


async def test_server_head_above_limit_431(unused_tcp_port: int, handled: list[str]) -> None:
    async with http_server("test", "127.0.0.1", unused_tcp_port, routes(handled)):
        data = head(MAX_HEAD_BYTES + 300_000, end=False)
        response = await exchange(unused_tcp_port, data)
        assert response == b"" or response.startswith(b"HTTP/1.1 431 ")
        whole = head(MAX_HEAD_BYTES - 100_000, end=False) + b"Connection: close\r\n\r\n"
        assert (await exchange(unused_tcp_port, whole)).startswith(b"HTTP/1.1 200 ")
    assert handled == ["+wait", "-wait"]


async def test_server_pipelined_requests_handled_sequentially_in_order(
    unused_tcp_port: int, handled: list[str]
) -> None:
    names = [str(number) for number in range(50)]
    requests = b"".join(b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % name.encode() for name in names)
    requests += b"PUT /put HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + b"z" * 60_000
    requests += b"POST /post HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    requests += b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with http_server("test", "127.0.0.1", unused_tcp_port, routes(handled)):
        response = await exchange(unused_tcp_port, requests)
    names += ["put", "post", "last"]
    assert handled == [f"{sign}{name}" for name in names for sign in "+-"]
    for name, size in [(name, 0) for name in names[:50]] + [("put", 60_000), ("post", 3), ("last", 0)]:
        assert b"%s:%d;" % (name.encode(), size) in response


async def test_server_client_leaves_during_request_handler_cancelled(unused_tcp_port: int) -> None:
    """Verify that a connection is still read from while its request is handled."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()
        return web.Response()

    async with http_server("test", "127.0.0.1", unused_tcp_port, [web.get("/wait", wait)]):
        _, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\nGET /next HTTP/1.1\r\n")
        async with asyncio.timeout(30):
            await begun.wait()
            writer.close()
            await cancelled.wait()


async def test_head_budget_released_after_requests_and_connections(
    unused_tcp_port: int, handled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[request_heads.HeadBudget] = []
    original = request_heads.HeadBudget.__init__

    def remember(self: request_heads.HeadBudget, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]  # passed on as they are
        budgets.append(self)

    monkeypatch.setattr(request_heads.HeadBudget, "__init__", remember)
    async with http_server("test", "127.0.0.1", unused_tcp_port, routes(handled)):
        large = head(300_000, end=True)
        closing = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        await asyncio.gather(*(exchange(unused_tcp_port, large * 3 + closing) for _ in range(5)))
        _, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(head(300_000, end=False))
        async with asyncio.timeout(30):
            while not budgets[0].total:
                await asyncio.sleep(0.01)
            assert budgets[0].total > FREE_BYTES
            writer.close()
            while budgets[0].total:
                await asyncio.sleep(0.01)
    assert handled.count("-wait") == 15


async def test_api_flood_of_unauthorized_large_heads_evicted(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that requests which wait for a review make room when heads exceed the budget."""
    waiting: list[str] = []

    async def never(self: object, token: str) -> None:
        waiting.append(token)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("pykubelet.server.auth.reviews.TokenReviews._review", never)
    node: Node = await start(most=100)
    count = MAX_TOTAL_HEAD_BYTES // 600_000 + 6
    data = head(600_000, end=False)
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(node.raw(data + b"Authorization: Bearer bogus-%d\r\n\r\n" % number))
            for number in range(count)
        ]
        # The heads exceed the budget by those of so many clients.
        surplus = -(-(count * (600_000 - FREE_BYTES) - MAX_TOTAL_HEAD_BYTES) // (600_000 - FREE_BYTES))
        async with asyncio.timeout(25):
            while sum(task.done() for task in answers) < surplus or not waiting:
                await asyncio.sleep(0.05)
        assert sum(task.done() for task in answers) <= 12
        assert (await node.ask("/healthz", token=""))[0] == 401
        for task in answers:
            task.cancel()
