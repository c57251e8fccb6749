"""Routes of `/metrics/cadvisor` and `/metrics/resource`.

A page is sent in chunks while it is rendered. After each chunk other tasks run, and a chunk is rendered only
when the client has read enough of the previous ones, so a page needs memory for a few chunks only.

At most `MAX_SCRAPES` pages are sent concurrently, `MAX_SCRAPES_PER_USER` of them to one user, each for at
most `SCRAPE_TIMEOUT_SECONDS`: clients that do not read cannot keep scrapers out. A server without
authentication has a limit of its own. A page that is not complete ends with a reset of the connection, so
that a client cannot take it for a complete one.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

from aiohttp import hdrs, web

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError, user_name
from pykubelet.stats.cadvisor.metrics import LEAN_NAMES, cadvisor_chunks
from pykubelet.stats.container_hints import NO_HINTS, Hints
from pykubelet.stats.cri.metrics import render_cri_metrics
from pykubelet.stats.cri.runtime_stats import CriMetricList
from pykubelet.stats.resource_metrics import resource_chunks
from pykubelet.stats.samples import FilesystemUsage, MachineFacts, Record
from pykubelet.util.metrics import CONTENT_TYPE
from pykubelet.util.tasks import RenderTurns

log = get_logger(__name__)
MAX_SCRAPES = 10
MAX_SCRAPES_PER_USER = 5
SCRAPE_TIMEOUT_SECONDS = 60.0
_GZIP_LEVEL = 1
_GZIP_FORMAT = 31
_PROFILES = ("", "full", "lean")


class StatsSource(Protocol):
    """Latest samples of the node, its pods and their containers."""

    async def prepare(self, *, detailed: bool) -> None:
        """Refresh samples that are older than the housekeeping interval; `detailed` includes details.

        Raises OSError or TimeoutError if the statistics cannot be read at all.
        """

    def records(self) -> Sequence[Record]:
        """Return the records of all sampled cgroups."""

    def filesystems(self) -> Sequence[FilesystemUsage]:
        """Return the mounted file systems."""

    def machine(self) -> MachineFacts:
        """Return the constants of the host."""

    def device_name(self, major: int, minor: int) -> str:
        """Return the name of a block device, such as `/dev/vda`; empty for an unknown one."""

    def has_pressure(self) -> bool:
        """Return whether pressure stall information is reported."""

    async def runtime_metrics(self) -> CriMetricList | None:
        """Return the metrics of the runtime that replace those of cgroups; None if it has none."""

    async def runtime_sandboxes(self) -> Mapping[str, pb.PodSandboxStats] | None:
        """Return the usage of pods by sandbox id as the runtime measures it; None if the kubelet does."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def cadvisor_routes(
    source: StatsSource,
    limit: ScrapeLimit | None = None,
    *,
    path: str = "/metrics/cadvisor",
    hints: Hints = NO_HINTS,
) -> list[web.RouteDef]:
    """Return the route of the cgroups' metrics; its parameter `profile` is `full` (default) or `lean`.

    `hints` are file systems of cgroups (`stats.container_hints`).
    """
    slots = limit or ScrapeLimit()

    async def respond(request: web.Request) -> web.StreamResponse:
        profile = request.query.get("profile", "")
        if profile not in _PROFILES:
            raise HttpError(400, "profile is invalid: set full or lean\n")
        with slots.acquire(request):
            found = await source.runtime_metrics()
            has_error = found is None and await _prepare(source, detailed=True)
            from_runtime = found is not None
            page = cadvisor_chunks(
                () if has_error or from_runtime else source.records(),
                filesystems=() if has_error or from_runtime else source.filesystems(),
                device_name=source.device_name,
                machine=source.machine(),
                now=time.time(),
                has_pressure=source.has_pressure(),
                has_error=has_error,
                lean=profile == "lean",
                machine_only=from_runtime,
                hints=hints,
            )
            if found is not None:
                page = chain(page, render_cri_metrics(_in_profile(found.descriptors, profile), found.pods))
            return await send_page(request, page, slots)

    return [web.get(path, respond)]


def resource_routes(
    source: StatsSource, limit: ScrapeLimit | None = None, *, show_hidden: bool = False
) -> list[web.RouteDef]:
    """Return the route of `/metrics/resource`; `show_hidden` adds the metrics that upstream hides."""
    slots = limit or ScrapeLimit()

    async def respond(request: web.Request) -> web.StreamResponse:
        with slots.acquire(request):
            has_error = await _prepare(source, detailed=False)
            sandboxes = await source.runtime_sandboxes()
            records = () if has_error else source.records()
            page = resource_chunks(records, sandboxes=sandboxes, has_error=has_error, show_hidden=show_hidden)
            return await send_page(request, page, slots)

    return [web.get("/metrics/resource", respond)]


class ScrapeLimit:
    """Limit on concurrent scrapes, in total and per user, which routes and servers may share."""

    def __init__(
        self,
        limit: int = MAX_SCRAPES,
        *,
        max_per_user: int | None = None,
        timeout_seconds: float = SCRAPE_TIMEOUT_SECONDS,
        turns: RenderTurns | None = None,
    ) -> None:
        """Initialize; other documents that are rendered by this process should share `turns`.

        Without `max_per_user`, only the total is limited: for servers that do not authenticate.
        """
        self.limit = limit
        self._max_per_user = limit if max_per_user is None else max_per_user
        self._by_user: Counter[str] = Counter()
        self.turns = turns or RenderTurns()
        self.timeout_seconds = timeout_seconds

    @property
    def active(self) -> int:
        """Number of scrapes in progress."""
        return self._by_user.total()

    @contextmanager
    def acquire(self, request: web.BaseRequest) -> Iterator[None]:
        """Count a scrape by the request's user while the context is open.

        Raises HttpError (503) at a limit.
        """
        user = user_name(request)
        if self.active >= self.limit:
            raise HttpError(503, f"{self.limit} scrapes are in progress: retry later\n")
        if self._by_user[user] >= self._max_per_user:
            message = f"{self._max_per_user} scrapes by this user are in progress: retry later\n"
            raise HttpError(503, message)
        self._by_user[user] += 1
        try:
            yield
        finally:
            self._by_user[user] -= 1
            if not self._by_user[user]:
                del self._by_user[user]


def _in_profile(descriptors: Iterable[pb.MetricDescriptor], profile: str) -> Iterator[pb.MetricDescriptor]:
    """Yield the descriptors of the metrics that a profile contains."""
    return (each for each in descriptors if profile != "lean" or each.name in LEAN_NAMES)


async def _prepare(source: StatsSource, *, detailed: bool) -> bool:
    """Refresh the samples, and return whether that failed."""
    try:
        await source.prepare(detailed=detailed)
    except (OSError, TimeoutError) as err:
        log.error(err, "Failed to read statistics")
        return True
    return False


async def send_page(
    request: web.Request, page: Iterator[bytes], limit: ScrapeLimit, content_type: str = CONTENT_TYPE
) -> web.StreamResponse:
    """Send the chunks of a page, compressed if the client accepts gzip."""
    headers = {hdrs.CONTENT_TYPE: content_type}
    if request.method == hdrs.METH_HEAD:
        return web.Response(headers=headers)
    compressor = None
    if accepts_gzip(request.headers.getall(hdrs.ACCEPT_ENCODING, [])):
        headers[hdrs.CONTENT_ENCODING] = "gzip"
        compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    response = web.StreamResponse(headers=headers)
    is_complete = False
    try:
        async with asyncio.timeout(limit.timeout_seconds):
            await response.prepare(request)
            while (piece := await limit.turns.take(partial(_render, page, compressor))) is not None:
                if piece:
                    await response.write(piece)
            if compressor is not None:
                await response.write(compressor.flush())
            is_complete = True
    except (OSError, TimeoutError) as err:
        log.v(4).info("Stopped sending metrics", path=request.path, err=str(err) or "timeout")
    finally:
        if not is_complete and request.transport is not None:
            request.transport.abort()
    return response


def _render(page: Iterator[bytes], compressor: zlib._Compress | None) -> bytes | None:
    """Return the next chunk, empty while the compressor holds it; None at the end of the page."""
    chunk = next(page, None)
    return compressor.compress(chunk) if chunk is not None and compressor is not None else chunk


def accepts_gzip(headers: Sequence[str]) -> bool:
    """Return whether the values of Accept-Encoding allow gzip."""
    for coding in ",".join(headers).lower().split(","):
        name, *parameters = (part.strip() for part in coding.split(";"))
        if name == "gzip":
            return not any(_is_zero_quality(parameter) for parameter in parameters)
    return False


def _is_zero_quality(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and value.strip().rstrip("0") in ("", "0.", "0")
