"""Our gRPC client against hostile servers: gRPC probes go to whatever listens in a pod."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.api.pod import Container, GRPCAction
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import Channel, CriMetrics
from pykubelet.probes.grpc_probe import grpc_check
from pykubelet.probes.types import Target
from pykubelet.transport import http2
from pykubelet.transport import http2 as http2_rules
from pykubelet.transport.endpoint import Endpoint
from pykubelet.transport.errors import Unavailable
from pykubelet.transport.grpc_connection import Call, Connection, Status, status_in
from pykubelet.transport.http2 import FrameBudget, FrameType, HeaderBlocks, Http2Error, Setting, frame
from tests.support.cri_servers import raw_server
from tests.unit.transport.hostile_server import (
    ATTACKS,
    HEADERS,
    Attack,
    blocks_after_end,
    hostile_server,
    measured,
)
from tests.unit.transport.test_connection import MESSAGE, Server, outcome

MIB = 1024 * 1024


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_grpc_probe_hostile_server_bounded_time_and_memory(attack: Attack) -> None:
    target = Target(Container(name="c"), "id", "127.0.0.1")
    with hostile_server(attack) as server:
        async with measured() as cost:
            result = await grpc_check(GRPCAction(port=server.port), target, 10.0, "kube-probe/1.36")
        assert result.result == "failure"
        assert len(result.output) < 1000
        assert await asyncio.to_thread(server.is_cut_off, 5.0), "the connection stays open"
        assert cost.seconds < 8
        assert cost.frozen < 1
        assert cost.grown < 24 * MIB
        assert server.sent < 32 * MIB


async def test_grpc_probe_many_header_blocks_decoded_at_most_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify that a server cannot occupy the event loop with headers behind the end of its response."""
    decoded: list[int] = []
    original = HeaderBlocks.decode

    def decode(self: HeaderBlocks, block: bytes) -> list[tuple[str, str]]:
        decoded.append(len(block))
        return original(self, block)

    monkeypatch.setattr(HeaderBlocks, "decode", decode)
    target = Target(Container(name="c"), "id", "127.0.0.1")
    with hostile_server(blocks_after_end) as server:
        result = await grpc_check(GRPCAction(port=server.port), target, 10.0, "kube-probe/1.36")
        assert result.result == "failure"
        assert await asyncio.to_thread(server.is_cut_off, 5.0), "the connection stays open"
    assert 1 <= len(decoded) <= 4
    assert max(decoded) < 4096


async def test_connection_server_not_reading_aborted_on_close() -> None:
    """Verify that a server that never reads does not keep a closed connection and its buffer alive."""
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(Any, writer.transport).pause_reading()
        writer.write(http2.settings({Setting.INITIAL_WINDOW_SIZE: 2**30}))
        writer.write(frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(2**30)))
        await released.wait()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(lambda: Connection("x"), "127.0.0.1", port)
        assert await connection.wait_settings()
        call = connection.call("/a.B/C", bytes(32 * MIB))
        async with asyncio.timeout(30):
            while not transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
            connection.close(Status("CANCELLED"))
            await call.wait_response()
            while transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
        released.set()


async def test_channel_server_without_concurrent_streams_unavailable(
    folder: Path, metrics: CriMetrics
) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(http2.settings({Setting.MAX_CONCURRENT_STREAMS: 0}))
        await reader.read()

    path = folder / "hostile.sock"
    async with raw_server(path, talk):
        channel = Channel(Endpoint(str(path)), metrics)
        with pytest.raises(Unavailable, match="accepts no calls"):
            async with asyncio.timeout(30):
                await channel.call("/a.B/C", pb.VersionRequest(), pb.VersionResponse, timeout=5)
        await channel.close()
    assert connections == 1


def _status(call: Call) -> str:
    assert call.status is not None
    return call.status.code


async def test_call_unary_second_message_rejected() -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    answer = asyncio.create_task(call.wait_response())
    await asyncio.sleep(0)
    server.send(
        frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS), frame(FrameType.DATA, 0, 1, MESSAGE * 2)
    )
    async with asyncio.timeout(10):
        await answer
    assert _status(call) == "RESOURCE_EXHAUSTED"
    assert server.connection.usable


async def test_call_data_beyond_window_closes_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.transport.grpc_connection._STREAM_WINDOW", 50)
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    server.send(
        frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS), *[frame(FrameType.DATA, 0, 1, MESSAGE)] * 6
    )
    assert server.wire.closed
    assert _status(call) == "UNAVAILABLE"


@pytest.mark.parametrize(
    "frames",
    [
        http2.settings({Setting.MAX_FRAME_SIZE: 0}),
        http2.settings({Setting.MAX_FRAME_SIZE: 2**24}),
        http2.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}),
        frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(2**31 - 1)),
        frame(FrameType.WINDOW_UPDATE, 0, 1, http2.number(2**31 - 1)),
        frame(FrameType.PING, 0, 0, b"short"),
        frame(FrameType.HEADERS, http2.END_HEADERS, 3, HEADERS),
        frame(FrameType.HEADERS, http2.END_HEADERS, 1, b"\x20\x20\x20" + HEADERS),
        frame(FrameType.CONTINUATION, http2.END_HEADERS, 1, HEADERS),
    ],
)
async def test_connection_invalid_frame_closed(frames: bytes) -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"ask")
    server.send(frames)
    assert server.wire.closed
    _, status = await outcome(call)
    assert status is not None
    assert status.message.startswith("the server does not speak gRPC: ")
    assert len(status.message) < 300


async def test_connection_many_calls_and_pings_within_budget() -> None:
    """Verify that the control frames of an ordinary server never exhaust the budget."""
    server = Server()
    for number in range(5000):
        call = server.connection.call("/a.B/C", b"ask")
        stream = 1 + 2 * number
        server.send(
            frame(FrameType.PING, 0, 0, bytes(8)),
            frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(8)),
            *server.good_answer(stream),
        )
        assert await outcome(call) == (b"hello", Status("OK"))


async def test_connection_many_stream_messages_within_budget() -> None:
    server = Server()
    call = server.connection.call("/a.B/Watch", b"ask")
    server.send(frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS))
    for _ in range(20_000):
        server.send(frame(FrameType.DATA, 0, 1, MESSAGE))
        assert await call.read() == b"hello"
    assert server.connection.usable


async def test_connection_unread_stream_messages_bounded() -> None:
    server = Server()
    call = server.connection.call("/a.B/Watch", b"ask")
    server.send(frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS))
    for _ in range(40):
        server.send(frame(FrameType.DATA, 0, 1, MESSAGE * 1600))
    assert call.status is None
    for _ in range(2):
        server.send(frame(FrameType.DATA, 0, 1, MESSAGE * 1600))
    assert _status(call) == "RESOURCE_EXHAUSTED"


def test_header_blocks_size_update_with_long_integer_accepted() -> None:
    blocks = HeaderBlocks()
    block = b"\x3f\xe1\x0f\x20" + HEADERS  # 2048, then 0
    assert blocks.begin(1, http2.END_HEADERS, block) == (1, http2.END_HEADERS, block)
    assert blocks.decode(block)[0] == (":status", "200")


def test_header_blocks_undecodable_block_error_without_content() -> None:
    with pytest.raises(Http2Error) as caught:
        HeaderBlocks().decode(b"\x00\x7f\xff\xff\xff\xff\xff\xff\xff\xff\xff" + b"secret" * 100)
    assert str(caught.value) == "headers cannot be decoded"


def test_frame_budget_refilled_by_time() -> None:
    now = 0.0
    budget = FrameBudget(lambda: now)
    budget.credit(1e9)
    for _ in range(int(http2_rules._POINTS)):
        budget.charge(FrameType.PING, 8)
    with pytest.raises(Http2Error):
        budget.charge(FrameType.PING, 8)
    now = 1.0
    for _ in range(int(http2_rules._POINTS_PER_SECOND) - 2):
        budget.charge(FrameType.PING, 8)


@pytest.mark.parametrize("headers", [{"grpc-status": "9" * 5000}, {":status": "9" * 5000}])
def test_status_in_long_numbers_bounded(headers: dict[str, str]) -> None:
    assert len(status_in(headers).message) < 200


@pytest.mark.parametrize(("size", "most"), [(60, 1), (0, http2_rules.MAX_CONTINUATIONS - 1)])
def test_header_blocks_unfinished_block_bounded(size: int, most: int) -> None:
    """Verify that a block is rejected by its bytes and by its frames, before it is complete."""
    blocks = HeaderBlocks(limit=150)
    assert blocks.begin(1, 0, bytes(size)) is None
    for _ in range(most):
        assert blocks.resume(1, 0, bytes(size)) is None
    with pytest.raises(Http2Error, match="too large"):
        blocks.resume(1, 0, bytes(size))
