"""`pykubelet exec`: runs a command in a container, with its input, output and exit code.

    async with connect(url, streams={"stdin", "stdout", "stderr"}) as command:
        await command.send("stdin", b"…", last=True)
        async for stream, data in command.output():
            ...
    command.result       # exit code, or the reason why the command did not run

The command is prepared with the CRI call Exec and run over the remote-command protocol v4 on SPDY/3.1. The
runtime starts it when all streams are open, and reports the result at its end on the stream `error`, as an
API `Status` object. CRI runtimes also serve WebSocket, but its v4 protocol cannot signal the end of input,
so `… | pykubelet exec -i POD -- cat` would never end.

FrameReader and FrameWriter implement the part of SPDY that a remote-command client needs, without sockets.
Headers from the server are not decompressed (that needs the protocol's dictionary), and there is no flow
control, because the servers do not implement it.

With a terminal, raw mode sends every key, Ctrl-C included, to the command; the terminal's settings are
restored however the process ends, except by SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import termios
import tty
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.cli.client import NodeClient, choose_container, choose_pod, run_command
from pykubelet.cli.errors import print_error
from pykubelet.cli.logs import container_status
from pykubelet.cli.printers import escape_unprintable, termination_reason
from pykubelet.standalone.instance import Instance
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope

_BLOCK = 32 * 1024


@contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Put a terminal into raw mode; restore its settings on exit."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def terminal_sizes(fd: int) -> AsyncIterator[bytes]:
    """Yield the terminal's size, initially and after each change, as JSON of the remote-command protocol."""
    changed = asyncio.Event()
    changed.set()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while await changed.wait():
            changed.clear()
            size = os.get_terminal_size(fd)
            yield json.dumps({"Width": size.columns, "Height": size.lines}).encode()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def read_input(fd: int) -> AsyncIterator[bytes]:
    """Yield the data read from a terminal, pipe or file, until its end."""
    while True:
        await _readable(fd)
        try:
            data = os.read(fd, _BLOCK)
        except BlockingIOError:
            continue
        if not data:
            return
        yield data


async def _readable(fd: int) -> None:
    """Wait until the descriptor is readable; it stays blocking, because the parent shell may share it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:
        return  # epoll rejects regular files, which are always readable
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all data; block until it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


_CONTROL = 0x8000
_VERSION = 3
_SYN_STREAM, _RST_STREAM, _PING, _GOAWAY = 1, 3, 6, 7
_FIN = 0x01
_HEADER = struct.Struct(">II")
_LENGTH = 0xFFFFFF
_STREAM_ID = 0x7FFFFFFF
MAX_DATA_BYTES = 16 * 1024
"""Maximum bytes per data frame, so that the streams interleave."""


@dataclass(frozen=True, slots=True)
class Data:
    """Data frame; `last` is the FIN flag."""

    stream: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """RST_STREAM frame."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ping:
    """PING frame, to be echoed with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class GoAway:
    """GOAWAY frame: the peer closes the connection."""


Frame = Data | Reset | Ping | GoAway


class FrameReader:
    """Incremental parser of SPDY frames; irrelevant frame types are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Add received bytes and yield the frames that are complete."""
        self._buffer += received
        while len(self._buffer) >= _HEADER.size:
            first, second = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + (second & _LENGTH)
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            if frame := _read(first, second >> 24, payload):
                yield frame


class FrameWriter:
    """Encoder of SPDY frames; all headers of a connection share one compression context."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj()
        self._next_stream = 1

    def open_stream(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the number of a new stream and the SYN_STREAM frame that opens it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        pairs = b"".join(_text(name.lower()) + _text(value) for name, value in headers.items())
        block = self._compressor.compress(struct.pack(">I", len(headers)) + pairs)
        block += self._compressor.flush(zlib.Z_SYNC_FLUSH)
        # No associated stream, priority 0, slot 0.
        return stream, _control(_SYN_STREAM, struct.pack(">IIH", stream, 0, 0) + block)

    def data(self, stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Return bytes as data frames of a stream; `last` closes the sending half."""
        pieces = [data[start : start + MAX_DATA_BYTES] for start in range(0, len(data), MAX_DATA_BYTES)] or [
            b""
        ]
        flags = [0] * (len(pieces) - 1) + [_FIN if last else 0]
        return b"".join(
            _HEADER.pack(stream, flag << 24 | len(piece)) + piece
            for piece, flag in zip(pieces, flags, strict=True)
        )

    def pong(self, ping: Ping) -> bytes:
        """Return the reply to a PING."""
        return _control(_PING, struct.pack(">I", ping.number))


def _control(kind: int, payload: bytes) -> bytes:
    return _HEADER.pack((_CONTROL | _VERSION) << 16 | kind, len(payload)) + payload


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">I", len(encoded)) + encoded


def _read(first: int, flags: int, payload: bytes) -> Frame | None:
    if not first >> 31:
        return Data(first & _STREAM_ID, payload, bool(flags & _FIN))
    kind = first & 0xFFFF
    if kind == _GOAWAY:
        return GoAway()
    if len(payload) < 4 or kind not in (_RST_STREAM, _PING):
        return None
    (number,) = struct.unpack_from(">I", payload)
    return Ping(number) if kind == _PING else Reset(number & _STREAM_ID)


PROTOCOL = "v4.channel.k8s.io"
_ERROR = "error"
_RECEIVE = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024


class StreamError(Exception):
    """Raised when the command's streams cannot be opened or break; the text is one line."""


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


def read_result(document: bytes) -> Result:
    """Parse the `Status` object that the runtime sends at a command's end."""
    try:
        status = msgspec.json.decode(document, type=_Status)
    except msgspec.MsgspecError:
        return Result(1, document.decode(errors="replace") or "the connection ended before the command did")
    if status.status == "Success":
        return Result(0)
    if status.reason == "NonZeroExitCode":
        for cause in status.details.causes:
            if cause.reason == "ExitCode" and cause.message.isdigit():
                return Result(int(cause.message))
    return Result(_shell_code(status.message), status.message or "the runtime does not say why")


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
        self._report = b""

    @property
    def result(self) -> Result:
        """Result of the command; valid after `output` has ended."""
        return read_result(self._report)

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
        """Yield the name of the stream and the data of each output, until the command has ended."""
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
    """Start the command that the runtime prepared at `url`; exiting the context closes its streams.

    `streams` are those of the Exec request: `stdin`, `stdout`, `stderr`, and `resize` for a terminal.
    Raises StreamError.
    """
    stream_url = urlsplit(url)
    if stream_url.scheme != "http" or stream_url.hostname is None:
        raise StreamError(f"the runtime serves commands at {url}: only plain HTTP is supported")
    try:
        reader, writer = await asyncio.open_connection(stream_url.hostname, stream_url.port or 80)
    except OSError as err:
        raise StreamError(f"the runtime's streaming server at {url} cannot be reached: {err}") from err
    try:
        await _upgrade(
            reader,
            writer,
            stream_url.path + (f"?{stream_url.query}" if stream_url.query else ""),
            stream_url.netloc,
        )
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
    response_headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in headers)
    }
    if status.split()[1:2] != ["101"] or response_headers.get("x-stream-protocol-version") != PROTOCOL:
        body = (await reader.read(_MAX_ERROR_BYTES)).decode(errors="replace").strip()
        raise StreamError(f"the runtime refuses the command's streams: {body or status}")


PROGRAM = "pykubelet exec"
_CALL_TIMEOUT = Duration.from_seconds(30)
_FILES = {"stdout": 1, "stderr": 2}


class NotRunning(Exception):
    """Raised when the container is not running; the text contains its state."""


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """Options of `pykubelet exec`."""

    pod: str
    command: Sequence[str]
    container: str | None = None
    stdin: bool = False
    tty: bool = False


def run_exec(data_dir: Path, options: ExecOptions) -> int:
    """Run the command; return its exit code, or 1 if it could not be requested."""

    def work() -> int:
        instance = Instance.at(data_dir)
        node = NodeClient(instance).pods()
        pod = choose_pod(node.pods, options.pod, node.states)
        container, is_default = choose_container(pod, options.container)
        if is_default and sys.stderr.isatty():
            print(f"Container {container.name} (choose another with -c)", file=sys.stderr)
        tty = options.tty and _can_have_terminal(options)
        try:
            return asyncio.run(_exec(_endpoint(instance), running_id(pod, container.name), options, tty))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM

    return run_command(PROGRAM, work, NotRunning, StreamError, CriError)


def running_id(pod: Pod, container: str) -> str:
    """Return the runtime's ID of a running container. Raises NotRunning."""
    status = container_status(pod, container)
    if status is not None and status.state.running is not None and status.container_id:
        return status.container_id.partition("://")[2]
    if status is not None and status.state.terminated is not None:
        state = f"it has ended ({termination_reason(status.state.terminated)})"
    else:
        waiting = status.state.waiting if status is not None else None
        state = f"it is waiting ({waiting.reason})" if waiting is not None and waiting.reason else "not yet"
    raise NotRunning(f"container {container} of pod {pod.metadata.name} does not run: {state}")


def _can_have_terminal(options: ExecOptions) -> bool:
    if options.stdin and sys.stdin.isatty():
        return True
    reason = "the input is not a terminal" if options.stdin else "a terminal needs -i, too"
    print(f"{PROGRAM}: going on without a terminal: {reason}", file=sys.stderr)
    return False


def _endpoint(instance: Instance) -> str:
    """Return the CRI endpoint of this node from the kubelet.yaml that `up` writes, else the private one."""
    import yaml

    try:
        written = yaml.safe_load((instance.data_dir / "kubelet.yaml").read_bytes())
        return str(written["containerRuntimeEndpoint"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return instance.endpoint


async def _exec(endpoint: str, container_id: str, options: ExecOptions, tty: bool) -> int:
    streams = ["stdin"] if options.stdin else []
    streams += ["stdout", "resize"] if tty else ["stdout", "stderr"]
    url = await _prepare(endpoint, container_id, options, tty)
    with ExitStack() as stack:
        if tty:
            # Ctrl-C goes to the command; other signals must still restore the terminal.
            _cancel_on(signal.SIGTERM, signal.SIGHUP)
            stack.enter_context(raw_mode(0))
        else:
            # There is no state to restore, and a blocked pipe must not delay Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        result = await _run_streams(url, streams)
    if result.message:
        print_error(PROGRAM, " ".join(escape_unprintable(result.message).split()))
    return result.exit_code


async def _run_streams(url: str, streams: Sequence[str]) -> Result:
    try:
        async with connect(url, streams) as command, TaskScope() as tasks:
            if "stdin" in streams:
                tasks.start(_send_input(command), name="input")
            if "resize" in streams:
                tasks.start(_send_sizes(command), name="sizes")
            async for stream, data in command.output():
                if stream in _FILES:
                    await asyncio.to_thread(write_all, _FILES[stream], data)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return command.result


async def _prepare(endpoint: str, container_id: str, options: ExecOptions, tty: bool) -> str:
    # Imported here: loading gRPC takes longer than most commands run.
    from prometheus_client import CollectorRegistry

    from pykubelet.cri import runtime_pb2 as pb
    from pykubelet.cri.channel import CriMetrics
    from pykubelet.cri.connect import connect as connect_runtime

    request = pb.ExecRequest(
        container_id=container_id,
        cmd=options.command,
        tty=tty,
        stdin=options.stdin,
        stdout=True,
        stderr=not tty,
    )
    metrics = CriMetrics(CollectorRegistry())
    async with await connect_runtime(endpoint, timeout=_CALL_TIMEOUT, metrics=metrics) as cri:
        return await cri.runtime.exec(request)


async def _send_input(command: RemoteCommand) -> None:
    async for data in read_input(0):
        await command.send("stdin", data)
    await command.send("stdin", b"", last=True)


async def _send_sizes(command: RemoteCommand) -> None:
    async for size in terminal_sizes(0):
        await command.send("resize", size)


def _cancel_on(*signals: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
