"""`/logs/`: the files below /var/log, and nothing else of the machine.

Whoever can write to /var/log (a pod with a hostPath, say) must not be able to show the rest of the machine
through a link. So a path is resolved, must still be below, and is then opened folder by folder without
following any link: what is changed in between is not followed either.
"""

from __future__ import annotations

import html
import mimetypes
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from aiohttp import hdrs, web

from pykubelet.server.refused import Refused

NODE_LOGS = Path("/var/log")
_BLOCK = 256 * 1024
_SAFE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def node_log_routes(root: Path = NODE_LOGS) -> list[web.RouteDef]:
    """Routes for the files of a folder."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.match_info.get("path", "")
        try:
            opened = open_below(root, path)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused(404, "404 page not found\n") from None
        except PermissionError:
            raise Refused(403, "403 Forbidden\n") from None
        except OSError:
            raise Refused(500, "500 Internal Server Error\n") from None
        try:
            mode = os.fstat(opened).st_mode
            if stat.S_ISDIR(mode):
                return _listing(opened, request)
            if not stat.S_ISREG(mode):
                raise Refused(403, "403 Forbidden\n")
            return await _contents(opened, request)
        finally:
            os.close(opened)

    return [web.get("/logs/", answer), web.get("/logs/{path:.+}", answer)]


def open_below(root: Path, path: str) -> int:
    """Open a file or folder below `root`; raises OSError, PermissionError when the path leads elsewhere."""
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


async def _contents(file: int, request: web.Request) -> web.StreamResponse:
    size = os.fstat(file).st_size
    kind = mimetypes.guess_type(request.path)[0] or "text/plain; charset=utf-8"
    answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind, "X-Content-Type-Options": "nosniff"})
    answer.content_length = size
    await answer.prepare(request)
    # A file that grows meanwhile is given as it was; one that is cut short ends the connection.
    left = size if request.method == "GET" else 0
    while left > 0 and (data := os.read(file, min(_BLOCK, left))):
        await answer.write(data)
        left -= len(data)
    if left > 0 and request.transport is not None:
        request.transport.abort()
    return answer
