"""A command that runs in a container, and its streams: the remote-command protocol v4 over SPDY.

    async with connect(url, streams={"stdin", "stdout", "stderr"}) as command:
        await command.send("stdin", b"…", last=True)
        async for stream, data in command.output():
            ...
    command.result       # how it ended

The runtime begins when all streams of the command are open, and says at its end on the stream
`error` how it went, as a `Status` document of the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from pykubelet.cli.spdy import Data, FrameReader, FrameWriter, GoAway, Ping, Reset

PROTOCOL = "v4.channel.k8s.io"
_ERROR = "error"
_RECEIVE = 64 * 1024
_LONGEST_ANSWER = 64 * 1024


class StreamError(Exception):
    """The command's streams could not be opened or broke; one line."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    exit_code: int
    message: str = ""
    """Why it could not be run; empty for a command that ran, however it ended."""


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] = []


class _Status(msgspec.Struct):
    status: str = ""
    message: str = ""
    reason: str = ""
    details: _Details = msgspec.field(default_factory=_Details)


def read_result(document: bytes) -> Result:
    """Read what the runtime said at a command's end."""
    try:
        said = msgspec.json.decode(document, type=_Status)
    except msgspec.MsgspecError:
        return Result(1, document.decode(errors="replace") or "the connection ended before the command did")
    if said.status == "Success":
        return Result(0)
    if said.reason == "NonZeroExitCode":
        for cause in said.details.causes:
            if cause.reason == "ExitCode" and cause.message.isdigit():
                return Result(int(cause.message))
    return Result(_shell_code(said.message), said.message or "the runtime does not say why")


def _shell_code(message: str) -> int:
    """The exit code that a shell gives for a command that cannot be run."""
    if "executable file not found" in message or "no such file or directory" in message:
        return 127
    return 126 if "permission denied" in message else 1


class RemoteCommand:
    """A command under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameWriter()
        self._received = FrameReader()
        self._numbers: dict[str, int] = {}
        self._report = b""

    @property
    def result(self) -> Result:
        """How the command ended; true after `output` has ended."""
        return read_result(self._report)

    async def open(self, streams: Iterable[str]) -> None:
        """Open the streams by name; the command begins with the last one."""
        for name in (_ERROR, *streams):
            number, frame = self._frames.open_stream({"streamType": name})
            self._numbers[name] = number
            self._writer.write(frame)
        await self._writer.drain()

    async def send(self, stream: str, data: bytes, *, last: bool = False) -> None:
        """Send bytes; `last` closes the stream. It is no error if the command has ended by then."""
        with suppress(ConnectionError):
            self._writer.write(self._frames.data(self._numbers[stream], data, last=last))
            await self._writer.drain()

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Give what the command writes, with the name of the stream, until it has ended."""
        names = {number: name for name, number in self._numbers.items()}
        while received := await self._receive():
            for frame in self._received.feed(received):
                match frame:
                    case Data(number, data, last):
                        name = names.get(number, "")
                        if name == _ERROR:
                            self._report += data
                            if last:
                                return
                        elif data:
                            yield name, data
                    case Reset(number):
                        if names.get(number) == _ERROR:
                            return
                    case Ping():
                        self._writer.write(self._frames.pong(frame))
                    case GoAway():
                        return

    async def _receive(self) -> bytes:
        try:
            return await self._reader.read(_RECEIVE)
        except ConnectionError:
            return b""


@asynccontextmanager
async def connect(url: str, streams: Iterable[str]) -> AsyncIterator[RemoteCommand]:
    """Begin the command that the runtime has prepared at `url`; leaving closes its streams.

    `streams` are those that it was prepared with: `stdin`, `stdout`, `stderr`, and `resize` for a
    terminal. Raises StreamError.
    """
    where = urlsplit(url)
    if where.scheme != "http" or where.hostname is None:
        raise StreamError(f"the runtime serves commands at {url}: only plain HTTP is supported")
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port or 80)
    except OSError as err:
        raise StreamError(f"the runtime's streaming server at {url} cannot be reached: {err}") from err
    try:
        await _upgrade(reader, writer, where.path + (f"?{where.query}" if where.query else ""), where.netloc)
        command = RemoteCommand(reader, writer)
        await command.open(streams)
        yield command
    except ConnectionError as err:
        raise StreamError(f"the connection to the runtime broke: {err}") from err
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, host: str) -> None:
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: Upgrade",
        "Upgrade: SPDY/3.1",
        f"X-Stream-Protocol-Version: {PROTOCOL}",
        "Content-Length: 0",
    )
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        raise StreamError("the runtime's streaming server does not answer with HTTP") from err
    status, *headers = head.decode("latin-1").split("\r\n")
    agreed = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in headers)}
    if status.split()[1:2] != ["101"] or agreed.get("x-stream-protocol-version") != PROTOCOL:
        body = (await reader.read(_LONGEST_ANSWER)).decode(errors="replace").strip()
        raise StreamError(f"the runtime refuses the command's streams: {body or status}")
