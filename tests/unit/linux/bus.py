"""The other end of a D-Bus connection, for tests: well behaved, or as bad as is asked for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pykubelet.linux.dbus import (
    HEAD_BYTES,
    Message,
    MessageType,
    decode_message,
    encode_message,
    message_size,
)


class Peer:
    """One connection, as its other end sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._serial = 100

    async def welcome(self, answer: bytes = b"OK 0123456789abcdef\r\n") -> bytes:
        """Take the greeting, answer it, and give it."""
        said = await self._reader.readuntil(b"\r\n")
        self.write(answer)
        if answer.startswith(b"OK"):
            assert await self._reader.readuntil(b"\r\n") == b"BEGIN\r\n"
        return said

    async def read(self, *, nudges: bool = False) -> Message:
        """Take the next message; a client that waits longer than usual nudges, which most do not mind."""
        while (message := await self._next()).member == "Ping" and not nudges:
            pass
        return message

    async def _next(self) -> Message:
        head = await self._reader.readexactly(HEAD_BYTES)
        return decode_message(head + await self._reader.readexactly(message_size(head) - HEAD_BYTES))

    def answer(self, call: Message, signature: str = "", *body: object) -> None:
        self.send(
            Message(kind=MessageType.RETURN, serial=1, reply_to=call.serial, signature=signature, body=body)
        )

    def refuse(self, call: Message, name: str, text: str) -> None:
        error = Message(
            kind=MessageType.ERROR, serial=1, reply_to=call.serial, error=name, signature="s", body=(text,)
        )
        self.send(error)

    def signal(self, member: str, signature: str = "", *body: object) -> None:
        self.send(
            Message(
                kind=MessageType.SIGNAL,
                serial=1,
                path="/org/freedesktop/systemd1",
                interface="org.freedesktop.systemd1.Manager",
                member=member,
                signature=signature,
                body=body,
            )
        )

    def send(self, message: Message) -> None:
        self.write(encode_message(message))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def vanish(self) -> None:
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the other side has ended the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(4096):
                pass


@asynccontextmanager
async def listening(path: Path, serve: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[Path]:
    """Have somebody listen at a socket, who treats each connection in this way."""

    async def treat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await serve(Peer(reader, writer))
        finally:
            writer.close()

    server = await asyncio.start_unix_server(treat, path)
    try:
        yield path
    finally:
        server.close()
