"""Names of aiohttp that are private and that `server/connections` uses: a new version may not have them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser, StreamWriter
from multidict import CIMultiDict

PROTOCOL = (
    "_buffer_paused",
    "_close",
    "_current_request",
    "_force_close",
    "_handle_request",
    "_loop",
    "_max_msg_queue_size",
    "_messages",
    "_msg_queue_resume_size",
    "_parser",
    "_pause_reading_for_buffer",
    "_payload_parser",
    "_read_bufsize",
    "_request_count",
    "_resume_reading_for_buffer",
    "_upgraded",
)


async def test_aiohttp_request_handler_private_names_exist() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    server = web.Server(handle, max_line_size=1234)
    assert server._kwargs["max_line_size"] == 1234
    loop = asyncio.get_running_loop()
    handler = web.RequestHandler(server, loop=loop, **server._kwargs)
    assert [name for name in PROTOCOL if not hasattr(handler, name)] == []
    assert handler.max_line_size == 1234
    parser: Any = HttpRequestParser
    parser(handler, loop, 2**16, max_msg_queue_size=1)


async def test_aiohttp_stream_writer_calls_hook_before_it_writes_headers() -> None:
    async def remove(headers: CIMultiDict[str]) -> None:
        del headers["Server"]

    protocol: Any = SimpleNamespace(transport=None)
    writer = StreamWriter(protocol, asyncio.get_running_loop(), on_headers_sent=remove)
    await writer.write_headers("HTTP/1.1 200 OK", CIMultiDict({"Server": "x", "A": "b"}))
    assert writer._headers_buf == b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n"
