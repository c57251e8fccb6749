"""Our gRPC server against real clients: grpcio's, our own, and one that writes frames itself."""

import asyncio
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue

from pykubelet.transport import http2
from pykubelet.transport.grpc_connection import connect_unix
from pykubelet.transport.grpc_server import Limits, StreamingMethod, serving
from pykubelet.transport.http2 import Code, FrameType, frame
from tests.unit.transport.grpc_peers import MESSAGE, SHORT, Service, raw, served


async def test_grpc_server_concurrent_unary_calls_dispatched_by_method(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        assert (await peer.call("Echo", StringValue(value="grüß"))).value == "grüß"
        answers = await asyncio.gather(*(peer.call("Echo", StringValue(value=str(n))) for n in range(40)))
        assert [answer.value for answer in answers] == [str(n) for n in range(40)]


@pytest.mark.parametrize("code", ["NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNKNOWN"])
async def test_grpc_server_handler_error_status_and_message_returned(tmp_path: Path, code: str) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Refuse", StringValue(value=code))
        assert caught.value.code().name == code
        assert caught.value.details() == "nein: 100 % überfüllt\n"


async def test_grpc_server_handler_exception_fails_only_its_call(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Break", StringValue())
        assert caught.value.code() == grpc.StatusCode.UNKNOWN
        assert (await peer.call("Echo", StringValue(value="still here"))).value == "still here"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/t.Test/Nothing", "unknown method Nothing for service t.Test"),
        ("/v1.Other/Echo", "unknown service v1.Other"),
    ],
)
async def test_grpc_server_unknown_method_or_service_unimplemented(
    tmp_path: Path, path: str, text: str
) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.channel.unary_unary(path)(MESSAGE, timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == text


async def test_grpc_server_undecodable_request_internal(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.channel.unary_unary("/t.Test/Echo")(b"\xff\xff\xff", timeout=60)
        assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_grpc_server_client_deadline_cancels_handler(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Hang", StringValue(), timeout=0.2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        # On a busy machine its time may be up before it has come here at all.
        await peer.call("Echo", StringValue())
        if peer.service.begun.is_set():
            await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_grpc_server_grpc_timeout_header_enforced_by_server(tmp_path: Path) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        client.request(1, "/t.Test/Hang", MESSAGE, [("grpc-timeout", "50m")])
        headers = await client.trailers(1)
        assert headers["grpc-status"] == "4"
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_grpc_server_client_cancels_handler_cancelled(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        call = asyncio.ensure_future(peer.call("Hang", StringValue()))
        await asyncio.wait_for(peer.service.begun.wait(), 30)
        call.cancel()
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_grpc_server_large_requests_and_responses_unchanged(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer:
        large = await peer.call("Blob", Int64Value(value=6_000_000), BytesValue)
        assert large.value == b"\xa5" * 6_000_000
        sizes = [1_000_000, 0, 65_535, 65_531, 400_000]
        answers = await asyncio.gather(
            *(peer.call("Measure", BytesValue(value=bytes(size)), Int64Value) for size in sizes[:2]),
        )
        assert [answer.value for answer in answers] == sizes[:2]
        for size in sizes:
            measured = await peer.call("Measure", BytesValue(value=bytes(size)), Int64Value)
            assert measured.value == size


async def test_grpc_server_request_too_large_resource_exhausted(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Measure", BytesValue(value=bytes(2_000_000)), Int64Value)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await peer.call("Echo", StringValue(value="on"))).value == "on"


async def test_grpc_server_compressed_request_unimplemented(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Echo", StringValue(value="a" * 5000), compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("count", [0, 3, 300])
async def test_grpc_server_stream_messages_in_order(tmp_path: Path, count: int) -> None:
    async with served(tmp_path) as peer:
        seen = [
            int.from_bytes(one.value[:8], "big")
            async for one in peer.stream("Count", Int64Value(value=count))
        ]
        assert seen == list(range(count))


async def test_grpc_server_stream_ends_with_handler_status(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        call, seen = peer.stream("Count", Int64Value(value=27)), 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                seen += 1
        assert (caught.value.code().name, caught.value.details(), seen) == ("ABORTED", "enough", 27)


async def test_grpc_server_stream_slow_reader_back_pressure_and_reset(tmp_path: Path) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock", window=50_000) as client:
        client.request(1, "/t.Test/Count", Int64Value(value=1000).SerializeToString())
        await client.until(lambda: sum(client.data[1]) >= 50_000)
        await peer.call("Echo", StringValue(value="others are served meanwhile"))
        assert sum(client.data[1]) == 50_000
        assert peer.service.yielded == 3
        client.send(frame(FrameType.WINDOW_UPDATE, 0, 1, http2.number(20_000)))
        await client.until(lambda: sum(client.data[1]) >= 65_535)  # the connection's own window
        client.send(frame(FrameType.RST_STREAM, 0, 1, http2.number(8)))
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_grpc_server_stream_unread_message_ends_with_resource_exhausted(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def big(request: StringValue) -> AsyncGenerator[BytesValue, None]:
        try:
            while True:
                yield BytesValue(value=bytes(40_000))
        finally:
            closed.set()

    methods = {"/t.Test/Big": StreamingMethod(StringValue, big, send_timeout=0.05)}
    async with serving(tmp_path / "s", methods), raw(tmp_path / "s", window=50_000) as client:
        client.request(1, "/t.Test/Big", b"")
        await client.until(lambda: "grpc-status" in client.headers.get(1, {}))
        assert (client.headers[1]["grpc-status"], sum(client.data[1])) == ("8", 50_000)
        assert client.headers[1]["grpc-message"] == "the client did not read a message within 0.05 s"
        await asyncio.wait_for(closed.wait(), 30)


async def test_grpc_server_too_many_calls_refused_stream(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer, raw(tmp_path / "test.sock") as client:
        for number in (1, 3, 5, 7):
            client.request(number, "/t.Test/Hang", MESSAGE)
        client.request(9, "/t.Test/Echo", MESSAGE)
        await client.until(lambda: client.resets.get(9) is not None)
        assert client.resets == {9: Code.REFUSED_STREAM}
        client.send(frame(FrameType.RST_STREAM, 0, 1, http2.number(8)))
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)
        await peer.call("Echo", StringValue())  # the loop has gone round: the slot is free
        client.request(11, "/t.Test/Echo", MESSAGE)
        assert (await client.trailers(11))["grpc-status"] == "0"


async def test_grpc_server_too_many_connections_closed(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer:
        path = tmp_path / "test.sock"
        async with raw(path), raw(path), raw(path):
            assert peer.server.connections == 3
            async with raw(path, wait_settings=False) as fourth:
                assert await fourth.ended() == Code.ENHANCE_YOUR_CALM
        await asyncio.wait_for(_until(lambda: peer.server.connections == 0), 30)
        assert (await peer.call("Echo", StringValue(value="again"))).value == "again"


async def test_grpc_server_buffered_request_bytes_bounded(tmp_path: Path) -> None:
    limits = Limits(request=1 << 20, calls=8, buffered=100_000)
    async with served(tmp_path, limits) as peer, raw(tmp_path / "test.sock") as client:
        for number in range(1, 15, 2):
            client.begin(number, "/t.Test/Measure")
            client.send(frame(FrameType.DATA, 0, number, struct.pack(">?L", False, 90_000) + bytes(16_000)))
        await client.until(lambda: bool(client.headers))
        assert {headers["grpc-status"] for headers in client.headers.values()} == {"8"}
        assert peer.server.buffered <= 100_000


@pytest.mark.looptime
async def test_grpc_server_incomplete_preface_closed_after_timeout(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", {}) as server:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(http2.PREFACE[:10])
        while await reader.read(100):
            pass
        assert server.connections == 0
        writer.close()


async def test_grpc_server_own_client_unary_and_stream(tmp_path: Path) -> None:
    async with served(tmp_path):
        connection = await connect_unix(str(tmp_path / "test.sock"))
        call = connection.call("/t.Test/Echo", MESSAGE, timeout=60)
        assert await call.wait_response() == MESSAGE
        assert call.status is not None
        assert call.status.code == "OK"
        stream = connection.call("/t.Test/Count", Int64Value(value=7).SerializeToString())
        seen = 0
        while await stream.read() is not None:
            seen += 1
        assert (seen, stream.status and stream.status.code) == (7, "ABORTED")
        connection.close(call.status)


async def test_grpc_server_shutdown_cancels_handlers_and_calls_unavailable(tmp_path: Path) -> None:
    service = Service()
    async with serving(tmp_path / "s", service.methods()):
        connection = await connect_unix(str(tmp_path / "s"))
        call = connection.call("/t.Test/Hang", MESSAGE)
        await asyncio.wait_for(service.begun.wait(), 30)
    assert service.cancelled.is_set()
    await call.wait_response()
    assert call.status is not None
    assert call.status.code == "UNAVAILABLE"


async def test_serving_stale_socket_replaced_and_foreign_file_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(path, {}), serving(path, Service().methods()):
        connection = await connect_unix(str(path))
        call = connection.call("/t.Test/Echo", MESSAGE)
        assert await call.wait_response() == MESSAGE
        connection.close(call.status or pytest.fail("no status"))
        path.rename(tmp_path / "moved")
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"


async def test_serving_invalid_socket_path_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot listen at"):
        async with serving(tmp_path / ("x" * 200), {}):
            pass
    with pytest.raises(OSError, match="cannot listen at"):
        async with serving(tmp_path / "no" / "folder", {}):
            pass


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)
