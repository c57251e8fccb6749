"""`/stats/summary`: the Summary API, on the API server and the read-only port.

    GET or POST /stats/summary[/][?only_cpu_and_memory=true]

The document is sent in chunks while it is built, so that a node with many pods neither holds it in memory nor
stalls the event loop. Requests are limited in number and in time: a client that does not read loses its
connection. Without a sample of the node the response is upstream's error 500.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from aiohttp import hdrs, web

from pykubelet.api.meta import to_json
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import user_name
from pykubelet.server.pipeline import plain_text
from pykubelet.server.streams.streaming import StreamLimits
from pykubelet.stats.samples import MemoryCurves
from pykubelet.stats.summary import SummaryInputs, SummaryUnavailable, encode_summary
from pykubelet.util.tasks import RenderTurns

log = get_logger(__name__)
MAX_REQUESTS = 32
MAX_REQUESTS_PER_USER = 16
SOURCE_TIMEOUT_SECONDS = 10.0
"""Seconds within which the facts must be collected."""
WRITE_TIMEOUT_SECONDS = 30.0
"""Seconds for which a client may not read before its connection is closed."""
CHUNK_BYTES = 16 * 1024
"""Size from which a chunk is sent; a chunk is larger by at most one pod."""
_ONLY_CPU_AND_MEMORY = "only_cpu_and_memory"
_FORM = "application/x-www-form-urlencoded"


class SummarySource(Protocol):
    """Provider of the facts of a summary."""

    async def summary_inputs(self, only_cpu_and_memory: bool) -> SummaryInputs:
        """Return the current facts; with `only_cpu_and_memory` no storage is needed.

        Raises SummaryUnavailable.
        """


def summary_routes(
    source: SummarySource,
    limits: StreamLimits | None = None,
    turns: RenderTurns | None = None,
    *,
    write_timeout: float = WRITE_TIMEOUT_SECONDS,
    source_timeout: float = SOURCE_TIMEOUT_SECONDS,
) -> list[web.RouteDef]:
    """Return the routes of the Summary API; all servers should share `limits` and `turns`."""
    limits = limits or StreamLimits(MAX_REQUESTS, MAX_REQUESTS_PER_USER)
    turns = turns or RenderTurns()

    async def respond(request: web.Request) -> web.StreamResponse:
        only_cpu_and_memory = await _is_only_cpu_and_memory(request)
        with limits.acquire(user_name(request)):
            try:
                async with asyncio.timeout(source_timeout):
                    inputs = await source.summary_inputs(only_cpu_and_memory)
                pieces = encode_summary(inputs, only_cpu_and_memory=only_cpu_and_memory)
                first = await turns.take(lambda: next(pieces))
            except (SummaryUnavailable, TimeoutError) as err:
                reason = str(err) or "failed to collect statistics: timed out"
                log.v(2).info("Summary is not available", reason=reason)
                return plain_text(500, f"Internal Error: {reason}")
            response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/json"})
            response.enable_chunked_encoding()
            await response.prepare(request)
            await _send(request, response, in_chunks(first, pieces), turns, write_timeout)
            return response

    return [
        route
        for path in ("/stats/summary", "/stats/summary/")
        for route in (web.get(path, respond, allow_head=False), web.post(path, respond))
    ]


def memory_curve_routes(curves: Callable[[str], MemoryCurves]) -> list[web.RouteDef]:
    """Return the route of the control socket for the memory of a pod's containers in the last minutes."""

    async def respond(request: web.Request) -> web.Response:
        body = to_json(curves(request.match_info["uid"]))
        return web.Response(body=body, content_type="application/json")

    return [web.get("/pods/{uid}/memory", respond)]


async def _is_only_cpu_and_memory(request: web.Request) -> bool:
    """Return whether the parameter is present once, in the query or a form, and is `true`."""
    values = list(request.query.getall(_ONLY_CPU_AND_MEMORY, []))
    if request.method == hdrs.METH_POST and request.content_type == _FORM:
        values += [str(value) for value in (await request.post()).getall(_ONLY_CPU_AND_MEMORY, [])]
    return values == ["true"]


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    chunks: Iterator[bytes],
    turns: RenderTurns,
    write_timeout: float,
) -> None:
    """Send the document. Raises ConnectionError when it is incomplete, which closes the connection."""
    try:
        while (chunk := await turns.take(lambda: next(chunks, None))) is not None:
            async with asyncio.timeout(write_timeout):
                await response.write(chunk)
    except TimeoutError:
        log.v(2).info("Closed connection of a client that does not read", path=request.path)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None


def in_chunks(first: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join the pieces of a document into chunks of about `CHUNK_BYTES`."""
    buffer = bytearray(first)
    for piece in pieces:
        buffer += piece
        if len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)
