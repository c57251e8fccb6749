"""Requests of cAdvisor's API: path, query parameters and body, checked and bounded.

Texts of errors follow cAdvisor's. It responds to most of them with status 500; here it is 400 for a request
that cannot be served, and 404 for a cgroup that does not exist.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
from aiohttp import web
from multidict import MultiMapping

from pykubelet.api.duration import Duration
from pykubelet.server.auth.identity import HttpError
from pykubelet.stats.samples import Usage
from pykubelet.util.text import quoted

MAX_BODY_BYTES = 4096
BODY_TIMEOUT_SECONDS = 10.0
DEFAULT_COUNT = 64
_ID_TYPES = ("", "name", "docker", "podman")
_V1 = ("containers", "machine", "subcontainers")
_V20 = ("attributes", "machine", "spec", "stats", "storage", "summary", "version")
VERSIONS: dict[str, tuple[str, ...]] = {
    "v1.0": ("containers", "machine"),
    "v1.1": _V1,
    "v1.2": _V1,
    "v1.3": _V1,
    "v2.0": _V20,
    "v2.1": ("attributes", "machine", "machinestats", *_V20[2:]),
}
"""Request types by version of the API."""


@dataclass(frozen=True, slots=True)
class ApiPath:
    """A request path below `/api/`, in parts."""

    version: str
    type: str
    container: str
    """Path of a cgroup; `/` if the request has none."""


class ContainerInfoRequest(msgspec.Struct):
    """Body of requests of the v1 API: which samples to return; `num_stats` is -1 for all."""

    num_stats: Annotated[int, msgspec.Meta(ge=-1)] = 60
    start: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    end: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    def select(self, usage: Usage | None) -> Usage | None:
        """Return the sample if it is requested; times in the year 1 mean no limit, as Go writes them."""
        if usage is None or self.num_stats == 0:
            return None
        if self.start is not None and self.start.year > 1 and usage.time < self.start.timestamp():
            return None
        if self.end is not None and self.end.year > 1 and usage.time > self.end.timestamp():
            return None
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Query parameters of the v2 API."""

    id_type: str = "name"
    """`name`, or the namespace in which containers are searched: `docker` or `podman`."""
    count: int = DEFAULT_COUNT
    """Samples to return; -1 for all."""
    recursive: bool = False
    max_age: float | None = None
    """Seconds; older samples are taken again before the response."""


def parse_path(path: str) -> ApiPath:
    """Return the parts of a decoded request path. Raises HttpError (400)."""
    version, type_, *container = [*path.removeprefix("/api").removeprefix("/").split("/"), ""]
    if not version:
        raise HttpError(400, f"Supported API versions: {','.join(VERSIONS)}\n")
    if version not in VERSIONS:
        raise HttpError(400, f"unsupported API version {quoted(version)}\n")
    if not type_:
        raise HttpError(400, f"Supported request types: {quoted(','.join(VERSIONS[version]))}\n")
    if type_ not in VERSIONS[version]:
        raise HttpError(400, f"unknown request type {quoted(type_)}\n")
    return ApiPath(version, type_, "/" + "/".join(part for part in container if part))


def parse_options(query: MultiMapping[str]) -> RequestOptions:
    """Return the options in a query. Raises HttpError (400)."""
    type_, count, max_age = query.get("type", ""), query.get("count", ""), query.get("max_age", "")
    if type_ not in _ID_TYPES:
        raise HttpError(400, f"unknown 'type' {quoted(type_)}\n")
    try:
        seconds = Duration.parse(max_age).seconds if max_age else None
    except ValueError as err:
        raise HttpError(400, f"failed to parse 'max_age' option: {err}\n") from None
    return RequestOptions(
        id_type=type_ or "name",
        count=_count(count) if count else DEFAULT_COUNT,
        recursive=query.get("recursive", "") == "true",
        max_age=seconds,
    )


def _count(text: str) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise HttpError(400, f"failed to parse 'count' option: {quoted(text)}\n")
    if int(text) < -1:
        raise HttpError(400, f"invalid 'count' option: only -1 and larger values allowed, not {int(text)}\n")
    return int(text)


async def read_info_request(request: web.Request) -> ContainerInfoRequest:
    """Return the body of a request, the default for an empty one. Raises HttpError (400, 408 or 413)."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while chunk := await request.content.read(MAX_BODY_BYTES + 1 - len(data)):
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is too large: at most {MAX_BODY_BYTES} bytes\n")
    except TimeoutError:
        raise HttpError(408, f"the body was not received within {BODY_TIMEOUT_SECONDS:.0f} s\n") from None
    if not data.strip():
        return ContainerInfoRequest()
    try:
        return msgspec.json.decode(data, type=ContainerInfoRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise HttpError(400, f"unable to decode the json value: {err}\n") from None
