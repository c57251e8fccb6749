"""Client of the remote-command protocol (exec, attach) of the runtime's streaming server.

    async with connect(url, ["stdin", "stdout", "stderr"]) as command:
        await command.send("stdin", b"…", last=True)
        async for stream, data in command.output():
            ...
    command.result       # exit code, or the reason why the command did not run

Version 4 on SPDY/3.1. The runtime starts the command when all streams are open, and reports the result at
its end on the stream `error`, as an API `Status` object. CRI runtimes also serve WebSocket, but its v4
protocol cannot signal the end of input, so `… | pykubelet exec -i POD -- cat` would never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from pykubelet.transport.spdy import Data, FrameReader, FrameWriter, GoAway, Ping, Reset, SpdyError
from pykubelet.transport.stream_upgrade import StreamUnavailable, UpgradeRejected, connect_upgraded

PROTOCOL = "v4.channel.k8s.io"
_ERROR = "error"
_RECEIVE = 64 * 1024
_MAX_STATUS_BYTES = 64 * 1024
_MAX_UNSENT_BYTES = 64 * 1024
"""Bytes in the write buffer above which PINGs are not echoed."""
CLOSE_SECONDS = 5.0
"""Seconds in which the runtime must read the input that was sent before the streams are closed."""


class StreamError(Exception):
    """Raised when the streams cannot be opened or break; the text is one line."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit code of a command that ran."""

    code: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command."""

    exit_code: int
    message: str = ""
    """Reason why the command could not run; empty for one that ran, whatever its exit code."""


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


def parse_status(document: bytes) -> ExitStatus | str:
    """Parse the `Status` object that the runtime sends at a command's end.

    Return the exit code, or the reason why the command did not run or its end is unknown.
    """
    try:
        status = msgspec.json.decode(document, type=_Status)
    except msgspec.MsgspecError:
        return document.decode(errors="replace") or "the connection ended before the command did"
    if status.status == "Success":
        return ExitStatus(0)
    if status.reason == "NonZeroExitCode":
        for cause in status.details.causes:
            if cause.reason == "ExitCode" and cause.message.isascii() and cause.message.isdigit():
                return ExitStatus(int(cause.message[:10]))
    return status.message or "the runtime does not say why"


def read_result(document: bytes) -> Result:
    """Return the result of a command from the `Status` object that ended it."""
    found = parse_status(document)
    return Result(_shell_code(found), found) if isinstance(found, str) else Result(found.code)


def _shell_code(message: str) -> int:
    """Return the exit code that a shell uses for a command that cannot be run."""
    if "executable file not found" in message or "no such file or directory" in message:
        return 127
    return 126 if "permission denied" in message else 1


class RemoteCommand:
    """Connection to a running command."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameWriter()
        self._received = FrameReader()
        self._numbers: dict[str, int] = {}
        self._status = b""

    @property
    def result(self) -> Result:
        """Result of the command; valid after `output` has ended."""
        return read_result(self._status)

    async def open(self, streams: Iterable[str]) -> None:
        """Open the `error` stream and the named streams; the command starts with the last one."""
        for name in (_ERROR, *streams):
            number, frame = self._frames.open_stream({"streamType": name})
            self._numbers[name] = number
            self._writer.write(frame)
        await self._writer.drain()

    async def send(self, stream: str, data: bytes, *, last: bool = False) -> None:
        """Send bytes; `last` closes the stream. A command that has already ended is not an error."""
        with suppress(ConnectionError):
            self._writer.write(self._frames.data(self._numbers[stream], data, last=last))
            await self._writer.drain()

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the name of the stream and the data of each output, until the command has ended.

        Raises StreamError.
        """
        names = {number: name for name, number in self._numbers.items()}
        try:
            while received := await self._receive():
                self._received.feed(received)
                for frame in self._received.frames():
                    match frame:
                        case Data(number, data, last):
                            name = names.get(number, "")
                            if name == _ERROR:
                                self._status += data[: _MAX_STATUS_BYTES - len(self._status)]
                                if last:
                                    return
                            elif data:
                                yield name, data
                        case Reset(number):
                            if names.get(number) == _ERROR:
                                return
                        case Ping():
                            write_pong(self._writer, self._frames, frame)
                        case GoAway():
                            return
        except SpdyError as err:
            raise StreamError(f"the runtime's stream is not SPDY: {err}") from err

    async def _receive(self) -> bytes:
        try:
            return await self._reader.read(_RECEIVE)
        except ConnectionError:
            return b""


def write_pong(writer: asyncio.StreamWriter, frames: FrameWriter, ping: Ping) -> None:
    """Echo a PING, unless the runtime does not read: the replies would accumulate in memory."""
    if writer.transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
        writer.write(frames.pong(ping))


@asynccontextmanager
async def connect(url: str, streams: Iterable[str]) -> AsyncIterator[RemoteCommand]:
    """Start the command that the runtime prepared at `url`; exiting the context closes its streams.

    `streams` are those of the Exec request: `stdin`, `stdout`, `stderr`, and `resize` for a terminal.
    Raises StreamError.
    """
    async with connect_spdy(url, PROTOCOL) as (reader, writer):
        command = RemoteCommand(reader, writer)
        await command.open(streams)
        yield command


@asynccontextmanager
async def connect_spdy(
    url: str, protocol: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Upgrade a connection to the runtime's streaming server to SPDY. Raises StreamError."""
    try:
        connection = await connect_upgraded(url, "SPDY/3.1", [("X-Stream-Protocol-Version", protocol)])
    except StreamUnavailable as err:
        raise StreamError(f"the runtime's streaming server at {url} {err}") from err
    except UpgradeRejected as err:
        raise StreamError(f"the runtime refuses the streams: {err.body.strip() or err}") from err
    reader, writer = connection.streams()
    try:
        if connection.header("X-Stream-Protocol-Version") != protocol:
            raise StreamError(f"the runtime's streaming server does not implement {protocol}")
        yield reader, writer
    except ConnectionError as err:
        raise StreamError(f"the connection to the runtime broke: {err}") from err
    finally:
        writer.close()
        try:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
