"""`/containerLogs/{namespace}/{pod}/{container}`: what a container says, as long as the client wants it.

Read from the file that the runtime writes, some at a time and no faster than the client takes it. Following
ends when the container has ended and everything was sent; a rotation of the log does not end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from pathlib import Path

from aiohttp import web

from pykubelet.api.pod import Pod
from pykubelet.cri.errors import CriError
from pykubelet.logs import get_logger
from pykubelet.server.log_files import LogFile, follow_blocks, present_blocks, seek_last_lines
from pykubelet.server.log_lines import LineWriter
from pykubelet.server.log_options import LogWish, choose_run, is_running, read_log_wish
from pykubelet.server.lookup import Lookup, container_of
from pykubelet.server.pipeline import user_name
from pykubelet.server.refused import Refused
from pykubelet.server.stream_limits import StreamLimits

log = get_logger(__name__)


class ContainerLogs:
    """The logs endpoint."""

    def __init__(
        self, lookup: Lookup, limits: StreamLimits, *, split_streams: bool, idle_seconds: float
    ) -> None:
        self._lookup = lookup
        self._limits = limits
        self._split_streams = split_streams
        self._idle_seconds = idle_seconds

    def routes(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get("/containerLogs/{namespace}/{pod}/{container}", self._answer, allow_head=False)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wish = read_log_wish(request.query, time.time_ns(), split_streams=self._split_streams)
        name, container = request.match_info["pod"], request.match_info["container"]
        pod = self._lookup.pod(request.match_info["namespace"], name)
        if pod is None:
            raise Refused(404, f'pod "{name}" does not exist')
        if container_of(pod, container) is None:
            raise Refused(404, f'container "{container}" not found in pod "{name}"')
        run = choose_run(pod, container, previous=wish.previous)
        with self._limits.one_more(user_name(request)):
            async with _opened(await self._path(run)) as file:
                return await self._respond(request, file, wish, pod, container, run)

    async def _respond(
        self, request: web.Request, file: LogFile, wish: LogWish, pod: Pod, container: str, run: str
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        await self._send(answer, file, wish, pod, container, run)
        return answer

    async def _path(self, run: str) -> Path:
        try:
            status = await self._lookup.runtime.container_status(run.partition("://")[2])
        except CriError as err:
            log.v(4).info("Failed to get container status", containerID=run, err=err)
            raise Refused(400, f"unable to retrieve container logs for {run}") from err
        return Path(status.status.log_path)

    async def _send(
        self, answer: web.StreamResponse, file: LogFile, wish: LogWish, pod: Pod, container: str, run: str
    ) -> None:
        async def goes_on() -> bool:
            return is_running(self._lookup.recent(pod.uid), container, run)

        if wish.tail is not None:
            await seek_last_lines(file, wish.tail)
        writer = LineWriter(timestamps=wish.timestamps, since=wish.since)
        blocks = follow_blocks(file, goes_on) if wish.follow else present_blocks(file)
        left = wish.limit
        # The answer has begun: what goes wrong now can only end it.
        with suppress(OSError, TimeoutError):
            async with aclosing(blocks):
                async for block in blocks:
                    for text in writer.texts(block, wish.streams):
                        piece = text[:left]
                        if piece:
                            async with asyncio.timeout(self._idle_seconds):
                                await answer.write(piece)
                        if left is not None and not (left := left - len(piece)):
                            return
                        # Sending to a quick client never waits; others must get their turn.
                        await asyncio.sleep(0)


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[LogFile]:
    try:
        file = await asyncio.to_thread(LogFile, path)
    except OSError as err:
        raise Refused(400, f'failed to open log file "{path}": {err.strerror or err}') from err
    with closing(file):
        yield file
