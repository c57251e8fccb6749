"""`/containerLogs/{namespace}/{pod}/{container}`: container logs, with the API's PodLogOptions as query.

The log is read from the runtime's file in blocks, no faster than the client reads. Following ends when the
container has terminated and everything is sent; log rotation does not end it.

Without `sinceSeconds`, `sinceTime` and `tailLines`, only the file being written is read, as upstream. With
one of them, the response reaches back through the rotated and compressed files of the container.

Error messages are upstream's, byte for byte, because clients and the API server pass them on.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from aiohttp import web

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.kuberuntime.log_rotation.readers import LogReader, LogReaders
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError, user_name
from pykubelet.server.logs.log_chain import open_newest_rotated
from pykubelet.server.logs.log_files import (
    LineWriter,
    LogFile,
    MayGrow,
    Stream,
    follow_blocks,
    present_blocks,
    seek_last_lines,
    seek_last_of,
)
from pykubelet.server.lookup import PodLookup, find_container
from pykubelet.server.streams.streaming import StreamLimits
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:[.,]([0-9]+))?(Z|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
)
_NANOS = 1_000_000_000
_REOPEN_TRIES, _REOPEN_SECONDS = 10, 0.05
"""Number of attempts to open a log that is being rotated, and the seconds between them."""
_STREAMS: dict[str, tuple[Stream, ...]] = {
    "All": ("stdout", "stderr"),
    "Stdout": ("stdout",),
    "Stderr": ("stderr",),
}


@dataclass(frozen=True, slots=True)
class PodLogOptions:
    """Options of a log request."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    limit: int | None = None
    """Maximum bytes of the response."""
    since: int | None = None
    """Oldest timestamp, in nanoseconds since the Unix epoch."""
    streams: tuple[Stream, ...] = _STREAMS["All"]


def parse_log_options(query: Mapping[str, str], now: int, *, split_streams: bool) -> PodLogOptions:
    """Parse a query; `now` is in nanoseconds since the Unix epoch. Raises HttpError."""
    tail_text = query.get("tail") or query.get("tailLines")
    tail = None if tail_text == "all" else _number(tail_text)
    limit, seconds = _number(query.get("limitBytes")), _number(query.get("sinceSeconds"))
    since_time = _time(query.get("sinceTime"))
    stream = query.get("stream", "All")
    invalid = (
        (tail is not None and tail < 0)
        or (limit is not None and limit < 1)
        or (seconds is not None and (seconds < 1 or since_time is not None))
        or stream not in _STREAMS
        or (stream != "All" and tail is not None)
    )
    if invalid:
        raise HttpError(422, '{"message": "Invalid request."}')
    if stream != "All" and not split_streams:
        raise HttpError(
            400,
            f'unable to return the given log stream: "{stream}". '
            "Please enable PodLogsQuerySplitStreams feature gate in kubelet",
        )
    return PodLogOptions(
        follow=_flag(query.get("follow")),
        previous=_flag(query.get("previous")),
        timestamps=_flag(query.get("timestamps")),
        tail=tail,
        limit=limit,
        since=now - seconds * _NANOS if seconds is not None else since_time,
        streams=_STREAMS[stream],
    )


def choose_container_id(pod: Pod, container: str, *, previous: bool) -> str:
    """Return the ID (`containerd://…`) of the container whose log is requested. Raises HttpError."""
    name = pod.metadata.name
    status = _status(pod, container)
    if status is None:
        raise HttpError(400, f'container "{container}" in pod "{name}" is not available')
    last = status.last_state.terminated
    last_id = last.container_id if last is not None else ""
    if previous:
        if last_id:
            return last_id
        raise HttpError(400, f'previous terminated container "{container}" in pod "{name}" not found')
    state = status.state
    if state.running is not None:
        return str(status.container_id or "")
    if state.terminated is not None or last is not None:
        terminated_id = state.terminated.container_id if state.terminated is not None else ""
        if found := terminated_id or last_id:
            return found
        raise HttpError(400, f'container "{container}" in pod "{name}" is terminated')
    if state.waiting is not None:
        reason = state.waiting.reason or ""
        message = _WAITING_MESSAGES.get(reason, reason)
        raise HttpError(400, f'container "{container}" in pod "{name}" is waiting to start: {message}')
    raise HttpError(400, f'container "{container}" in pod "{name}" is waiting to start - no logs yet')


def is_running(pod: Pod | None, container: str, container_id: str) -> bool:
    """Return whether the container with ID `container_id` is running according to the pod status."""
    status = _status(pod, container) if pod is not None else None
    return status is not None and status.state.running is not None and status.container_id == container_id


_WAITING_MESSAGES = {
    "ErrImagePull": "image can't be pulled",
    "ImagePullBackOff": "trying and failing to pull image",
}


def _status(pod: Pod, container: str) -> ContainerStatus | None:
    pod_status = pod.status
    statuses = (
        *pod_status.container_statuses,
        *pod_status.init_container_statuses,
        *pod_status.ephemeral_container_statuses,
    )
    return next((status for status in statuses if status.name == container), None)


def _flag(text: str | None) -> bool:
    return text is not None and text.lower() not in ("false", "0")


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None or not -(2**63) <= int(text) < 2**63:
        raise _undecodable()
    return int(text)


def _time(text: str | None) -> int | None:
    if not text or text == "null":
        return None
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        moment = datetime.fromisoformat(match[1] + ("+00:00" if match[3] == "Z" else match[3]))
        seconds = int(moment.timestamp())
    except (ValueError, OverflowError):
        raise _undecodable() from None
    return seconds * _NANOS + int((match[2] or "")[:9].ljust(9, "0"))


def _undecodable() -> HttpError:
    return HttpError(400, '{"message": "Unable to decode query."}')


class ContainerLogs:
    """Endpoint `/containerLogs`."""

    def __init__(
        self,
        lookup: PodLookup,
        limits: StreamLimits,
        readers: LogReaders,
        *,
        split_streams: bool,
        idle_seconds: float,
    ) -> None:
        self._lookup = lookup
        self._limits = limits
        self._readers = readers
        self._split_streams = split_streams
        self._idle_seconds = idle_seconds

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get("/containerLogs/{namespace}/{pod}/{container}", self._handle, allow_head=False)]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        options = parse_log_options(request.query, time.time_ns(), split_streams=self._split_streams)
        name, container = request.match_info["pod"], request.match_info["container"]
        pod = self._lookup.pod(request.match_info["namespace"], name)
        if pod is None:
            raise HttpError(404, f'pod "{name}" does not exist')
        if find_container(pod, container) is None:
            raise HttpError(404, f'container "{container}" not found in pod "{name}"')
        container_id = choose_container_id(pod, container, previous=options.previous)
        with self._limits.acquire(user_name(request)):
            async with _open_log(await self._path(container_id)) as file:
                return await self._respond(request, file, options, pod, container, container_id)

    async def _respond(
        self,
        request: web.Request,
        file: LogFile,
        options: PodLogOptions,
        pod: Pod,
        container: str,
        container_id: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await self._send(response, file, options, pod, container, container_id)
        return response

    async def _path(self, container_id: str) -> Path:
        try:
            status = await self._lookup.runtime.container_status(container_id.partition("://")[2])
        except CriError as err:
            log.v(4).info("Failed to get container status", containerID=container_id, err=err)
            raise HttpError(400, f"unable to retrieve container logs for {container_id}") from err
        return Path(status.status.log_path)

    async def _send(
        self,
        response: web.StreamResponse,
        file: LogFile,
        options: PodLogOptions,
        pod: Pod,
        container: str,
        container_id: str,
    ) -> None:
        async def may_grow() -> bool:
            return is_running(self._lookup.recent_pod(pod.uid), container, container_id)

        writer = LineWriter(timestamps=options.timestamps, since=options.since)
        blocks = self._blocks(file, options, may_grow)
        remaining = options.limit
        # The response status is already sent: an error can only end the response.
        with suppress(OSError, TimeoutError):
            async with aclosing(blocks):
                async for block in blocks:
                    for text in writer.texts(block, options.streams):
                        piece = text[:remaining]
                        if piece:
                            async with asyncio.timeout(self._idle_seconds):
                                await response.write(piece)
                        if remaining is not None and not (remaining := remaining - len(piece)):
                            return
                        # Writing to a fast client never blocks; yield to other tasks.
                        await asyncio.sleep(0)

    async def _blocks(
        self, file: LogFile, options: PodLogOptions, may_grow: MayGrow
    ) -> AsyncGenerator[bytes, None]:
        """Yield the selected lines of all files of the log."""
        with ExitStack() as stack:
            # The files of other requests are all open before the first is read.
            reader = stack.enter_context(self._readers.reading(str(file.path))) if options.follow else None
            for older in await _select_older(file, options, stack):
                async with aclosing(present_blocks(older)) as blocks:
                    async for block in blocks:
                        yield block
                if reader is not None:
                    reader.on_file(reader.stem)  # it reads, although the log may have been rotated meanwhile

            async with aclosing(_newest_blocks(file, may_grow, reader)) as blocks:
                async for block in blocks:
                    yield block


def _newest_blocks(file: LogFile, may_grow: MayGrow, reader: LogReader | None) -> AsyncGenerator[bytes, None]:
    """Follow the file for a reader, or return its present content."""
    if reader is None:
        return present_blocks(file)

    if file.stem is not None:
        reader.on_file(file.stem)
    return follow_blocks(file, may_grow, reader.on_file)


async def _select_older(file: LogFile, options: PodLogOptions, stack: ExitStack) -> Sequence[LogFile]:
    """Seek to the first selected line, and return the rotated files to read before, oldest first."""
    missing = 0
    if options.tail is not None:
        await seek_last_lines(file, options.tail)
        missing = file.missing_lines
    if not missing and (options.tail is not None or options.since is None):
        return ()
    try:
        older = await finish_in_thread(lambda: file.older(options.since))
    except OSError as err:
        log.v(2).info("Failed to open rotated logs", path=str(file.path), err=err)
        return ()
    for opened in older:
        stack.callback(opened.close)
    return older[await seek_last_of(older, missing) :] if missing else older


@asynccontextmanager
async def _open_log(path: Path) -> AsyncIterator[LogFile]:
    try:
        file = await _open_existing(path)
    except OSError as err:
        raise HttpError(400, f'failed to open log file "{path}": {err.strerror or err}') from err
    with closing(file):
        yield file


async def _open_existing(path: Path) -> LogFile:
    """Open a log, or its newest rotated file while it is being rotated. Raises OSError."""
    for _ in range(_REOPEN_TRIES):
        try:
            return await asyncio.to_thread(LogFile, path)
        except FileNotFoundError:
            # Between its renaming and its reopening a log does not exist.
            rotated = await asyncio.to_thread(open_newest_rotated, path)
            if rotated is None:
                raise
            rotated.file.close()
            await asyncio.sleep(_REOPEN_SECONDS)
    rotated = await asyncio.to_thread(open_newest_rotated, path)
    return LogFile(path, rotated)
