"""A service on our gRPC server, and two clients for it: grpcio's, and one that writes frames itself."""

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue

from pykubelet.transport import http2
from pykubelet.transport.grpc_server import GrpcError, Limits, Server, StreamingMethod, UnaryMethod, serving
from pykubelet.transport.http2 import FrameType, Setting, frame

MESSAGE = StringValue(value="x").SerializeToString()

SHORT = Limits(request=1 << 20, calls=4, connections=3, buffered=2 << 20)


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

    def methods(self) -> dict[str, UnaryMethod | StreamingMethod]:
        return {
            "/t.Test/Echo": UnaryMethod(StringValue, self.echo),
            "/t.Test/Refuse": UnaryMethod(StringValue, self.refuse),
            "/t.Test/Break": UnaryMethod(StringValue, self.break_down),
            "/t.Test/Hang": UnaryMethod(StringValue, self.hang),
            "/t.Test/Blob": UnaryMethod(Int64Value, self.blob),
            "/t.Test/Measure": UnaryMethod(BytesValue, self.measure),
            "/t.Test/Count": StreamingMethod(Int64Value, self.count),
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
    assert server.buffered == 0


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
        self.send(frame(FrameType.HEADERS, http2.END_HEADERS | (1 if last else 0), number, block))

    def request(self, number: int, path: str, message: bytes, headers: Any = ()) -> None:
        self.begin(number, path, headers)
        body = struct.pack(">?L", False, len(message)) + message
        self.send(frame(FrameType.DATA, http2.END_STREAM, number, body))

    async def read(self) -> bool:
        """Take one frame; False at the end."""
        try:
            head = await self.reader.readexactly(http2.HEAD_BYTES)
            size, kind, flags, stream = http2.read_head(head, 0)
            payload = await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        if kind == FrameType.DATA:
            self.data[stream].append(len(payload))
        elif kind == FrameType.HEADERS:
            found = dict(self._decoder.decode(payload))
            self.headers.setdefault(stream, {}).update(found)  # type: ignore[arg-type]  # hpack's are str
        elif kind == FrameType.RST_STREAM:
            self.resets[stream] = http2.read_number(payload)
        elif kind == FrameType.GOAWAY:
            self.goaway = http2.read_number(payload[4:])
        elif kind == FrameType.PING and not flags & http2.ACK:
            self.send(frame(FrameType.PING, http2.ACK, 0, payload))
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
async def raw(path: Path, *, wait_settings: bool = True, window: int = 65_535) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    client = Raw(reader, writer)
    try:
        if wait_settings:
            client.send(http2.PREFACE, http2.settings({Setting.INITIAL_WINDOW_SIZE: window}))
            assert await client.read()  # its settings
        yield client
    finally:
        writer.close()
