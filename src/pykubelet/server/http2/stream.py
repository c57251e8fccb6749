"""One stream of an HTTP/2 connection: for aiohttp, a connection on which one request comes.

The request is fed to one of aiohttp's own request handlers, so everything behind it (limits, who asks,
metrics, every endpoint) is the same as over HTTP/1.1 and sees the certificate of the connection below. The
answer comes back through a writer that leaves out HTTP/1.1's framing.

Neither direction is held for a slow side: what the client may send grows only as the handler takes it, and
a handler whose answer is not taken has to wait.
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
"""When so much of an answer waits, its handler does, too."""
_LITTLE = 16 * 1024


class StreamTransport(Protocol):
    """The connection that carries the stream."""

    def extra_info(self, name: str, default: Any) -> Any:
        """Tell of the connection, as transports do."""

    def go_on(self, stream: Stream) -> None:
        """Say "100 Continue"."""

    def has_news(self, stream: Stream) -> None:
        """Something can be sent."""

    def taken(self, stream: Stream, size: int) -> None:
        """So many bytes of the request were taken: so many more may come."""

    def cut(self, stream: Stream) -> None:
        """End the stream here and now."""

    def handler_left(self, stream: Stream) -> None:
        """Nobody works on the request any more."""


class Stream(asyncio.Transport):
    """A request and its answer; the connection feeds the one and sends the other."""

    def __init__(self, below: StreamTransport, number: int, *, chunked: bool, headless: bool) -> None:
        """Begin a stream.

        `chunked` when the request's length is not known, `headless` when the answer must have no body.
        """
        super().__init__()
        self.number = number
        self.head: list[Field] | None = None
        """The answer's head, until it is sent."""
        self.begun = False
        """Whether the answer has begun."""
        self.ended = False
        """Whether the answer is complete (if not yet sent)."""
        self.broken = False
        """Whether nobody will complete the answer."""
        self.asked = False
        """Whether the request has come whole."""
        self.over = False
        """Whether nothing can be sent any more."""
        self.handler: web.RequestHandler | None = None
        self.request: web.BaseRequest | None = None
        """The request, until its handler has left."""
        self.size = 0
        """How many bytes of the answer wait to be sent."""
        self._below = below
        self._chunked = chunked
        self._headless = headless
        self._waiting: deque[bytes | memoryview] = deque()
        self._closing = False
        self._holds_writer = False
        self._holds_client = False
        self._untold = 0

    # The request, as it comes.

    def begin(self, handler: web.RequestHandler, head: bytes) -> None:
        """Hand the head of the request to somebody."""
        self.handler = handler
        handler.connection_made(self)
        handler.data_received(head)

    def receive(self, data: bytes, size: int) -> None:
        """Take some of the body; `size` is what it counted for the client's allowance."""
        self._untold += size
        if data and self.handler is not None:
            self.handler.data_received(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if not self._holds_client:
            self._tell()

    def all_asked(self) -> None:
        """Nothing more comes of the request."""
        self.asked = True
        if self._chunked and self.handler is not None:
            self.handler.data_received(b"0\r\n\r\n")

    def lose(self) -> None:
        """The client has left, or is being left."""
        self.over = True
        self._waiting.clear()
        self.size = 0
        self._lost(ConnectionResetError("the stream was ended"))

    def _tell(self) -> None:
        # Of what nobody reads any more, no more may come.
        if self._untold and self.handler is not None and not self.over and not self.asked:
            untold, self._untold = self._untold, 0
            self._below.taken(self, untold)

    # The answer, as it is sent.

    def answer(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Begin the answer."""
        self.head = answer_head(status, headers)
        self.begun = True
        self._headless = self._headless or status in (204, 304)
        self._below.has_news(self)

    def complete(self) -> None:
        """Say that the answer is complete."""
        self.ended = True
        self._below.has_news(self)

    def take(self, most: int) -> bytes | memoryview:
        """Give some of the answer's body to be sent; there must be some."""
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

    # What aiohttp needs of a transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Tell of the connection; its socket is not to be touched by streams."""
        return default if name == "socket" else self._below.extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._closing or self.over

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take some of the answer's body."""
        if self.over or self._closing:
            return
        if not self.begun:
            # All that aiohttp writes before the head of an answer.
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
        """Let the client send no more than it already may."""
        self._holds_client = True

    def resume_reading(self) -> None:
        """Let the client send on."""
        self._holds_client = False
        self._tell()

    def close(self) -> None:
        """End the stream when what was written is sent; an answer that is not complete is cut off."""
        if self._closing:
            return
        self._closing = True
        if not self.over and not self.ended:
            self.broken = True
            self._below.has_news(self)
        asyncio.get_running_loop().call_soon(self._lost, None)

    def abort(self) -> None:
        """End the stream here and now."""
        if not self.over:
            self._below.cut(self)

    def _lost(self, err: Exception | None) -> None:
        handler, self.handler, self.request = self.handler, None, None
        if handler is not None:
            handler.connection_lost(err)
            self._below.handler_left(self)


class _Writer(StreamWriter):
    """Writes an answer to a stream: the head as it is, and no chunks, since frames say their own length."""

    def enable_chunking(self) -> None:
        """Nothing: see above."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Begin the answer."""
        stream = self._stream()
        stream.answer(int(status_line.split(" ", 2)[1]), headers.items())
        # From here on no other answer can be given.
        self.output_size += 1

    def set_eof(self) -> None:
        """Complete the answer."""
        if not self._eof:
            super().set_eof()
            self._stream().complete()

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Complete the answer, with the last of its body."""
        if not self._eof:
            await super().write_eof(chunk)
            self._stream().complete()

    def _stream(self) -> Stream:
        stream = self.transport
        if stream is None or stream.is_closing():
            raise ClientConnectionResetError("the stream was ended")
        return cast(Stream, stream)


def stream_server(server: web.Server, **options: Any) -> web.Server:
    """Make a server for streams that does what the server for connections does."""
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
        # The connection below has its own.
        keepalive_timeout=0,
        tcp_keepalive=False,
        lingering_time=0,
        **options,
    )
