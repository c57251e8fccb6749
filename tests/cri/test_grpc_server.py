"""Our gRPC server against real clients: grpcio's, our own, and some that keep to no rule."""

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.cri import http2
from pykubelet.cri.connection import connect_unix
from pykubelet.cri.grpc_server import GrpcError, Limits, Server, Streaming, Unary, serving
from pykubelet.cri.http2 import Kind, Setting, frame
from pykubelet.cri.server_rules import Code, read_timeout

MESSAGE = StringValue(value="x").SerializeToString()
SHORT = Limits(request=1 << 20, calls=4, connections=3, held=2 << 20)


class Service:
    """Methods that do as they are told, and say what became of them."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.begun = asyncio.Event()
        self.yielded = 0

    async def echo(self, request: StringValue) -> StringValue:
        return StringValue(value=request.value)

    async def refuse(self, request: StringValue) -> StringValue:
        raise GrpcError(request.value, "nein: 100 % überfüllt\n")

    async def break_down(self, request: StringValue) -> StringValue:
        raise RuntimeError("a bug")

    async def hang(self, request: StringValue) -> StringValue:
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
            return StringValue()
        finally:
            self.cancelled.set()

    async def blob(self, request: Int64Value) -> BytesValue:
        return BytesValue(value=b"\xa5" * request.value)

    async def measure(self, request: BytesValue) -> Int64Value:
        return Int64Value(value=len(request.value))

    async def count(self, request: Int64Value) -> AsyncGenerator[BytesValue, None]:
        self.begun.set()
        try:
            for number in range(request.value):
                self.yielded = number + 1
                yield BytesValue(value=number.to_bytes(8, "big") + bytes(20_000))
            if request.value % 10 == 7:
                raise GrpcError("ABORTED", "enough")
        finally:
            self.cancelled.set()

    def methods(self) -> dict[str, Unary | Streaming]:
        return {
            "/t.Test/Echo": Unary(StringValue, self.echo),
            "/t.Test/Refuse": Unary(StringValue, self.refuse),
            "/t.Test/Break": Unary(StringValue, self.break_down),
            "/t.Test/Hang": Unary(StringValue, self.hang),
            "/t.Test/Blob": Unary(Int64Value, self.blob),
            "/t.Test/Measure": Unary(BytesValue, self.measure),
            "/t.Test/Count": Streaming(Int64Value, self.count),
        }


class Peer:
    """A client of grpcio's."""

    def __init__(self, channel: Any, service: Service, server: Server) -> None:
        self.channel, self.service, self.server = channel, service, server

    async def call(self, method: str, request: Any, answer: Any = StringValue, **how: Any) -> Any:
        made = self.channel.unary_unary(
            f"/t.Test/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await made(request, **{"timeout": 60, **how})

    def stream(self, method: str, request: Any, answer: Any = BytesValue) -> Any:
        made = self.channel.unary_stream(
            f"/t.Test/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return made(request, timeout=60)


@asynccontextmanager
async def served(folder: Path, limits: Limits | None = None) -> AsyncIterator[Peer]:
    service, path = Service(), folder / "test.sock"
    sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with serving(path, service.methods(), limits or Limits()) as server:
        async with grpc.aio.insecure_channel(f"unix://{path}", options=sizes) as channel:
            yield Peer(channel, service, server)
    assert not path.exists()
    assert server.held == 0


async def test_calls_are_answered_by_name(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        assert (await peer.call("Echo", StringValue(value="grüß"))).value == "grüß"
        answers = await asyncio.gather(*(peer.call("Echo", StringValue(value=str(n))) for n in range(40)))
        assert [answer.value for answer in answers] == [str(n) for n in range(40)]


@pytest.mark.parametrize("code", ["NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNKNOWN"])
async def test_a_handler_refuses_with_a_status_and_words(tmp_path: Path, code: str) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Refuse", StringValue(value=code))
        assert caught.value.code().name == code
        assert caught.value.details() == "nein: 100 % überfüllt\n"


async def test_a_handlers_bug_is_its_callers_answer_only(tmp_path: Path) -> None:
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
async def test_unknown_methods_are_unimplemented(tmp_path: Path, path: str, text: str) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.channel.unary_unary(path)(MESSAGE, timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == text


async def test_a_request_that_cannot_be_decoded(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.channel.unary_unary("/t.Test/Echo")(b"\xff\xff\xff", timeout=60)
        assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_deadline_ends_call_and_handler(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Hang", StringValue(), timeout=0.2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_the_server_keeps_deadlines_itself(tmp_path: Path) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        client.request(1, "/t.Test/Hang", MESSAGE, [("grpc-timeout", "50m")])
        headers = await client.trailers(1)
        assert headers["grpc-status"] == "4"
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_a_client_that_leaves_stops_its_handler(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        call = asyncio.ensure_future(peer.call("Hang", StringValue()))
        await asyncio.wait_for(peer.service.begun.wait(), 30)
        call.cancel()
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_large_answers_and_requests_flow(tmp_path: Path) -> None:
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


async def test_a_request_that_is_too_large(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Measure", BytesValue(value=bytes(2_000_000)), Int64Value)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await peer.call("Echo", StringValue(value="on"))).value == "on"


async def test_compressed_requests_are_refused_in_words(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.call("Echo", StringValue(value="a" * 5000), compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("count", [0, 3, 300])
async def test_streams(tmp_path: Path, count: int) -> None:
    async with served(tmp_path) as peer:
        seen = [
            int.from_bytes(one.value[:8], "big")
            async for one in peer.stream("Count", Int64Value(value=count))
        ]
        assert seen == list(range(count))


async def test_a_stream_that_ends_with_a_status(tmp_path: Path) -> None:
    async with served(tmp_path) as peer:
        call, seen = peer.stream("Count", Int64Value(value=27)), 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                seen += 1
        assert (caught.value.code().name, caught.value.details(), seen) == ("ABORTED", "enough", 27)


async def test_a_stream_waits_for_a_slow_reader_and_ends_with_it(tmp_path: Path) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock", window=50_000) as client:
        client.request(1, "/t.Test/Count", Int64Value(value=1000).SerializeToString())
        await client.until(lambda: sum(client.data[1]) >= 50_000)
        await peer.call("Echo", StringValue(value="others are served meanwhile"))
        assert sum(client.data[1]) == 50_000
        assert peer.service.yielded == 3
        client.send(frame(Kind.WINDOW_UPDATE, 0, 1, http2.number(20_000)))
        await client.until(lambda: sum(client.data[1]) >= 65_535)  # the connection's own window
        client.send(frame(Kind.RST_STREAM, 0, 1, http2.number(8)))
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)


async def test_too_many_calls_wait_or_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer, raw(tmp_path / "test.sock") as client:
        for number in (1, 3, 5, 7):
            client.request(number, "/t.Test/Hang", MESSAGE)
        client.request(9, "/t.Test/Echo", MESSAGE)
        await client.until(lambda: client.resets.get(9) is not None)
        assert client.resets == {9: Code.REFUSED_STREAM}
        client.send(frame(Kind.RST_STREAM, 0, 1, http2.number(8)))
        await asyncio.wait_for(peer.service.cancelled.wait(), 30)
        await peer.call("Echo", StringValue())  # the loop has gone round: the slot is free
        client.request(11, "/t.Test/Echo", MESSAGE)
        assert (await client.trailers(11))["grpc-status"] == "0"


async def test_too_many_connections_are_turned_away(tmp_path: Path) -> None:
    async with served(tmp_path, SHORT) as peer:
        path = tmp_path / "test.sock"
        async with raw(path), raw(path), raw(path):
            assert peer.server.connections == 3
            async with raw(path, greeted=False) as fourth:
                assert await fourth.ended() == Code.CALM_DOWN
        await asyncio.wait_for(_until(lambda: peer.server.connections == 0), 30)
        assert (await peer.call("Echo", StringValue(value="again"))).value == "again"


async def test_requests_in_memory_are_bounded(tmp_path: Path) -> None:
    limits = Limits(request=1 << 20, calls=8, held=100_000)
    async with served(tmp_path, limits) as peer, raw(tmp_path / "test.sock") as client:
        for number in range(1, 15, 2):
            client.begin(number, "/t.Test/Measure")
            client.send(frame(Kind.DATA, 0, number, struct.pack(">?L", False, 90_000) + bytes(16_000)))
        await client.until(lambda: bool(client.headers))
        assert {headers["grpc-status"] for headers in client.headers.values()} == {"8"}
        assert peer.server.held <= 100_000


@pytest.mark.looptime
async def test_a_silent_client_is_not_waited_for(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", {}) as server:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(http2.PREFACE[:10])
        while await reader.read(100):
            pass
        assert server.connections == 0
        writer.close()


async def test_our_own_client_understands_it(tmp_path: Path) -> None:
    async with served(tmp_path):
        connection = await connect_unix(str(tmp_path / "test.sock"))
        call = connection.call("/t.Test/Echo", MESSAGE, timeout=60)
        assert await call.answer() == MESSAGE
        assert call.status is not None
        assert call.status.code == "OK"
        stream = connection.call("/t.Test/Count", Int64Value(value=7).SerializeToString())
        seen = 0
        while await stream.read() is not None:
            seen += 1
        assert (seen, stream.status and stream.status.code) == (7, "ABORTED")
        connection.close(call.status)


async def test_the_end_of_the_server_ends_calls(tmp_path: Path) -> None:
    service = Service()
    async with serving(tmp_path / "s", service.methods()):
        connection = await connect_unix(str(tmp_path / "s"))
        call = connection.call("/t.Test/Hang", MESSAGE)
        await asyncio.wait_for(service.begun.wait(), 30)
    assert service.cancelled.is_set()
    await call.answer()
    assert call.status is not None
    assert call.status.code == "UNAVAILABLE"


async def test_a_socket_of_old_is_replaced_and_anothers_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(path, {}), serving(path, Service().methods()):
        connection = await connect_unix(str(path))
        call = connection.call("/t.Test/Echo", MESSAGE)
        assert await call.answer() == MESSAGE
        connection.close(call.status or pytest.fail("no status"))
        path.rename(tmp_path / "moved")
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"


async def test_a_path_that_cannot_be_a_socket(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot listen at"):
        async with serving(tmp_path / ("x" * 200), {}):
            pass
    with pytest.raises(OSError, match="cannot listen at"):
        async with serving(tmp_path / "no" / "folder", {}):
            pass


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9), ("0S", 0)]
    + [(bad, None) for bad in ("", "S", "1", "1s", "-1S", "123456789S", "1.5S", "\u0661S")],
)
def test_timeouts(text: str, seconds: float | None) -> None:
    assert read_timeout(text) == (pytest.approx(seconds) if seconds is not None else None)


# Clients that keep to no rule


class Raw:
    """A client that writes frames itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import hpack

        self.reader, self.writer = reader, writer
        self.data: dict[int, list[int]] = defaultdict(list)
        self.headers: dict[int, dict[str, str]] = {}
        self.resets: dict[int, int] = {}
        self.goaway: int | None = None
        self._decoder = hpack.Decoder()

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def begin(self, number: int, path: str, headers: Any = (), *, last: bool = False) -> None:
        block = http2.request_headers(path, "localhost") + http2.more_headers(headers)
        self.send(frame(Kind.HEADERS, http2.END_HEADERS | (1 if last else 0), number, block))

    def request(self, number: int, path: str, message: bytes, headers: Any = ()) -> None:
        self.begin(number, path, headers)
        body = struct.pack(">?L", False, len(message)) + message
        self.send(frame(Kind.DATA, http2.END_STREAM, number, body))

    async def read(self) -> bool:
        """Take one frame; False at the end."""
        try:
            head = await self.reader.readexactly(http2.HEAD_BYTES)
            size, kind, flags, stream = http2.read_head(head, 0)
            payload = await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        if kind == Kind.DATA:
            self.data[stream].append(len(payload))
        elif kind == Kind.HEADERS:
            found = dict(self._decoder.decode(payload))
            self.headers.setdefault(stream, {}).update(found)  # type: ignore[arg-type]  # hpack's are str
        elif kind == Kind.RST_STREAM:
            self.resets[stream] = http2.read_number(payload)
        elif kind == Kind.GOAWAY:
            self.goaway = http2.read_number(payload[4:])
        elif kind == Kind.PING and not flags & http2.ACK:
            self.send(frame(Kind.PING, http2.ACK, 0, payload))
        return True

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert await self.read(), "the connection ended"

    async def trailers(self, stream: int) -> dict[str, str]:
        await self.until(lambda: "grpc-status" in self.headers.get(stream, {}))
        return self.headers[stream]

    async def ended(self) -> int | None:
        """Wait for the end; gives the code of the farewell."""
        async with asyncio.timeout(60):
            while await self.read():
                pass
        return self.goaway


@asynccontextmanager
async def raw(path: Path, *, greeted: bool = True, window: int = 65_535) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    client = Raw(reader, writer)
    try:
        if greeted:
            client.send(http2.PREFACE, http2.settings({Setting.INITIAL_WINDOW_SIZE: window}))
            assert await client.read()  # its settings
        yield client
    finally:
        writer.close()


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


_HEAD = http2.request_headers("/t.Test/Echo", "localhost")
_OPEN = frame(Kind.HEADERS, http2.END_HEADERS, 1, _HEAD)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(Kind.PING, 0, 0, b"short"), Code.FRAME_SIZE),
        (frame(Kind.PING, 0, 3, bytes(8)), Code.PROTOCOL),
        (frame(Kind.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE),
        (frame(Kind.SETTINGS, http2.ACK, 0, bytes(6)), Code.FRAME_SIZE),
        (http2.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}), Code.FLOW_CONTROL),
        (http2.settings({Setting.MAX_FRAME_SIZE: 100}), Code.PROTOCOL),
        (frame(Kind.HEADERS, http2.END_HEADERS, 2, _HEAD), Code.PROTOCOL),
        (frame(Kind.HEADERS, http2.END_HEADERS, 0, _HEAD), Code.PROTOCOL),
        (frame(Kind.HEADERS, http2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION),
        (frame(Kind.HEADERS, http2.END_HEADERS | http2.PADDED, 1, b"\xff"), Code.PROTOCOL),
        (frame(Kind.HEADERS, 0, 1, _HEAD) + frame(Kind.PING, 0, 0, bytes(8)), Code.PROTOCOL),
        (frame(Kind.HEADERS, 0, 1, b"") + frame(Kind.CONTINUATION, 0, 1, b"") * 9, Code.CALM_DOWN),
        (frame(Kind.HEADERS, 0, 1, bytes(16384)) + frame(Kind.CONTINUATION, 0, 1, b"x"), Code.CALM_DOWN),
        (frame(Kind.CONTINUATION, http2.END_HEADERS, 1, _HEAD), Code.PROTOCOL),
        (frame(Kind.DATA, 0, 5, b"x"), Code.PROTOCOL),
        (frame(Kind.RST_STREAM, 0, 5, bytes(4)), Code.PROTOCOL),
        (frame(Kind.WINDOW_UPDATE, 0, 0, bytes(4)), Code.PROTOCOL),
        (frame(Kind.WINDOW_UPDATE, 0, 0, http2.number(2**31 - 1)), Code.FLOW_CONTROL),
        (frame(Kind.PUSH_PROMISE, 0, 1, bytes(8)), Code.PROTOCOL),
        (struct.pack(">BHBBL", 1, 0, 0, 0, 1), Code.FRAME_SIZE),
    ],
)
async def test_who_breaks_the_rules_is_told_which_and_cut_off(
    tmp_path: Path, frames: bytes, code: Code
) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        client.send(frames)
        assert await client.ended() == code
        assert (await peer.call("Echo", StringValue(value="others go on"))).value == "others go on"


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        (frame(Kind.DATA, http2.END_STREAM, 1, b""), "13"),
        (frame(Kind.DATA, http2.END_STREAM, 1, b"\0\0\0\0\5abc"), "13"),
        (frame(Kind.DATA, http2.END_STREAM, 1, b"\0\0\0\0\1abc"), "13"),
        (frame(Kind.DATA, 0, 1, b"\1\0\0\0\1a"), "12"),
        (frame(Kind.DATA, 0, 1, b"\0\xff\xff\xff\xff"), "8"),
    ],
)
async def test_requests_that_are_none_end_with_a_status(tmp_path: Path, frames: bytes, status: str) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        client.send(_OPEN, frames)
        assert (await client.trailers(1))["grpc-status"] == status
        client.request(3, "/t.Test/Echo", MESSAGE)
        assert (await client.trailers(3))["grpc-status"] == "0"


async def test_trailers_of_the_client_complete_its_request(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        body = struct.pack(">?L", False, len(MESSAGE)) + MESSAGE
        client.send(_OPEN, frame(Kind.DATA, http2.PADDED, 1, b"\3" + body + bytes(3)))
        trailers = http2.more_headers([("x", "y")])
        client.send(frame(Kind.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, trailers))
        assert (await client.trailers(1))["grpc-status"] == "0"


async def test_what_is_not_grpc_is_told_so_in_http(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        get = b"\x82\x86\x84" + http2.more_headers([(":authority", "x")])
        client.send(frame(Kind.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, get))
        post = b"\x83\x86\x84" + http2.more_headers([("content-type", "application/json")])
        client.send(frame(Kind.HEADERS, http2.END_HEADERS, 3, post))
        await client.until(lambda: len(client.headers) == 2)
        assert [client.headers[number][":status"] for number in (1, 3)] == ["405", "415"]


async def test_http1_is_turned_away(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock", greeted=False) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.ended() == Code.PROTOCOL


async def test_a_client_that_only_pings_and_never_reads_is_not_read_from(tmp_path: Path) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        ping = frame(Kind.PING, 0, 0, bytes(8)) * 4096
        sent = 0
        while sent < 64 << 20:
            client.send(ping)
            try:
                await asyncio.wait_for(client.writer.drain(), 2)
            except TimeoutError:
                break
            sent += len(ping)
        assert sent < 64 << 20
        assert (await peer.call("Echo", StringValue(value="others"))).value == "others"


_frames = st.builds(
    lambda kind, flags, stream, payload: frame(kind, flags, stream, payload),
    st.sampled_from(list(Kind)),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 37, 255]),
    st.sampled_from([0, 1, 1, 3, 5, 7, 2, 2**31 - 1]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([_HEAD, b"\0\0\0\0\3" + MESSAGE, bytes(4), bytes(8), http2.number(70_000), b""]),
    ),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(_frames, max_size=25), preface=st.sampled_from([b"", b"", b"x"]), cut=st.integers(1, 64)
)
def test_no_frames_break_the_server(tmp_path: Path, frames: list[bytes], preface: bytes, cut: int) -> None:
    async def run() -> None:
        service = Service()
        async with serving(tmp_path / "fuzz", service.methods(), SHORT) as server:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fuzz"))
            data = preface + http2.PREFACE + http2.settings({}) + b"".join(frames)
            with contextlib.suppress(ConnectionError):  # it is right to cut us off
                for at in range(0, len(data), cut * 16):
                    writer.write(data[at : at + cut * 16])
                    await asyncio.sleep(0)
                writer.write_eof()
                async with asyncio.timeout(60):
                    while await reader.read(65536):
                        pass
            writer.close()
            connection = await connect_unix(str(tmp_path / "fuzz"))
            call = connection.call("/t.Test/Echo", MESSAGE, timeout=60)
            assert await call.answer() == MESSAGE
            connection.close(call.status or pytest.fail("no status"))
        assert (server.held, server.connections) == (0, 0)

    asyncio.run(run())
