"""Forwarded connections that break, with real sockets on both sides."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.cli.node_access import Node
from pykubelet.cli.pods import port_forward
from pykubelet.cli.pods.port_forward import PROTOCOL, Forwarder
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.transport.spdy import data_header
from tests.support.spdy_runtime import UPGRADED

_DATA_STREAM = 3
Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reset_on_close(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@asynccontextmanager
async def forwarded(
    play: Play, unhandled: list[dict[str, Any]]
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a local port that is forwarded to a streaming server played by the test."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(UPGRADED % PROTOCOL.encode())
        try:
            await play(reader, writer)
        finally:
            writer.close()

    async def prepare() -> str:
        return f"http://127.0.0.1:{runtime.sockets[0].getsockname()[1]}/portforward/token"

    runtime = await asyncio.start_server(serve, "127.0.0.1", 0)
    local = await asyncio.start_server(Forwarder(prepare).handler(80), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(30):
            yield await asyncio.open_connection(*local.sockets[0].getsockname())
    finally:
        local.close()
        runtime.close()


@pytest.mark.parametrize("floods", [False, True], ids=["silent-pod", "sending-pod"])
async def test_forwarder_local_client_resets_connection_to_runtime_closed(floods: bool) -> None:
    """Verify that a silent pod does not keep the connection, and that no traceback is printed."""
    unhandled: list[dict[str, Any]] = []
    started, closed = asyncio.Event(), asyncio.Event()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while not received.endswith(b"hello"):
            received += await reader.read(4096)
        started.set()
        try:
            while floods:
                writer.write(data_header(_DATA_STREAM, 65536) + bytes(65536))
                await writer.drain()
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        closed.set()

    async with forwarded(play, unhandled) as (_, writer):
        writer.write(b"hello")
        await started.wait()
        reset_on_close(writer.get_extra_info("socket"))
        writer.transport.abort()
        await closed.wait()
    assert unhandled == []


async def test_forwarder_runtime_resets_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    unhandled: list[dict[str, Any]] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        reset_on_close(writer.get_extra_info("socket"))
        writer.transport.abort()

    async with forwarded(play, unhandled) as (reader, writer):
        assert await reader.read() == b""
        writer.close()
    assert unhandled == []
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pykubelet port-forward: the connection to the runtime broke: ")


@pytest.mark.parametrize("address", ["x" * 64, "a..b"])
async def test_forward_ports_invalid_host_name_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runtime:
        async def list_containers(self, _: object) -> list[pb.Container]:
            return [pb.Container(pod_sandbox_id="s")]

    @asynccontextmanager
    async def connected(_: object) -> AsyncIterator[Runtime]:
        yield Runtime()

    monkeypatch.setattr(port_forward, "runtime_client", connected)
    with pytest.raises(port_forward.ForwardError, match="it is not a valid host name"):
        await port_forward._forward_ports(Node(Path("/none")), "id", [(0, 80)], address)
