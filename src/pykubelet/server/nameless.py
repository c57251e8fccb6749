"""Servers that do not say what they are made of: the reference sends no `Server` header, nor do we."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from multidict import CIMultiDict


def nameless(server: web.Server) -> None:
    """Have a server leave its name out of all answers, also out of those to what is no request."""
    make = server.request_factory

    def request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if type(writer) is StreamWriter:
            # aiohttp sets it after everybody was asked, and lets only the writer have the last word.
            writer._on_headers_sent = _without_name
        return make(message, payload, protocol, writer, task)

    server.request_factory = request


async def _without_name(headers: CIMultiDict[str]) -> None:
    headers.popall(hdrs.SERVER, None)
