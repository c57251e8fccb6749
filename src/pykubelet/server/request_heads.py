"""Limits on the heads (request line and header fields) of HTTP/1.1 requests, on top of aiohttp's handler.

Clients send heads before they are authenticated, so heads are bounded three times: one has at most 1 MiB, as
with Go's servers; a connection has one request at a time, and of what a client pipelines behind it only some
kilobytes are taken, unparsed, until it is responded to; and all connections together have a budget. Small
heads are not charged to it: ordinary clients are served however many bytes others hold. Above the budget the
connection closes that holds the most among those without an authorized request.

HTTP/2 has limits of its own (`http2_wire`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestPayloadError

from pykubelet.logs import get_logger

log = get_logger(__name__)

MOST_HEAD_BYTES = 1024 * 1024
MOST_BYTES = 8 * 1024 * 1024
"""Bytes of heads of all connections, those that are free aside."""
FREE_BYTES = 16 * 1024
"""Bytes of a head that are not charged to the budget."""

_MOST_HELD_BYTES = 16 * 1024
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\n\r\n431 Request Header Fields Too Large"
)

MayEvict = Callable[[web.BaseRequest | None], bool]
"""Returns whether a connection may be closed while it handles this request; None while it reads a head."""


class HeadBudget:
    """Bytes of request heads that the connections of a server hold."""

    def __init__(self, may_evict: MayEvict, most: int = MOST_BYTES) -> None:
        self._may_evict = may_evict
        self._most = most
        self._charged: dict[RequestHandler, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that are charged."""
        return self._total

    def charge(self, handler: RequestHandler, head_bytes: int) -> None:
        """Set what a connection holds; close other connections, or this one, while the budget is exceeded."""
        self.release(handler)
        if head_bytes > FREE_BYTES:
            self._charged[handler] = head_bytes - FREE_BYTES
            self._total += head_bytes - FREE_BYTES
        while self._total > self._most:
            evictable = [one for one in self._charged if self._may_evict(one.request)]
            largest = max(evictable, key=self._charged.__getitem__, default=handler)
            log.v(2).info("Closing connection, request heads exceed the budget", client=largest.peername)
            self.release(largest)
            largest.abort()

    def release(self, handler: RequestHandler) -> None:
        """Release what a connection holds."""
        self._total -= self._charged.pop(handler, 0)


class RequestHandler(web.RequestHandler):
    """aiohttp's handler of a connection, with limits on the heads of its requests."""

    __slots__ = ("_budget", "_busy", "_head_bytes", "_held", "_payload")

    def __init__(self, server: web.Server, budget: HeadBudget, **options: Any) -> None:
        super().__init__(server, **options)
        # One message in aiohttp's queue: what follows stays unparsed.
        self._max_msg_queue_size, self._msg_queue_resume_size = 1, 0
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=RequestPayloadError,
            max_msg_queue_size=1,
        )
        self._budget = budget
        self._busy = False
        """Whether a request was read and is not responded to yet."""
        self._payload: StreamReader | None = None
        """Body of the last request that was read."""
        self._head_bytes = 0
        self._held = bytearray()
        """Bytes behind a request that is being handled."""

    @property
    def request(self) -> web.BaseRequest | None:
        """The request that is being handled."""
        return self._current_request

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        transport = self.transport
        self._held.clear()
        self.force_close()
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read requests within the limits; see the module."""
        if self._force_close or self._close:
            return
        if self._upgraded or self._payload_parser is not None or self._reads_body():
            super().data_received(data)
        elif self._busy:
            self._hold(data)
        else:
            self._read_head(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release what the connection holds."""
        self._budget.release(self)
        self._held.clear()
        super().connection_lost(exc)

    async def _handle_request(self, *arguments: Any) -> Any:
        try:
            return await super()._handle_request(*arguments)
        finally:
            self._head_bytes = 0
            self._budget.release(self)
            self._busy = bool(self._messages)
            # The next request is read when this one's response is complete, and its body read or skipped.
            self._loop.call_soon(self._go_on)

    def _reads_body(self) -> bool:
        return self._payload is not None and not self._payload.is_eof()

    def _read_head(self, data: bytes) -> None:
        before = self._request_count
        self._head_bytes += len(data)
        super().data_received(data)
        if self._request_count > before:
            self._busy = True
            self._payload = self._messages[-1][1] if self._messages else None
        elif self._head_bytes > MOST_HEAD_BYTES and self.transport is not None:
            self.transport.write(_TOO_LARGE)
            self.force_close()
            return
        if self._head_bytes > FREE_BYTES:
            self._budget.charge(self, self._head_bytes)

    def _hold(self, data: bytes) -> None:
        self._held += data
        self._budget.charge(self, self._head_bytes + len(self._held))
        if len(self._held) > _MOST_HELD_BYTES and not self._buffer_paused:
            self._pause_reading_for_buffer()

    def _go_on(self) -> None:
        if self._busy or self.transport is None or self._force_close or self._close:
            return
        held, self._held = bytes(self._held), bytearray()
        self.data_received(held)
        if self._buffer_paused and not self._busy:
            self._resume_reading_for_buffer()
