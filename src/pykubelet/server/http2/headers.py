"""Conversion of header fields between HTTP/2 and HTTP/1.1.

An HTTP/2 request is converted to the equivalent HTTP/1.1 head and parsed by the same parser as all others, so
that a path or a header cannot be interpreted in two ways. Fields that would allow request smuggling (line
breaks, spaces, wrong lengths) are rejected here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Field = tuple[bytes, bytes]
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[^\x00-\x20\x7f]+")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path"})
_OF_THE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)

# The Server header is not sent, as upstream.
_NOT_SENT = _OF_THE_CONNECTION | {b"server"}


class Malformed(Exception):
    """Raised for invalid header fields of a request."""


class UnsupportedRequest(Exception):
    """Raised for a request that is not valid in HTTP/2; the message is sent to the client."""


class RequestHead(NamedTuple):
    """A request's head and the framing of its bodies."""

    data: bytes
    """HTTP/1.1 head."""
    chunked: bool
    """Whether the request body must be chunked, because its length is unknown."""
    headless: bool
    """Whether the response must have no body."""


def request_head(fields: Iterable[Field], *, ended: bool) -> RequestHead:
    """Return the HTTP/1.1 head; `ended` if no body follows. Raises Malformed, UnsupportedRequest."""
    pseudo: dict[bytes, bytes] = {}
    lines: list[bytes] = []
    hosts: list[bytes] = []
    cookies: list[bytes] = []
    length: bytes | None = None
    for name, value in fields:
        if _NO_VALUE.search(value):
            raise Malformed("a field has control characters in it")
        if name.startswith(b":"):
            if name not in _PSEUDO or name in pseudo or lines or hosts or cookies:
                raise Malformed("a pseudo-header is unknown, comes twice or comes too late")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name):
            raise Malformed("a field has a name that is none")
        if name in _OF_THE_CONNECTION:
            raise UnsupportedRequest(f'request header "{name.decode().title()}" is not valid in HTTP/2')
        if name == b"te" and value.lower() != b"trailers":
            raise UnsupportedRequest('request header "TE" may only be "trailers" in HTTP/2')
        if name == b"host":
            hosts.append(value)
        elif name == b"cookie":
            cookies.append(value)
        else:
            lines.append(name + b": " + value)
        if name == b"content-length":
            if length is not None or not _LENGTH.fullmatch(value):
                raise Malformed("the length of the body is none, or there are two")
            length = value
    start = _start_line(pseudo)
    if authority := pseudo.get(b":authority"):
        hosts = [authority]
    if cookies:
        lines.append(b"cookie: " + b"; ".join(cookies))
    if ended and int(length or b"0"):
        raise Malformed("a body is promised that does not come")
    chunked = not ended and length is None
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    hosts = [b"host: " + host for host in hosts]
    # Each stream carries one request.
    data = b"\r\n".join((start, *hosts, *lines, b"connection: close", b"", b""))
    return RequestHead(data, chunked, pseudo[b":method"] == b"HEAD")


def _start_line(pseudo: Mapping[bytes, bytes]) -> bytes:
    method = pseudo.get(b":method", b"")
    if not _METHOD.fullmatch(method):
        raise Malformed("there is no method")
    if method == b"CONNECT":
        if b":path" in pseudo or b":scheme" in pseudo:
            raise Malformed("CONNECT has no path")
        target = pseudo.get(b":authority", b"")
    else:
        target = pseudo.get(b":path", b"")
        if pseudo.get(b":scheme") not in (b"https", b"http") or not target.startswith((b"/", b"*")):
            raise Malformed("there is no scheme or no path")
    if not _TARGET.fullmatch(target):
        raise Malformed("the path has spaces or control characters in it")
    return method + b" " + target + b" HTTP/1.1"


def answer_head(status: int, headers: Iterable[tuple[str, str]]) -> list[Field]:
    """Return the HTTP/2 fields of a response. Raises ValueError for a header with control characters."""
    fields = [(b":status", b"%d" % status)]
    for name, value in headers:
        field = (name.lower().encode(), value.encode())
        if field[0] in _NOT_SENT:
            continue
        if _NO_VALUE.search(field[1]) or not _NAME.fullmatch(field[0]):
            raise ValueError(f"the header {name!r} cannot be sent: it has control characters in it")
        fields.append(field)
    return fields
