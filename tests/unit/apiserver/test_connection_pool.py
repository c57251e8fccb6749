"""Idle connections that are reused, against servers that respond, close, send garbage or break off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from pykubelet.apiserver.connection_pool import (
    AddressInfo,
    ConnectionClosed,
    ConnectionPool,
    ConnectTimeout,
    ResponseTruncated,
    SharedResolver,
)
from pykubelet.apiserver.errors import InvalidResponse
from pykubelet.transport.http1 import HttpProtocolError, ResponseReader

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nDate: now\r\n\r\nhi"


def new_socket(address: AddressInfo) -> socket.socket:
    return socket.socket(address[0], address[1], address[2])


class _Server:
    """Does with each connection what the script says, and remembers requests."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._script(reader, writer)
        writer.close()

    async def take(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")
        )
        request = head + await reader.readexactly(size)
        self.requests.append(request)
        return request


@asynccontextmanager
async def serving(script: Callable[[_Server], Script]) -> AsyncIterator[_Server]:
    def unset(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> Awaitable[None]:
        raise AssertionError

    server = _Server(unset)
    server._script = script(server)
    listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
    async with listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/prefix"
        yield server


@asynccontextmanager
async def connected(server: _Server, keep: float = 30.0) -> AsyncIterator[ConnectionPool]:
    connections = ConnectionPool(
        server.url,
        None,
        "",
        resolve=SharedResolver().addresses,
        new_socket=new_socket,
        idle_seconds=keep,
        connect_seconds=30,
    )
    try:
        yield connections
    finally:
        connections.close()


def answering(answer: bytes, times: int = 1000) -> Callable[[_Server], Script]:
    def made(server: _Server) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(times):
                await server.take(reader)
                writer.write(answer)

        return script

    return made


async def ask(connections: ConnectionPool, method: str = "PATCH", limit: int = 1000) -> ResponseReader:
    async with asyncio.timeout(60):
        return await connections.request(
            method, "/api/v1/x", [("fieldManager", "a b&c")], [("Accept", "application/json")], b"{}", limit
        )


async def test_connection_pool_sequential_requests_reuse_connection() -> None:
    async with serving(answering(OK)) as server, connected(server) as connections:
        for _ in range(3):
            answer = await ask(connections)
            assert (answer.status, bytes(answer.body), answer.headers["date"]) == (200, b"hi", "now")
        assert server.connections == 1
        lines = server.requests[0].split(b"\r\n")
        assert lines[0] == b"PATCH /prefix/api/v1/x?fieldManager=a+b%26c HTTP/1.1"
        assert b"Host: " + server.url.split("/")[2].encode() in lines
        assert lines[-1] == b"{}"


async def test_connection_pool_concurrent_requests_use_separate_connections() -> None:
    async with serving(answering(OK)) as server, connected(server) as connections:
        await asyncio.gather(*(ask(connections) for _ in range(4)))
        assert server.connections == 4
        await ask(connections)
        assert server.connections == 4


async def test_connection_pool_idle_timeout_expired_opens_new_connection() -> None:
    async with serving(answering(OK)) as server, connected(server, keep=-1) as connections:
        await ask(connections)
        await ask(connections)
        assert server.connections == 2


@pytest.mark.parametrize(("method", "repeated"), [("PUT", True), ("DELETE", True), ("PATCH", False)])
async def test_connection_pool_idle_connection_closed_retries_only_idempotent_methods(
    method: str, repeated: bool
) -> None:
    """The server takes the second request on a connection and hangs up: who knows what it did with it."""

    def made(server: _Server) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.take(reader)
            writer.write(OK)
            if server.connections == 1:
                await server.take(reader)
            else:
                await reader.read()

        return script

    async with serving(made) as server, connected(server) as connections:
        await ask(connections, method)
        if repeated:
            assert (await ask(connections, method)).status == 200
            assert server.connections == 2
        else:
            with pytest.raises(ConnectionClosed):
                await ask(connections, method)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionClosed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf", ResponseTruncated),
        (b"HTTP/1.1 200 OK\r\nContent-Le", ResponseTruncated),
        (b"SSH-2.0-OpenSSH_9\r\n", HttpProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1500\r\n\r\n" + b"x" * 1500, InvalidResponse),
    ],
)
async def test_connection_pool_invalid_response_raises_without_retry(
    answer: bytes, error: type[Exception]
) -> None:
    async with serving(answering(answer, times=1)) as server, connected(server) as connections:
        with pytest.raises(error):
            await ask(connections, "PUT")
        assert server.connections == 1, "a fresh connection is no reason to try again"


async def test_connection_pool_bytes_after_response_discards_connection() -> None:
    async with (
        serving(answering(OK + b"HTTP/1.1 500 Lie\r\n\r\n")) as server,
        connected(server) as connections,
    ):
        for _ in range(2):
            assert (await ask(connections)).status == 200
        assert server.connections == 2


async def test_connection_pool_request_cancelled_discards_connection() -> None:
    """Else the late answer would be taken for that of the next request."""
    late = asyncio.Event()

    def made(server: _Server) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.take(reader)
            if server.connections == 1:
                await late.wait()
            writer.write(OK)
            await reader.read()

        return script

    async with serving(made) as server, connected(server) as connections:
        waiting = asyncio.ensure_future(ask(connections))
        async with asyncio.timeout(60):
            while not server.requests:
                await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        late.set()
        assert (await ask(connections)).status == 200
        assert server.connections == 2


async def test_connection_pool_close_ends_pending_request() -> None:
    def made(server: _Server) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.take(reader)
            await reader.read()

        return script

    async with serving(made) as server, connected(server) as connections:
        waiting = asyncio.ensure_future(ask(connections))
        async with asyncio.timeout(60):
            while not server.requests:
                await asyncio.sleep(0.01)
        connections.close()
        with pytest.raises(ConnectionClosed):
            await waiting


async def test_connection_pool_resolver_hangs_raises_connect_timeout() -> None:
    async def never(host: str, port: int) -> list[AddressInfo]:
        await asyncio.sleep(60)
        return []

    connections = ConnectionPool(
        "https://elsewhere.example",
        None,
        "",
        resolve=never,
        new_socket=new_socket,
        idle_seconds=30,
        connect_seconds=0.05,
    )
    with pytest.raises(ConnectTimeout):
        await ask(connections)
