"""`/logs/`: the files below /var/log, and nothing else of the machine.

Whoever can write to /var/log (a pod with a hostPath, say) must not be able to show the rest of the machine
through a link. So a path is resolved, must still be below, and is then opened folder by folder without
following any link: what is changed in between is not followed either.

Where node log query is switched on, `/logs/?query=…` asks for the log of a service (`log_query.py`).
"""

from __future__ import annotations

import errno
import html
import mimetypes
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from aiohttp import hdrs, web

from pykubelet.server.journal import answer_log_query, find_journalctl
from pykubelet.server.log_query import LogQuery, check_log_query, read_log_query
from pykubelet.server.pipeline import user_name
from pykubelet.server.refused import Refused
from pykubelet.server.stream_limits import StreamLimits

NODE_LOGS = Path("/var/log")
_BLOCK = 256 * 1024
_SAFE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def node_log_routes(root: Path = NODE_LOGS, queries: StreamLimits | None = None) -> list[web.RouteDef]:
    """Routes for the files of a folder; with `queries`, so many queries of services at once, too."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.match_info.get("path", "")
        query = read_log_query(request.query) if queries is not None else None
        if query is not None and queries is not None:
            if path:
                raise Refused(406, "path not allowed in query mode\n")
            check_log_query(query)
            if query.services:
                with queries.one_more(user_name(request)):
                    return await _answer_query(query, request, root)
            path = query.files[0].replace("\\", "/")
        try:
            opened = open_below(root, path)
        except OSError as err:
            raise _not_opened(err, is_query=query is not None) from None
        try:
            mode = os.fstat(opened).st_mode
            if stat.S_ISDIR(mode):
                if query is not None:
                    raise Refused(406, "query: Invalid value: is a folder\n")
                return _listing(opened, request)
            if not stat.S_ISREG(mode):
                raise Refused(403, "403 Forbidden\n")
            return await _contents(opened, request)
        finally:
            os.close(opened)

    return [web.get("/logs/", answer), web.get("/logs/{path:.+}", answer)]


def open_below(root: Path, path: str) -> int:
    """Open a file or folder below `root`; raises OSError, PermissionError when the path leads elsewhere."""
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    home = Path(os.path.realpath(root))
    target = Path(os.path.realpath(home / path.lstrip("/"), strict=True))
    if not target.is_relative_to(home):
        raise PermissionError(f"{path} leads out of {root}")
    opened = os.open(home, _SAFE | os.O_DIRECTORY)
    for part in target.relative_to(home).parts:
        try:
            below = os.open(part, _SAFE, dir_fd=opened)
        finally:
            os.close(opened)
        opened = below
    return opened


def _not_opened(err: OSError, *, is_query: bool) -> Refused:
    if is_query:
        return Refused(406, f"query: Invalid value: {err.strerror or 'leads elsewhere'}\n")
    if isinstance(err, FileNotFoundError | NotADirectoryError):
        return Refused(404, "404 page not found\n")
    if isinstance(err, PermissionError):
        return Refused(403, "403 Forbidden\n")
    return Refused(500, "500 Internal Server Error\n")


def _listing(folder: int, request: web.Request) -> web.Response:
    if not request.path.endswith("/"):
        # Relative, so that it works behind the API server's proxy.
        return web.Response(status=301, headers={hdrs.LOCATION: quote(request.path.rpartition("/")[2]) + "/"})
    with os.scandir(folder) as entries:
        names = sorted(entry.name + ("/" if _is_folder(entry.is_dir) else "") for entry in entries)
    links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names)
    return web.Response(text=f"<!doctype html>\n<pre>\n{links}</pre>\n", content_type="text/html")


def _is_folder(ask: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return ask()
    return False


async def _answer_query(query: LogQuery, request: web.Request, root: Path) -> web.StreamResponse:
    answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/plain;charset=UTF-8"})
    answer.headers["X-Content-Type-Options"] = "nosniff"
    if request.headers.get(hdrs.ACCEPT_ENCODING) == "gzip":
        answer.enable_compression(web.ContentCoding.gzip)
    await answer.prepare(request)
    await answer_log_query(query, lambda place: open_below(root, place), find_journalctl(), answer.write)
    return answer


async def _contents(file: int, request: web.Request) -> web.StreamResponse:
    state = os.fstat(file)
    kind = mimetypes.guess_type(request.path)[0] or "text/plain; charset=utf-8"
    answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind, "X-Content-Type-Options": "nosniff"})
    answer.headers[hdrs.ACCEPT_RANGES] = "bytes"
    answer.last_modified = int(state.st_mtime)
    unchanged = request.if_modified_since
    if unchanged is not None and int(state.st_mtime) <= unchanged.timestamp():
        answer.set_status(304)
        await answer.prepare(request)
        return answer
    start, stop = _range(request, state)
    if (start, stop) != (0, state.st_size):
        answer.set_status(206)
        answer.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{stop - 1}/{state.st_size}"
    answer.content_length = left = stop - start
    await answer.prepare(request)
    if request.method != "GET":
        return answer
    # A file that grows meanwhile is given as it was; one that is cut short ends the connection.
    while left > 0 and (data := os.pread(file, min(_BLOCK, left), start)):
        await answer.write(data)
        left -= len(data)
        start += len(data)
    if left > 0 and request.transport is not None:
        request.transport.abort()
    return answer


def _range(request: web.Request, state: os.stat_result) -> tuple[int, int]:
    """Which bytes are wanted: all, unless one range of them is asked for; raises Refused (416)."""
    whole = (0, state.st_size)
    if hdrs.RANGE not in request.headers:
        return whole
    condition = request.if_range
    if hdrs.IF_RANGE in request.headers and (
        condition is None or int(state.st_mtime) > condition.timestamp()
    ):
        return whole
    try:
        wanted = request.http_range
    except ValueError:
        # Several ranges at once are not given; the whole is a good answer to those.
        if re.fullmatch(r"bytes=[0-9 ,-]*,[0-9 ,-]*", request.headers[hdrs.RANGE]):
            return whole
        raise _unsatisfiable(state) from None
    start, stop, _ = wanted.indices(state.st_size)
    if start >= stop:
        raise _unsatisfiable(state)
    return start, stop


def _unsatisfiable(state: os.stat_result) -> Refused:
    return Refused(416, "invalid range\n", {hdrs.CONTENT_RANGE: f"bytes */{state.st_size}"})
