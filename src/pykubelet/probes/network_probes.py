"""The HTTP probe: a GET whose status is from 200 to 399. And the GET of a container's hook.

Redirects are followed within the host, at most ten times; one that leads elsewhere is not followed,
counts as healthy and is a warning for people. An answer's body never reaches an event of a failure:
it may hold secrets.

One GET over a connection of its own: no pool, no cookies, no proxy, no trust in certificates.

What a probe (or a container's HTTP hook) wants of an HTTP client, and no more; a connection that is
kept would hide that no new one can be made.

The request of a probe: one GET, with its author's headers where they may stand.

The TCP probe: does somebody accept a connection?

The failures are worded as every other kubelet words them, because alerts and people search for
`connection refused` and `i/o timeout`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import quote, urljoin, urlsplit

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.pod import Container, HTTPGetAction, TCPSocketAction
from pykubelet.probes.types import (
    OUTPUT_LIMIT,
    BadTarget,
    ProbeResult,
    Target,
    join_host_port,
    resolve_host,
    resolve_port,
)
from pykubelet.transport.http1 import HttpProtocolError, ResponseReader

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def write_request(target: str, host: str, headers: Iterable[tuple[str, str]], agent: str) -> bytes:
    """Write a GET. `headers` may override host, user agent and accept; the last two with nothing.

    Raises WireError for a header that would break out of its line.
    """
    own = {"Host": host, "User-Agent": agent, "Accept": "*/*", "Connection": "close"}
    lines: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise HttpProtocolError(f'net/http: invalid header field name "{name}"')
        if _CONTROL.search(value):
            raise HttpProtocolError(f'net/http: invalid header field value for "{name}"')
        proper = "-".join(word.capitalize() for word in name.split("-"))
        if proper in ("Content-Length", "Transfer-Encoding", "Trailer"):
            continue  # there is no body that they could speak of
        if proper in ("Host", "User-Agent") and (proper in seen or (proper == "Host" and not value)):
            continue
        seen.add(proper)
        if value or proper not in ("User-Agent", "Accept"):
            lines.append((proper, value))
    lines += [(name, value) for name, value in own.items() if name not in seen]
    lines.sort(key=lambda line: line[0] != "Host")  # where servers look for it
    text = "".join(f"{name}: {value.strip()}\r\n" for name, value in lines)
    return f"GET {target} HTTP/1.1\r\n{text}\r\n".encode()


_HANG_UP_SECONDS = 1.0
_DEFAULT_PORTS = {"http": 80, "https": 443}
_IMPROPER = re.compile(r"[\x00-\x1f\x7f]|%(?![0-9a-fA-F]{2})")
_PATH_SAFE = "%/:=&~+!$,;'@()*[]"
_QUERY_SAFE = _PATH_SAFE + "?"


@dataclass(frozen=True, slots=True)
class Url:
    """Where to send a GET."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query, ready to be sent."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.target}"

    @property
    def address(self) -> str:
        """Host and port."""
        return join_host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    location: str
    body: bytes
    """At most 10 KiB of it."""
    broken: str = ""
    """Why the body could not be read to its end, if it could not."""


class DialError(Exception):
    """No connection could be made; the cause is an OSError."""


def unverified_tls() -> ssl.SSLContext:
    """Make TLS settings that accept every server: pods have self-signed, expired and weak certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.set_alpn_protocols(["http/1.1"])
    return context


def parse_url(text: str) -> Url:
    """Read a URL. Raises ValueError when it is not one of HTTP."""
    parts = urlsplit(text)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f'unsupported protocol scheme "{parts.scheme}"')
    if not parts.hostname:
        raise ValueError("no Host in request URL")
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    return Url(parts.scheme, parts.hostname, port, _target(parts.path, parts.query))


def request_target(path: str) -> str:
    """Make of an author's path what may stand in a request; a query is kept, all else is escaped.

    A path that is no proper one is escaped as a whole rather than refused.
    """
    if _IMPROPER.search(path):
        return _target(quote(path, safe="/"), "")
    try:
        parts = urlsplit(path)
    except ValueError:
        return _target(quote(path, safe="/"), "")
    return _target(parts.path, parts.query)


async def get(
    url: Url, headers: Sequence[tuple[str, str]], *, agent: str, tls: ssl.SSLContext, deadline: float | None
) -> Answer:
    """Send a GET and read the answer; `tls` is used for https.

    Raises DialError when no connection can be made by the deadline (in the loop's time, None: never),
    TimeoutError when it passes before the answer's head is there, OSError when the connection
    breaks, WireError when the answer is not HTTP and ValueError when the request cannot be sent.
    """
    if url.scheme not in _DEFAULT_PORTS:
        raise ValueError(f'unsupported protocol scheme "{url.scheme}"')
    loop = asyncio.get_running_loop()
    request = write_request(url.target, url.address, headers, agent)
    exchange = _Exchange(request, loop.create_future())
    secure = url.scheme == "https"
    try:
        async with asyncio.timeout_at(deadline):
            transport, _ = await loop.create_connection(
                lambda: exchange,
                url.host,
                url.port,
                ssl=tls if secure else None,
                ssl_shutdown_timeout=_HANG_UP_SECONDS if secure else None,
            )
    except OSError as err:
        raise DialError from err
    reader = exchange.reader
    broken = ""
    try:
        async with asyncio.timeout_at(deadline):
            await exchange.over
        if exchange.failure is not None:
            raise exchange.failure
    except TimeoutError:
        transport.abort()
        if not reader.status:
            raise
        broken = "context deadline exceeded (Client.Timeout or context cancellation while reading body)"
    except (OSError, HttpProtocolError) as err:
        if not reader.status:
            raise
        broken = str(err)
    finally:
        transport.close()
    return Answer(reader.status, reader.headers.get("location", ""), bytes(reader.body), broken)


class _Exchange(asyncio.Protocol):
    """Writes the request, feeds the reader, and is over with the answer or the connection."""

    def __init__(self, request: bytes, over: asyncio.Future[None]) -> None:
        self.reader = ResponseReader(OUTPUT_LIMIT)
        self.over = over
        self.failure: OSError | HttpProtocolError | None = None
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            return
        try:
            self.reader.feed(data)
        except HttpProtocolError as err:
            self._end(err)
        else:
            if self.reader.done:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        try:
            self.reader.end()
        except HttpProtocolError as err:
            self._end(exc if isinstance(exc, OSError) else err)
        else:
            self._end(None)

    def _end(self, failure: OSError | HttpProtocolError | None) -> None:
        # Kept beside the future: one that nobody waits for any more would complain.
        self.failure = failure
        self.over.set_result(None)


def _target(path: str, query: str) -> str:
    target = quote(path, safe=_PATH_SAFE)
    if not target.startswith("/"):
        target = "/" + target
    return f"{target}?{quote(query, safe=_QUERY_SAFE)}" if query else target


async def tcp_check(action: TCPSocketAction, target: Target, timeout: float) -> ProbeResult:
    """Connect and hang up. Raises BadTarget."""
    host, port = resolve_host(action.host, target), resolve_port(action.port, target.container)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
    except (OSError, ValueError) as err:  # ValueError: a host that can be no name
        return ProbeResult("failure", dial_failure(err, host, port))
    transport.close()
    return ProbeResult("success")


def dial_failure(err: OSError | ValueError, host: str, port: int) -> str:
    """Word why a connection could not be made."""
    address = join_host_port(host, port)
    if isinstance(err, socket.gaierror):
        return f"dial tcp: lookup {host}: {_lower(err.strerror or 'no such host')}"
    if isinstance(err, TimeoutError) and err.errno is None:
        return f"dial tcp {address}: i/o timeout"
    if isinstance(err, OSError) and err.errno:
        return f"dial tcp {address}: connect: {_lower(os.strerror(err.errno))}"
    return f"dial tcp {address}: {err}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


_MOST_REDIRECTS = 10
_TOO_LATE = " (Client.Timeout exceeded while awaiting headers)"
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
Headers = Sequence[tuple[str, str]]


class HttpGetError(Exception):
    """A GET gave no answer; the text names the address and the reason."""

    def __init__(self, url: Url, reason: str, *, plain: bool = False) -> None:
        super().__init__(f'Get "{url}": {reason}')
        self.plain = plain
        """Whether TLS was asked for and the server speaks plain HTTP."""


def user_agent(purpose: str) -> str:
    """How this agent calls itself: `kube-probe/1.36`."""
    return f"kube-{purpose}/{KUBERNETES_VERSION.removeprefix('v').rpartition('.')[0]}"


async def http_check(
    action: HTTPGetAction, target: Target, timeout: float, tls: ssl.SSLContext
) -> ProbeResult:
    """Ask; `timeout` covers everything, redirects too. Raises BadTarget."""
    url = url_of(action, target)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        return judge(await follow(url, _headers(action), "probe", tls, deadline))
    except HttpGetError as err:
        return ProbeResult("failure", str(err))


async def lifecycle_get(
    action: HTTPGetAction,
    container: Container,
    address: str,
    fell_back: Callable[[], None] = lambda: None,
) -> str | None:
    """Make the request of a container's hook to its pod; any answer will do. The caller bounds the time.

    Gives why there was none. A server that speaks plain HTTP where TLS was asked for is asked again
    without, and without credentials, as authors have come to rely on; `fell_back` is called when that
    worked.
    """
    tls = unverified_tls()
    headers = _headers(action)
    try:
        url = url_of(action, Target(container, "", address))
        try:
            await follow(url, headers, "lifecycle", tls, None)
        except HttpGetError as err:
            if not err.plain:
                raise
            public = [(name, value) for name, value in headers if name.lower() != "authorization"]
            await follow(replace(url, scheme="http"), public, "lifecycle", tls, None)
            fell_back()
    except (BadTarget, HttpGetError) as err:
        return str(err)
    return None


def url_of(action: HTTPGetAction, target: Target) -> Url:
    """Give the address of an HTTP action in a container. Raises BadTarget."""
    port = resolve_port(action.port, target.container)
    host = resolve_host(action.host, target)
    return Url(action.scheme.lower() or "http", host, port, request_target(action.path))


async def follow(
    url: Url, headers: Headers, purpose: str, tls: ssl.SSLContext, deadline: float | None
) -> Answer:
    """GET, and go where the answer leads within the same host. Raises GetFailed."""
    agent, host = user_agent(purpose), url.host
    for _ in range(_MOST_REDIRECTS):
        try:
            answer = await get(url, headers, agent=agent, tls=tls, deadline=deadline)
            onward = _onward(answer, url)
        except (DialError, OSError, HttpProtocolError, ValueError) as err:
            plain = isinstance(err.__cause__, ssl.SSLError) and err.__cause__.reason in _NOT_TLS
            raise HttpGetError(url, _describe(err, url, plain), plain=plain) from err
        if onward is None or onward.host != host:
            return answer
        if (onward.scheme, onward.address) != (url.scheme, url.address):
            # A host header that the author gave is for the first server, not for where it sends us.
            headers = [(name, value) for name, value in headers if name.lower() != "host"]
        url = onward
    raise HttpGetError(url, f"stopped after {_MOST_REDIRECTS} redirects")


def judge(answer: Answer) -> ProbeResult:
    """Say what an answer means to a probe."""
    if answer.broken:
        return ProbeResult("failure", answer.broken, errored=True)
    if not 200 <= answer.status < 400:
        return ProbeResult("failure", f"HTTP probe failed with statuscode: {answer.status}")
    body = answer.body.decode(errors="replace")
    if answer.status >= 300:
        return ProbeResult("warning", f"Probe terminated redirects, Response body: {body}")
    return ProbeResult("success", body)


def _headers(action: HTTPGetAction) -> Headers:
    return [(header.name, header.value) for header in action.http_headers]


def _onward(answer: Answer, url: Url) -> Url | None:
    """Where a redirect leads, or None if it is none."""
    if answer.status not in _REDIRECTS or not answer.location:
        return None
    return parse_url(urljoin(str(url), answer.location))


def _describe(err: Exception, url: Url, plain: bool) -> str:
    cause = err.__cause__
    if plain:
        return "http: server gave HTTP response to HTTPS client"
    if isinstance(err, DialError) and isinstance(cause, ssl.SSLError):
        return f"tls: {cause.reason or cause}"
    if isinstance(err, DialError) and isinstance(cause, OSError):
        text = dial_failure(cause, url.host, url.port)
        return text + _TOO_LATE if isinstance(cause, TimeoutError) else text
    if isinstance(err, TimeoutError):
        return "context deadline exceeded" + _TOO_LATE
    if isinstance(err, ConnectionResetError):
        return f"read tcp {url.address}: connection reset by peer"
    return str(err)
