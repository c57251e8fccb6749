"""One stream of an HTTP/2 connection, presented to aiohttp as a transport with one request.

The request is fed to an aiohttp request handler, so that limits, authentication, metrics and endpoints are
the same as over HTTP/1.1 and see the client certificate of the connection. The response comes back through a
writer that omits HTTP/1.1 framing.

Both directions have flow control: the client's window grows only as the handler reads, and a handler whose
response is not read by the client is paused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, cast

from aiohttp import ClientConnectionResetError, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from multidict import CIMultiDict

from pykubelet.server.http2.headers import Field, answer_head

_ENOUGH = 64 * 1024
"""Unsent bytes of a response above which its handler is paused."""
_LITTLE = 16 * 1024


class StreamTransport(Protocol):
    """The connection that carries the stream."""

    def extra_info(self, name: str, default: Any) -> Any:
        """Return transport information of the connection."""

    def go_on(self, stream: Stream) -> None:
        """Send "100 Continue"."""

    def has_news(self, stream: Stream) -> None:
        """Schedule sending: the stream has something to send."""

    def taken(self, stream: Stream, size: int) -> None:
        """Increase the stream's receive window by `size` bytes that the handler has read."""

    def cut(self, stream: Stream) -> None:
        """Reset the stream."""

    def handler_left(self, stream: Stream) -> None:
        """Record that the stream's handler has finished."""


class Stream(asyncio.Transport):
    """A request and its response; the connection feeds the request and sends the response."""

    def __init__(self, below: StreamTransport, number: int, *, chunked: bool, headless: bool) -> None:
        """Initialize a stream.

        `chunked` if the request's length is unknown, `headless` if the response must have no body.
        """
        super().__init__()
        self.number = number
        self.head: list[Field] | None = None
        """Head of the response until it is sent."""
        self.begun = False
        """Whether the response has started."""
        self.ended = False
        """Whether the response is complete, possibly not yet sent."""
        self.broken = False
        """Whether the response will never be completed."""
        self.asked = False
        """Whether the request was received completely."""
        self.over = False
        """Whether nothing more can be sent."""
        self.handler: web.RequestHandler | None = None
        self.request: web.BaseRequest | None = None
        """The request until its handler has finished."""
        self.size = 0
        """Unsent bytes of the response."""
        self._below = below
        self._chunked = chunked
        self._headless = headless
        self._waiting: deque[bytes | memoryview] = deque()
        self._closing = False
        self._holds_writer = False
        self._holds_client = False
        self._untold = 0

    # Receiving the request.

    def begin(self, handler: web.RequestHandler, head: bytes) -> None:
        """Pass the head of the request to a handler."""
        self.handler = handler
        handler.connection_made(self)
        handler.data_received(head)

    def receive(self, data: bytes, size: int) -> None:
        """Receive a part of the body; `size` is its flow-controlled length."""
        self._untold += size
        if data and self.handler is not None:
            self.handler.data_received(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if not self._holds_client:
            self._tell()

    def all_asked(self) -> None:
        """Handle the end of the request."""
        self.asked = True
        if self._chunked and self.handler is not None:
            self.handler.data_received(b"0\r\n\r\n")

    def lose(self) -> None:
        """Handle the loss of the stream."""
        self.over = True
        self._waiting.clear()
        self.size = 0
        self._lost(ConnectionResetError("the stream was ended"))

    def _tell(self) -> None:
        # Without a reader the window is not increased.
        if self._untold and self.handler is not None and not self.over and not self.asked:
            untold, self._untold = self._untold, 0
            self._below.taken(self, untold)

    # Sending the response.

    def answer(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Start the response."""
        self.head = answer_head(status, headers)
        self.begun = True
        self._headless = self._headless or status in (204, 304)
        self._below.has_news(self)

    def complete(self) -> None:
        """Mark the response as complete."""
        self.ended = True
        self._below.has_news(self)

    def take(self, most: int) -> bytes | memoryview:
        """Return up to `most` bytes of the response body; there must be some."""
        first = self._waiting.popleft()
        if len(first) > most:
            view = memoryview(first)
            self._waiting.appendleft(view[most:])
            taken: bytes | memoryview = view[:most]
        else:
            pieces, size = [first], len(first)
            while self._waiting and size + len(self._waiting[0]) <= most:
                size += len(self._waiting[0])
                pieces.append(self._waiting.popleft())
            taken = b"".join(pieces) if len(pieces) > 1 else first
        self.size -= len(taken)
        if self._holds_writer and self.size <= _LITTLE:
            self._holds_writer = False
            if self.handler is not None:
                self.handler.resume_writing()
        return taken

    # Transport methods, called by aiohttp.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return transport information of the connection, but not its socket."""
        return default if name == "socket" else self._below.extra_info(name, default)

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self._closing or self.over

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append to the response body."""
        if self.over or self._closing:
            return
        if not self.begun:
            # "100 Continue" is all that aiohttp writes before the head.
            self._below.go_on(self)
            return
        if self._headless or not data:
            return
        self._waiting.append(data if isinstance(data, bytes) else bytes(data))
        self.size += len(data)
        if self.size > _ENOUGH and not self._holds_writer and self.handler is not None:
            self._holds_writer = True
            self.handler.pause_writing()
        self._below.has_news(self)

    def pause_reading(self) -> None:
        """Stop increasing the receive window."""
        self._holds_client = True

    def resume_reading(self) -> None:
        """Resume increasing the receive window."""
        self._holds_client = False
        self._tell()

    def close(self) -> None:
        """Close the stream after the written bytes are sent; reset it if the response is not complete."""
        if self._closing:
            return
        self._closing = True
        if not self.over and not self.ended:
            self.broken = True
            self._below.has_news(self)
        asyncio.get_running_loop().call_soon(self._lost, None)

    def abort(self) -> None:
        """Reset the stream immediately."""
        if not self.over:
            self._below.cut(self)

    def _lost(self, err: Exception | None) -> None:
        handler, self.handler, self.request = self.handler, None, None
        if handler is not None:
            handler.connection_lost(err)
            self._below.handler_left(self)


class _Writer(StreamWriter):
    """Writer of a response to a stream, without chunked encoding, since frames have a length."""

    def enable_chunking(self) -> None:
        """Ignore the call."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Start the response."""
        stream = self._stream()
        stream.answer(int(status_line.split(" ", 2)[1]), headers.items())
        # From here on aiohttp must not send an error response instead.
        self.output_size += 1

    def set_eof(self) -> None:
        """Complete the response."""
        if not self._eof:
            super().set_eof()
            self._stream().complete()

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Complete the response with the last part of its body."""
        if not self._eof:
            await super().write_eof(chunk)
            self._stream().complete()

    def _stream(self) -> Stream:
        stream = self.transport
        if stream is None or stream.is_closing():
            raise ClientConnectionResetError("the stream was ended")
        return cast(Stream, stream)


def stream_server(server: web.Server, **options: Any) -> web.Server:
    """Return a server for streams with the handlers of the server for connections."""
    make = server.request_factory

    def request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        _: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        made = make(message, payload, protocol, _Writer(protocol, asyncio.get_running_loop()), task)
        if isinstance(stream := protocol.transport, Stream):
            stream.request = made
        return made

    return web.Server(
        server.request_handler,
        request_factory=request,
        handler_cancellation=True,
        # The connection has its own keepalive.
        keepalive_timeout=0,
        tcp_keepalive=False,
        lingering_time=0,
        **options,
    )
