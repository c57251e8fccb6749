"""`/logs/`: files below /var/log, and node log queries (`/logs/?query=…`).

Only files below /var/log are accessible. A writer of /var/log (such as a pod with a hostPath volume) must not
be able to expose other files through a symbolic link: a path is resolved, must still be below /var/log, and
is then opened component by component without following links, so that a concurrent replacement is not
followed either.

If node log query is enabled, `/logs/?query=…` returns the log of services or of one file. A service with a
systemd unit in the journal is read with journalctl, any other from its file below /var/log. A query has a
timeout of 30 s, and journalctl is killed if the client disconnects.

A service name becomes an argument and part of a path, so only characters that are special to neither are
accepted (CVE-2024-9042: command injection through a service name on Windows); no shell is involved.

Files are opened, listed and read in threads: a slow disk or a directory with many entries must not block the
event loop.
"""

from __future__ import annotations

import asyncio
import errno
import html
import mimetypes
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

from aiohttp import hdrs, web
from multidict import MultiMapping

from pykubelet.linux.processes import kill_and_wait, search_path
from pykubelet.server.auth.identity import HttpError, user_name
from pykubelet.server.streams.streaming import StreamLimits
from pykubelet.util.tasks import finish_in_thread, run_or_undo

MAX_SERVICES = 4
MAX_TAIL_LINES = 100_000
LONGEST_NAME = 256
LONGEST_PATTERN = 4096
_UNSAFE = re.compile(r"[^a-zA-Z\-_.:0-9@]")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Options of a node log query; times have no fractional seconds, as journalctl receives them."""

    services: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    tail: int | None = None
    boot: int | None = None
    pattern: str = ""

    @property
    def has_options(self) -> bool:
        """Whether the query has options in addition to services or files."""
        options = (self.since, self.until, self.tail, self.boot)
        return any(option is not None for option in options) or bool(self.pattern)


def read_log_query(query: MultiMapping[str]) -> LogQuery | None:
    """Parse a query; return None if it has no log query options. Raises HttpError (400) if invalid."""
    problems: list[str] = []
    requested = query.getall("query", [])
    files = tuple(each for each in requested if "/" in each or "\\" in each)
    services = tuple(each for each in requested if each.strip() and each not in files)
    if requested and not files and not services:
        problems.append(f"query: Invalid value: {requested}: may not be empty")
    parsed = LogQuery(
        services=services,
        files=files,
        since=_time(query, "sinceTime", problems),
        until=_time(query, "untilTime", problems),
        tail=_number(query, "tailLines", problems),
        boot=_number(query, "boot", problems),
        pattern=query.get("pattern", ""),
    )
    _raise_problems(400, problems)
    return parsed if parsed != LogQuery() else None


def check_log_query(query: LogQuery) -> None:
    """Validate a query. Raises HttpError (406) with all validation errors."""
    problems = [
        f"query: Invalid value: {name!r}: {problem}"
        for name in query.services
        if (problem := _name_problem(name))
    ]
    files, services = query.files, query.services
    if len(services) > MAX_SERVICES:
        problems.append(f"query: Too many: {len(services)}: must have at most {MAX_SERVICES} items")
    if not files and not services:
        problems.append("query: Required value: cannot be empty with options")
    elif files and services:
        problems.append("query: Invalid value: cannot specify a file and service")
    elif len(files) > 1:
        problems.append("query: Invalid value: cannot specify more than one file")
    elif files and query.has_options:
        problems.append("query: Invalid value: cannot specify file with options")
    if query.since is not None and query.until is not None and query.since > query.until:
        problems.append("untilTime: Invalid value: must be after `sinceTime`")
    if query.boot is not None and query.boot > 0:
        problems.append(f"boot: Invalid value: {query.boot}: must be less than 1")
    if query.tail is not None and not 0 <= query.tail <= MAX_TAIL_LINES:
        problems.append(
            f"tailLines: Invalid value: {query.tail}: must be between 0 and {MAX_TAIL_LINES}, inclusive"
        )
    problems += _pattern_problems(query.pattern)
    _raise_problems(406, problems)


def journal_arguments(query: LogQuery) -> list[str]:
    """Return the arguments of journalctl; each value follows its option's `=`."""
    arguments = ["--utc", "--no-pager", "--output=short-precise"]
    if query.since is not None:
        arguments.append(f"--since={query.since:%Y-%m-%d %H:%M:%S}")
    if query.until is not None:
        arguments.append(f"--until={query.until:%Y-%m-%d %H:%M:%S}")
    if query.tail is not None:
        arguments += ["--pager-end", f"--lines={query.tail}"]
    arguments += [f"--unit={service}" for service in query.services]
    if query.pattern:
        arguments.append(f"--grep={query.pattern}")
    if query.boot is not None:
        arguments.append(f"--boot={query.boot}")
    return arguments


def log_paths(service: str) -> tuple[str, str, str]:
    """Return candidate paths of a service's log file, below the log directory; the first existing is used."""
    return service, f"{service}.log", f"{service}/{service}.log"


def _name_problem(name: str) -> str:
    if len(name) > LONGEST_NAME:
        return f"length must be less than {LONGEST_NAME}"
    return "input contains unsupported characters" if _UNSAFE.search(name) else ""


def _pattern_problems(pattern: str) -> list[str]:
    if len(pattern) > LONGEST_PATTERN:
        return [f"pattern: Invalid value: must have at most {LONGEST_PATTERN} characters"]
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as err:
        return [f"pattern: Invalid value: {pattern!r}: {err}"]
    return ["pattern: Invalid value: must not contain NUL"] if "\0" in pattern else []


def _time(query: MultiMapping[str], key: str, problems: list[str]) -> datetime | None:
    text = query.get(key, "")
    if not text:
        return None
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        return datetime.fromisoformat(match[1] + match[2].replace("Z", "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        problems.append(f"{key}: Invalid value: {text!r}: invalid time format")
        return None


def _number(query: MultiMapping[str], key: str, problems: list[str]) -> int | None:
    text = query.get(key, "")
    if not text:
        return None
    if _NUMBER.fullmatch(text) is None:
        problems.append(f"{key}: Invalid value: {text!r}: not a number")
        return None
    return int(text)


def _raise_problems(status: int, problems: list[str]) -> None:
    if problems:
        text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise HttpError(status, text + "\n")


QUERY_TIMEOUT_SECONDS = 30.0
_JOURNAL_BLOCK = 256 * 1024
_MAX_UNITS_BYTES = 4 * 1024 * 1024
_UNITS = ("--field", "_SYSTEMD_UNIT")
Open = Callable[[str], int]
"""Opens a file below the log directory, and no other file. Raises OSError."""
Write = Callable[[bytes], Awaitable[None]]
"""Sends a part of the response body."""


async def write_log_query(query: LogQuery, open_log: Open, program: str | None, write: Write) -> None:
    """Write the response body; errors are written into it, because the status is already sent."""
    try:
        async with asyncio.timeout(QUERY_TIMEOUT_SECONDS):
            units = await _units(program) if program is not None else b""
            unit_services = tuple(name for name in query.services if f"{name}.service".encode() in units)
            file_services = [name for name in query.services if name not in unit_services]
            if unit_services and program is not None:
                await _run_journalctl(
                    program, journal_arguments(replace(query, services=unit_services)), write
                )
            if file_services and query.has_options:
                text = f"options present and query resolved to log files for [{' '.join(file_services)}]"
                await write(f"\n{text}\ntry without specifying options\n".encode())
                return
            for name in file_services:
                await _write_file(name, open_log, write)
    except TimeoutError:
        await write(f"\nthe log was cut off after {QUERY_TIMEOUT_SECONDS:g} s\n".encode())


def find_journalctl() -> str | None:
    """Return the path of journalctl; None if it is not installed."""
    return shutil.which("journalctl", path=search_path())


async def _write_file(service: str, open_log: Open, write: Write) -> None:
    for path in log_paths(service):
        try:
            file = await _open(open_log, path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as err:
            await write(f"\nerror getting log for {service}: {err.strerror or 'not allowed'}\n".encode())
            return
        try:
            mode = os.fstat(file).st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                await write(f"\nerror getting log for {service}: not a regular file\n".encode())
                return
            # Bytes appended after this are not read.
            remaining = os.fstat(file).st_size
            while remaining > 0:
                data = await finish_in_thread(partial(os.read, file, min(_JOURNAL_BLOCK, remaining)))
                if not data:
                    break
                remaining -= len(data)
                await write(data)
            return
        finally:
            os.close(file)
    await write(f"\nlog not found for {service}\n".encode())


async def _open(open_log: Open, path: str) -> int:
    """Open a log in a thread, because resolving its path reads directories of the disk. Raises OSError."""

    async def close(opened: int) -> None:
        os.close(opened)

    return await run_or_undo(finish_in_thread(partial(open_log, path)), close)


async def _units(program: str) -> bytes:
    output = bytearray()

    async def collect(data: bytes) -> None:
        del output[_MAX_UNITS_BYTES:]
        output.extend(data)

    await _run_journalctl(program, _UNITS, collect)
    return bytes(output)


async def _run_journalctl(program: str, arguments: Sequence[str], write: Write) -> None:
    try:
        process = await run_or_undo(
            asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            ),
            kill_and_wait,
        )
    except OSError:
        await write(b"\nerror: journal output not available\n")
        return
    try:
        assert process.stdout is not None
        while data := await process.stdout.read(_JOURNAL_BLOCK):
            await write(data)
    finally:
        await kill_and_wait(process)


NODE_LOGS = Path("/var/log")
_BLOCK = 256 * 1024
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def node_log_routes(root: Path = NODE_LOGS, query_limits: StreamLimits | None = None) -> list[web.RouteDef]:
    """Return the routes of `/logs/` for the directory `root`; `query_limits` enables log queries."""

    async def respond(request: web.Request) -> web.StreamResponse:
        path = request.match_info.get("path", "")
        query = read_log_query(request.query) if query_limits is not None else None
        if query is not None and query_limits is not None:
            if path:
                raise HttpError(406, "path not allowed in query mode\n")
            check_log_query(query)
            if query.services:
                with query_limits.acquire(user_name(request)):
                    return await _respond_to_query(query, request, root)
            path = query.files[0].replace("\\", "/")
        try:
            opened = await _open(partial(open_below, root), path)
        except OSError as err:
            raise _open_error(err, is_query=query is not None) from None
        try:
            mode = os.fstat(opened).st_mode
            if stat.S_ISDIR(mode):
                if query is not None:
                    raise HttpError(406, "query: Invalid value: is a folder\n")
                return await _listing(opened, request)
            if not stat.S_ISREG(mode):
                raise HttpError(403, "403 Forbidden\n")
            return await _contents(opened, request)
        finally:
            os.close(opened)

    return [web.get("/logs/", respond), web.get("/logs/{path:.+}", respond)]


def open_below(root: Path, path: str) -> int:
    """Open a file or directory below `root`. Raises OSError; PermissionError if the path is not below it."""
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    real_root = Path(os.path.realpath(root))
    target = Path(os.path.realpath(real_root / path.lstrip("/"), strict=True))
    if not target.is_relative_to(real_root):
        raise PermissionError(f"{path} leads out of {root}")
    opened = os.open(real_root, _OPEN_FLAGS | os.O_DIRECTORY)
    for part in target.relative_to(real_root).parts:
        try:
            below = os.open(part, _OPEN_FLAGS, dir_fd=opened)
        finally:
            os.close(opened)
        opened = below
    return opened


def _open_error(err: OSError, *, is_query: bool) -> HttpError:
    if is_query:
        return HttpError(406, f"query: Invalid value: {err.strerror or 'leads elsewhere'}\n")
    if isinstance(err, FileNotFoundError | NotADirectoryError):
        return HttpError(404, "404 page not found\n")
    if isinstance(err, PermissionError):
        return HttpError(403, "403 Forbidden\n")
    return HttpError(500, "500 Internal Server Error\n")


async def _listing(directory: int, request: web.Request) -> web.Response:
    if not request.path.endswith("/"):
        # A relative redirect works behind the API server's proxy.
        return web.Response(status=301, headers={hdrs.LOCATION: quote(request.path.rpartition("/")[2]) + "/"})
    page = await finish_in_thread(partial(_listing_page, directory))
    return web.Response(text=page, content_type="text/html")


def _listing_page(directory: int) -> str:
    """Return the entries of a directory as HTML. Blocks."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name + ("/" if _is_directory(entry.is_dir) else "") for entry in entries)
    links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names)
    return f"<!doctype html>\n<pre>\n{links}</pre>\n"


def _is_directory(check: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return check()
    return False


async def _respond_to_query(query: LogQuery, request: web.Request, root: Path) -> web.StreamResponse:
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/plain;charset=UTF-8"})
    response.headers["X-Content-Type-Options"] = "nosniff"
    if request.headers.get(hdrs.ACCEPT_ENCODING) == "gzip":
        response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    await write_log_query(query, lambda path: open_below(root, path), find_journalctl(), response.write)
    return response


async def _contents(file: int, request: web.Request) -> web.StreamResponse:
    state = os.fstat(file)
    kind = mimetypes.guess_type(request.path)[0] or "text/plain; charset=utf-8"
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind, "X-Content-Type-Options": "nosniff"})
    response.headers[hdrs.ACCEPT_RANGES] = "bytes"
    response.last_modified = int(state.st_mtime)
    unchanged = request.if_modified_since
    if unchanged is not None and int(state.st_mtime) <= unchanged.timestamp():
        response.set_status(304)
        await response.prepare(request)
        return response
    start, stop = _range(request, state)
    if (start, stop) != (0, state.st_size):
        response.set_status(206)
        response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{stop - 1}/{state.st_size}"
    response.content_length = remaining = stop - start
    await response.prepare(request)
    if request.method != "GET":
        return response
    # Bytes appended concurrently are not sent; if the file is truncated, the connection is aborted.
    while remaining > 0:
        data = await finish_in_thread(partial(os.pread, file, min(_BLOCK, remaining), start))
        if not data:
            break
        await response.write(data)
        remaining -= len(data)
        start += len(data)
    if remaining > 0 and request.transport is not None:
        request.transport.abort()
    return response


def _range(request: web.Request, state: os.stat_result) -> tuple[int, int]:
    """Return the requested byte range: the whole file unless one range is given. Raises HttpError (416)."""
    full_range = (0, state.st_size)
    if hdrs.RANGE not in request.headers:
        return full_range
    condition = request.if_range
    if hdrs.IF_RANGE in request.headers and (
        condition is None or int(state.st_mtime) > condition.timestamp()
    ):
        return full_range
    try:
        byte_range = request.http_range
    except ValueError:
        # Multiple ranges are not supported; the whole file is a valid response.
        if re.fullmatch(r"bytes=[0-9 ,-]*,[0-9 ,-]*", request.headers[hdrs.RANGE]):
            return full_range
        raise _unsatisfiable(state) from None
    start, stop, _ = byte_range.indices(state.st_size)
    if start >= stop:
        raise _unsatisfiable(state)
    return start, stop


def _unsatisfiable(state: os.stat_result) -> HttpError:
    return HttpError(416, "invalid range\n", {hdrs.CONTENT_RANGE: f"bytes */{state.st_size}"})
