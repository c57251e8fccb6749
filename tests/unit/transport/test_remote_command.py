"""Client of the remote-command protocol: a runtime that does not read."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pykubelet.transport import remote_command
from pykubelet.transport.remote_command import connect
from tests.support.spdy_runtime import SpdyPeer, command

STREAMS = ("stdin", "stdout", "stderr")


@asynccontextmanager
async def runtime(run: Callable[[SpdyPeer], Awaitable[None]]) -> AsyncIterator[str]:
    """Yield the URL of a streaming server with a small receive buffer."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    play = command(run, "error", *STREAMS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await play(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, sock=listener)
    try:
        async with asyncio.timeout(30):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/exec/token"
    finally:
        server.close()


async def test_connect_runtime_never_reads_input_closed_after_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_command, "CLOSE_SECONDS", 0.05)
    left = asyncio.Event()

    async def never_reads(peer: SpdyPeer) -> None:
        await left.wait()

    async with runtime(never_reads) as url:
        async with connect(url, STREAMS) as running:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await running.send("stdin", bytes(20_000_000))
        left.set()


async def test_output_pings_of_runtime_that_never_reads_replies_bounded() -> None:
    count = 500_000
    left = asyncio.Event()

    async def flood(peer: SpdyPeer) -> None:
        peer.writer.write(struct.pack(">III", 0x80030006, 4, 2) * count)
        await peer.finish()
        await left.wait()

    async with runtime(flood) as url, connect(url, STREAMS) as running:
        async for _ in running.output():
            pass
        assert running.result.exit_code == 0
        assert running._writer.transport.get_write_buffer_size() < 2**18
        left.set()
