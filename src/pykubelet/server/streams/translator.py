"""WebSocket streams that are terminated here and translated to the SPDY streams of the runtime.

Exec and attach (`v5.channel.k8s.io`): each message begins with the number of its channel; a message of
channel 255 closes the channel that its second byte names, which is how a client ends the input. Channels
become SPDY streams of the remote-command protocol v4; the `Status` that ends a command is sent on the
error channel in upstream's form. Port-forward (`SPDY/3.1+portforward.k8s.io`): the messages contain the
client's SPDY connection, which is forwarded to the runtime's.

Messages are forwarded in the pieces in which they arrive. A turn of the event loop parses a bounded
number of frames of a connection, since both clients and containers choose the size of frames. Of the
terminal sizes and pings that arrive in one turn, or while the peer does not read, only the last counts.
As upstream, pings do not extend the idle timeout, a client that does not read stops the output until it
does or the timeout expires, and a client that disconnects does not stop the command. Unlike upstream, a
runtime that disconnects without a status is reported as a failure, not as success.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import hdrs, web

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError, split_protocols
from pykubelet.server.pipeline import is_websocket
from pykubelet.server.streams.proxy import (
    ClientInput,
    StreamBridge,
    TunnelledResponse,
    connect_or_http_error,
)
from pykubelet.transport.remote_command import PROTOCOL, ExitStatus, parse_status
from pykubelet.transport.spdy import (
    Data,
    FrameReader,
    FrameWriter,
    GoAway,
    Ping,
    Reset,
    SpdyError,
    data_header,
)
from pykubelet.transport.stream_upgrade import (
    StreamUnavailable,
    UpgradedConnection,
    UpgradeRejected,
    connect_upgraded,
)
from pykubelet.transport.websocket import (
    CloseCode,
    Control,
    FrameParser,
    Opcode,
    Payload,
    WebSocketError,
    accept_key,
    close_frame,
    data_frame,
    pong_frame,
)

log = get_logger(__name__)
WEBSOCKET_PROTOCOL = "v5.channel.k8s.io"
TUNNEL_PREFIX = "SPDY/3.1+"
_SPDY = "SPDY/3.1"
_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)
_CLOSE_SIGNAL = 255
_MAX_SIZE_BYTES = 256
_MAX_STATUS_BYTES = 64 * 1024
MAX_FRAMES_PER_TURN = 200
"""Frames of one connection that are parsed in one turn of the event loop: less than a millisecond."""
_LINGER_SECONDS, _FAILED_LINGER_SECONDS = 5.0, 1.0
_UNREAD_BYTES, _MAX_UNREAD_PIECES = 256 * 1024, 64


@dataclass(frozen=True, slots=True)
class RemoteCommandOptions:
    """Streams that an exec or attach request selects."""

    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> RemoteCommandOptions:
        """Parse the options from a query. Raises HttpError (400) if no stream is selected."""
        stdin, stdout, stderr, tty = (query.get(key) == "1" for key in ("input", "output", "error", "tty"))
        # A TTY merges stdout and stderr.
        stderr = stderr and not tty
        if not (stdin or stdout or stderr):
            raise HttpError(400, "you must specify at least 1 of stdin, stdout, stderr")
        return cls(stdin, stdout, stderr, tty)

    def channels(self) -> dict[int, str]:
        """Return the stream type by channel, in the order in which the streams are opened."""
        selected = {
            _ERROR: ("error", True),
            _STDIN: ("stdin", self.stdin),
            _STDOUT: ("stdout", self.stdout),
            _STDERR: ("stderr", self.stderr),
            _RESIZE: ("resize", self.tty),
        }
        return {channel: name for channel, (name, open_it) in selected.items() if open_it}


def requests_stream_close(request: web.BaseRequest) -> bool:
    """Return whether the client requests a WebSocket whose channels can be closed (v5)."""
    return is_websocket(request) and WEBSOCKET_PROTOCOL in _protocols(request)


def requests_tunnel(request: web.BaseRequest) -> bool:
    """Return whether the client requests SPDY in a WebSocket."""
    return is_websocket(request) and bool(_tunnel_protocols(request))


def _protocols(request: web.BaseRequest) -> list[str]:
    return split_protocols(request.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, []))


def _tunnel_protocols(request: web.BaseRequest) -> list[str]:
    return [
        name.removeprefix(TUNNEL_PREFIX)
        for name in _protocols(request)
        if name.startswith(TUNNEL_PREFIX) and name.endswith(".k8s.io")
    ]


async def translate_remote_command(
    request: web.Request, url: str, options: RemoteCommandOptions, *, idle_seconds: float
) -> web.StreamResponse:
    """Serve exec or attach on a WebSocket, with the runtime's streams at `url`. Raises HttpError.

    Once the WebSocket is established, failures are reported on its error channel.
    """
    client = request.transport
    assert client is not None
    accepted = _accept(request, WEBSOCKET_PROTOCOL)
    client_input = ClientInput(request)
    client.write(accepted)
    # An empty message notifies the client that the connection is established.
    first = next(channel for channel in (_STDOUT, _STDERR, _ERROR) if channel in options.channels())
    client.write(data_frame(bytes((first,)), b""))
    try:
        runtime = await connect_upgraded(url, _SPDY, [("X-Stream-Protocol-Version", PROTOCOL)])
    except (StreamUnavailable, UpgradeRejected) as err:
        if isinstance(err, StreamUnavailable):
            log.error(err, "Failed to connect to the runtime's streaming server")
            cause = f"the runtime's streaming server {str(err).partition(':')[0]}"
        else:
            cause = f"unable to upgrade connection: {err.body.strip() or err}"
        return await _failed(client, client_input, cause)
    if runtime.header("X-Stream-Protocol-Version") != PROTOCOL:
        runtime.transport.abort()
        return await _failed(
            client, client_input, f"the runtime's streaming server does not implement {PROTOCOL}"
        )
    await _RemoteCommandBridge(request, runtime, idle_seconds, options).run(client_input)
    return TunnelledResponse()


async def _failed(client: asyncio.Transport, client_input: ClientInput, cause: str) -> web.StreamResponse:
    client.write(data_frame(bytes((_ERROR,)), _internal_error(cause)) + close_frame(CloseCode.NORMAL))
    await client_input.discard(_FAILED_LINGER_SECONDS)
    return TunnelledResponse()


async def tunnel_port_forward(request: web.Request, url: str, *, idle_seconds: float) -> web.StreamResponse:
    """Serve port-forward as SPDY in a WebSocket. Raises HttpError if the stream cannot be established."""
    _validate(request)
    offered = _tunnel_protocols(request)
    headers = [("X-Stream-Protocol-Version", name) for name in offered]
    runtime = await connect_or_http_error(url, _SPDY, headers, method="POST")
    chosen = runtime.header("X-Stream-Protocol-Version")
    if _SPDY.lower() not in runtime.header("Upgrade").lower():
        runtime.transport.abort()
        raise HttpError(500, "unable to upgrade: missing upgrade headers in response\n")
    assert request.transport is not None
    request.transport.write(_accept(request, TUNNEL_PREFIX + chosen if chosen in offered else ""))
    await _TunnelBridge(request, runtime, idle_seconds).run()
    return TunnelledResponse()


def _validate(request: web.Request) -> None:
    if request.method != "GET":
        raise HttpError(405, "a WebSocket is requested with GET\n")
    if request.headers.get(hdrs.SEC_WEBSOCKET_VERSION) != "13":
        raise HttpError(400, "missing or bad WebSocket Version\n", {hdrs.SEC_WEBSOCKET_VERSION: "13"})
    if not request.headers.get(hdrs.SEC_WEBSOCKET_KEY):
        raise HttpError(400, "the header Sec-WebSocket-Key is missing\n")


def _accept(request: web.Request, protocol: str) -> bytes:
    """Return the response head that establishes the WebSocket. Raises HttpError."""
    _validate(request)
    lines = [
        "HTTP/1.1 101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {accept_key(request.headers[hdrs.SEC_WEBSOCKET_KEY])}",
    ]
    if protocol:
        lines.append(f"Sec-WebSocket-Protocol: {protocol}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


class _WebSocketBridge(StreamBridge):
    """Bridge whose client uses WebSocket frames."""

    def __init__(self, request: web.Request, runtime: UpgradedConnection, idle_seconds: float) -> None:
        super().__init__(request, runtime, idle_seconds)
        self._frames = FrameParser()
        self._closed = False
        """Whether the Close frame was sent."""
        self._client_eof = False
        self._client_finished = asyncio.Event()
        """Set when the client has sent its Close frame or EOF; what follows is discarded."""
        self._discarding = False
        self._deferred_pong: bytes | None = None
        self._input: list[bytes | bytearray | memoryview] = []
        """Bytes for the runtime, collected in one turn: clients send small frames."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if not (self._discarding or self._client_finished.is_set()):
            self._frames.feed(data)
            if not self._client_backlog:
                self._parse_client()
        return False, b""

    def feed_eof(self) -> None:
        self._client_eof = True
        self._client_finished.set()
        if not self._client_backlog:
            self._close_runtime()

    def _parse_client(self) -> None:
        """Handle the client's frames of one turn."""
        self._client_backlog = False
        try:
            for _ in range(MAX_FRAMES_PER_TURN):
                event = self._frames.next_event()
                if event is None:
                    break
                if isinstance(event, Control):
                    self._on_control(event)
                elif not self._closed:
                    self._last_active = self._clock()
                    self._on_payload(event)
            else:
                self._client_backlog = self._frames.buffered > 0
        except WebSocketError as err:
            log.v(2).info(
                "Closing stream because of the client's frame", reason=err.reason, code=int(err.code)
            )
            self._finish(err.code, err.reason)
            # Frames cannot be told apart any more: what follows is discarded until the client disconnects.
            self._discarding = True
        self._flush_to_runtime()
        if self._client_backlog:
            asyncio.get_running_loop().call_soon(self._parse_client)
        elif self._client_eof:
            self._close_runtime()
        self._update_reading()

    def _on_control(self, frame: Control) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._client_finished.set()
            self._finish(CloseCode.NORMAL)
        elif frame.opcode is Opcode.PING and not self._closed:
            if self._request.protocol.writing_paused:
                # One pong is enough for the pings of a client that does not read.
                self._deferred_pong = pong_frame(frame.data)
            else:
                self._write_client(pong_frame(frame.data))

    def _on_payload(self, payload: Payload) -> None:
        """Handle a piece of a message. Raises WebSocketError."""
        raise NotImplementedError

    def _flush_to_runtime(self) -> None:
        """Send what the turn's frames contain."""
        # Bytes for a runtime that has just disconnected are dropped.
        if self._input and not self._runtime.is_closing():
            self._runtime.writelines(self._input)
        self._input.clear()

    def _close_runtime(self) -> None:
        # The request is cancelled when the client disconnects; the frames that are left for later turns are
        # still sent, and `_parse_client` closes the connection after the last one.
        if not (self._client_eof and self._client_backlog):
            super()._close_runtime()

    def _client_drained(self) -> None:
        super()._client_drained()
        if self._deferred_pong is not None and not self._closed:
            self._write_client(self._deferred_pong)
        self._deferred_pong = None

    def _finish(self, code: CloseCode, reason: str = "") -> None:
        """Send the Close frame and end the stream."""
        if self._closed:
            return
        self._closed = True
        self._write_client(close_frame(code, reason))
        self._flush_to_runtime()
        self._close_runtime()
        self._end()

    async def _linger(self) -> None:
        # Input that is not read when the connection is closed would reset it, and the client would lose the
        # end of the output.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._client_finished.wait()

    def _on_idle(self) -> None:
        if not self._closed:
            self._closed = True
            self._write_client(close_frame(CloseCode.GOING_AWAY, "the stream was idle for too long"))


class _TunnelBridge(_WebSocketBridge):
    """Bridge that forwards the payload of the messages as they are."""

    def data_received(self, data: bytes) -> None:
        self._last_active = self._clock()
        if not self._closed:
            self._write_client(data_frame(b"", data))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._finish(CloseCode.NORMAL)

    def _on_payload(self, payload: Payload) -> None:
        if payload.text:
            raise WebSocketError(CloseCode.UNSUPPORTED_DATA, "SPDY is sent in binary messages")
        if payload.data:
            self._input.append(payload.data)


class _RemoteCommandBridge(_WebSocketBridge):
    """Bridge between the channels of a WebSocket and the SPDY streams of a command."""

    def __init__(
        self,
        request: web.Request,
        runtime: UpgradedConnection,
        idle_seconds: float,
        options: RemoteCommandOptions,
    ) -> None:
        super().__init__(request, runtime, idle_seconds)
        self._spdy = FrameReader()
        self._writer = FrameWriter()
        self._streams: dict[int, int] = {}
        """SPDY stream by channel."""
        self._channels: dict[int, int] = {}
        """Channel by SPDY stream."""
        for channel, name in options.channels().items():
            stream, frame = self._writer.open_stream({"streamType": name})
            self._streams[channel], self._channels[stream] = stream, channel
            self._write_runtime(frame)
        # Another descriptor of the connection; one with TLS is not readable without the transport.
        self._socket: socket.socket | None = None
        if runtime.transport.get_extra_info("ssl_object") is None:
            self._socket = runtime.transport.get_extra_info("socket").dup()
            self._socket.setblocking(False)
        self._stdin_open = options.stdin
        self._channel: int | None = None
        self._short_message = bytearray()
        self._size = b""
        self._status = bytearray()

    def data_received(self, data: bytes) -> None:
        self._last_active = self._clock()
        self._spdy.feed(data)
        if not self._runtime_backlog:
            self._parse_runtime()

    def connection_lost(self, exc: Exception | None) -> None:
        self._runtime_lost = True
        if exc is not None and not self._closed:
            self._spdy.feed(self._unread())
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if not self._runtime_backlog:
            self._parse_runtime()

    def _unread(self) -> bytes:
        """Return what the runtime sent before it reset the connection.

        A command may end, and the runtime close the connection, while input is on its way. The transport
        gives up when it cannot write; the status of the command is then still in the socket.
        """
        pieces: list[bytes] = []
        if self._socket is not None:
            with suppress(OSError):
                while len(pieces) < _MAX_UNREAD_PIECES and (data := self._socket.recv(_UNREAD_BYTES)):
                    pieces.append(data)
        return b"".join(pieces)

    def _parse_runtime(self) -> None:
        """Handle the runtime's frames of one turn; adjacent data of a channel becomes one message."""
        self._runtime_backlog = False
        output: list[bytes] = []
        channel = _STDOUT
        count = 0
        try:
            for frame in self._spdy.frames():
                match frame:
                    case Data(stream, data, last):
                        found = self._channels.get(stream)
                        if found in (_STDOUT, _STDERR):
                            if data and found != channel:
                                self._send_output(channel, output)
                                channel = found
                            output.append(data)
                        elif found == _ERROR:
                            self._status += data[: _MAX_STATUS_BYTES - len(self._status)]
                        if last:
                            self._on_stream_end(stream, channel, output)
                    case Reset(stream):
                        self._on_stream_end(stream, channel, output)
                    case Ping() if not self._runtime_full:
                        self._write_runtime(self._writer.pong(frame))
                    case GoAway():
                        self._send_output(channel, output)
                        self._complete()
                count += 1
                if count >= MAX_FRAMES_PER_TURN:
                    self._runtime_backlog = self._spdy.buffered > 0
                    break
        except SpdyError as err:
            log.error(err, "Failed to parse the runtime's stream")
            self._send_output(channel, output)
            self._complete()
        self._send_output(channel, output)
        if self._runtime_backlog:
            asyncio.get_running_loop().call_soon(self._parse_runtime)
        elif self._runtime_lost:
            self._complete()
            super().connection_lost(None)
        self._update_reading()

    def _send_output(self, channel: int, output: list[bytes]) -> None:
        if output and not self._closed:
            data = output[0] if len(output) == 1 else b"".join(output)
            if data:
                self._write_client(data_frame(bytes((channel,)), data))
        output.clear()

    def _on_stream_end(self, stream: int, channel: int, output: list[bytes]) -> None:
        ended = self._channels.get(stream)
        if ended == _ERROR:
            self._send_output(channel, output)
            self._complete()
        elif ended == _STDIN:
            self._close_stdin()
            self._flush_to_runtime()

    def _complete(self) -> None:
        """Send the command's status and end the stream."""
        if not self._closed:
            self._write_client(data_frame(bytes((_ERROR,)), translated_status(bytes(self._status))))
            self._finish(CloseCode.NORMAL)

    def _on_payload(self, payload: Payload) -> None:
        data = memoryview(payload.data)
        if payload.starts:
            self._channel = None
            self._short_message.clear()
        if self._channel is None and data:
            self._channel, data = data[0], data[1:]
        if self._channel == _STDIN and self._stdin_open and data:
            self._input += (data_header(self._streams[_STDIN], len(data)), data)
        elif self._channel == _CLOSE_SIGNAL:
            self._short_message += data[:2]
            if len(self._short_message) > 1 or (payload.ends and not self._short_message):
                raise WebSocketError(CloseCode.PROTOCOL_ERROR, "one channel follows the close signal")
            if payload.ends:
                self._close_channel(self._short_message[0])
        elif self._channel == _RESIZE and _RESIZE in self._streams:
            self._short_message += data[: _MAX_SIZE_BYTES + 1 - len(self._short_message)]
            if payload.ends:
                self._size = terminal_size(bytes(self._short_message)) or self._size

    def _close_channel(self, channel: int) -> None:
        if channel > _RESIZE:
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, f"channel {channel} does not exist")
        if channel == _STDIN:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin_open:
            self._stdin_open = False
            self._input.append(data_header(self._streams[_STDIN], 0, last=True))

    def _flush_to_runtime(self) -> None:
        if self._size:
            self._input += (data_header(self._streams[_RESIZE], len(self._size)), self._size)
            self._size = b""
        super()._flush_to_runtime()


def terminal_size(document: bytes) -> bytes:
    """Return a terminal size of the client as JSON for the runtime; empty if it is not valid."""
    try:
        found = msgspec.json.decode(document, type=dict[str, int])
    except msgspec.MsgspecError:
        return b""
    size = {name.lower(): number for name, number in found.items()}
    width, height = size.get("width", 0), size.get("height", 0)
    if not (0 <= width < 2**16 and 0 <= height < 2**16):
        return b""
    return b'{"Width":%d,"Height":%d}\n' % (width, height)


def translated_status(document: bytes) -> bytes:
    """Return the status for the client from the one that the runtime sent, or did not send."""
    found = parse_status(document)
    if isinstance(found, str):
        return _internal_error(found)
    if found == ExitStatus(0):
        return _json({"metadata": {}, "status": "Success"})
    return _json(
        {
            "metadata": {},
            "status": "Failure",
            "message": "command terminated with non-zero exit code: "
            f"command terminated with exit code {found.code}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(found.code)}]},
        }
    )


def _internal_error(cause: str) -> bytes:
    return _json(
        {
            "metadata": {},
            "status": "Failure",
            "message": f"Internal error occurred: {cause}",
            "reason": "InternalError",
            "details": {"causes": [{"message": cause}]},
            "code": int(HTTPStatus.INTERNAL_SERVER_ERROR),
        }
    )


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
