"""The runtime's end of a remote command or a forwarded port: SPDY on a real socket, played by a test."""

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable

from pykubelet.transport.spdy import Data, FrameReader, FrameWriter, Ping, Reset, data_header

UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
    b"X-Stream-Protocol-Version: %s\r\n\r\n"
)
SUCCESS = b'{"metadata":{},"status":"Success"}'


class SpdyPeer:
    """Streams by their type, and what was received on them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.streams: dict[str, int] = {}
        self.received: dict[str, bytearray] = {}
        self.ended: set[str] = set()
        self._reader = reader
        self._inflate = zlib.decompressobj()
        self._frames = FrameReader()
        self._head = b""

    async def wait_streams(self, *names: str) -> None:
        """Read the frames that open these streams; data that follows stays in the socket."""
        while set(self.streams) < set(names):
            header = await self._reader.readexactly(8)
            kind, length = struct.unpack(">II", header)
            assert kind == 0x80030001, header
            body = await self._reader.readexactly(length & 0xFFFFFF)
            (stream,) = struct.unpack_from(">I", body)
            block = self._inflate.decompress(body[10:])
            texts, position = [], 4
            while position < len(block):
                (size,) = struct.unpack_from(">I", block, position)
                texts.append(block[position + 4 : position + 4 + size].decode())
                position += 4 + size
            self.streams[dict(zip(texts[::2], texts[1::2], strict=True))["streamtype"]] = stream

    async def read_until(self, done: Callable[[], bool]) -> None:
        """Read frames until the condition holds or the client disconnects."""
        names = {number: name for name, number in self.streams.items()}
        while not done():
            data = await self._reader.read(65536)
            if not data:
                return
            self._frames.feed(data)
            for frame in self._frames.frames():
                match frame:
                    case Data(number, piece, last):
                        self.received.setdefault(names[number], bytearray()).extend(piece)
                        if last:
                            self.ended.add(names[number])
                    case Ping() | Reset():
                        pass

    async def send(self, name: str, data: bytes, *, last: bool = False) -> None:
        self.writer.write(data_header(self.streams[name], len(data), last=last) + data)
        await self.writer.drain()

    async def finish(self, status: bytes = SUCCESS) -> None:
        await self.send("error", status, last=True)

    async def ping(self) -> None:
        self.writer.write(FrameWriter().pong(Ping(2)))
        await self.writer.drain()


Command = Callable[[SpdyPeer], Awaitable[None]]


def command(
    run: Command, *names: str, protocol: str = "v4.channel.k8s.io"
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Play a streaming server that runs a command once these streams are open."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED % protocol.encode())
        peer = SpdyPeer(reader, writer)
        await peer.wait_streams(*names)
        await run(peer)

    return play
