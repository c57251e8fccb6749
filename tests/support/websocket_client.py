"""A WebSocket client that sends any frames, right or wrong."""

import asyncio
import os
import struct
from dataclasses import dataclass

FIN = 0x80
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def client_frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = True, length: int | None = None
) -> bytes:
    """Return a frame; `length` lies about the payload."""
    size = len(payload) if length is None else length
    flag = 0x80 if masked else 0
    head = bytes(((FIN if fin else 0) | opcode,))
    if size < 126:
        head += bytes((flag | size,))
    elif size < 2**16:
        head += bytes((flag | 126,)) + struct.pack(">H", size)
    else:
        head += bytes((flag | 127,)) + struct.pack(">Q", size)
    if not masked:
        return head + payload
    mask = os.urandom(4)
    repeated = mask * (len(payload) // 4 + 1)
    number = int.from_bytes(payload, "big") ^ int.from_bytes(repeated[: len(payload)], "big")
    return head + mask + number.to_bytes(len(payload), "big")


@dataclass
class WebSocketClient:
    """The client's end of an established WebSocket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, payload: bytes, opcode: int = BINARY) -> None:
        self.writer.write(client_frame(opcode, payload))
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """Return opcode and payload of the next frame; the server neither masks nor fragments."""
        first, second = await self.reader.readexactly(2)
        assert first & FIN
        assert not second & 0x80
        size = second
        if size == 126:
            (size,) = struct.unpack(">H", await self.reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", await self.reader.readexactly(8))
        return first & 0x0F, await self.reader.readexactly(size)

    async def receive_close(self) -> tuple[int, str]:
        """Return code and reason of the Close frame, after any other frames."""
        while True:
            opcode, payload = await self.receive()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big"), payload[2:].decode()

    async def collect(self) -> dict[int, bytes]:
        """Return what was received on each channel until the Close frame, which is answered."""
        channels: dict[int, bytearray] = {}
        while True:
            opcode, payload = await self.receive()
            if opcode == CLOSE:
                self.writer.write(client_frame(CLOSE, payload))
                return {channel: bytes(data) for channel, data in channels.items()}
            if opcode == BINARY:
                channels.setdefault(payload[0], bytearray()).extend(payload[1:])
