"""HTTP and TCP probes, and the HTTP GET of lifecycle hooks.

An HTTP probe succeeds with a status from 200 to 399. Redirects are followed within the host, at most ten
times; a redirect to another host is not followed, and the probe succeeds with a warning event. A response
body never appears in the event of a failure: it may contain secrets.

Each GET uses its own connection, without pool, cookies or proxy, and without verification of certificates; a
reused connection would hide that the server accepts no new one. The first GET of a probe to an IP address
without TLS is made by `exchanges.py`; redirects, https and host names use asyncio's transports here. A TCP
probe succeeds when the connection is accepted. The failure texts are upstream's, because alerts and users
match `connection refused` and `i/o timeout`.
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
from pykubelet.probes.exchanges import Exchange, Peer, numeric_peer
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
    """Encode a GET; `headers` may override Host, User-Agent and Accept, the latter two also with "".

    Raises HttpProtocolError for an invalid header name, or a control character in a value.
    """
    defaults = {"Host": host, "User-Agent": agent, "Accept": "*/*", "Connection": "close"}
    lines: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise HttpProtocolError(f'net/http: invalid header field name "{name}"')
        if _CONTROL.search(value):
            raise HttpProtocolError(f'net/http: invalid header field value for "{name}"')
        canonical = "-".join(word.capitalize() for word in name.split("-"))
        if canonical in ("Content-Length", "Transfer-Encoding", "Trailer"):
            continue  # the request has no body
        if canonical in ("Host", "User-Agent") and (canonical in seen or (canonical == "Host" and not value)):
            continue
        seen.add(canonical)
        if value or canonical not in ("User-Agent", "Accept"):
            lines.append((canonical, value))
    lines += [(name, value) for name, value in defaults.items() if name not in seen]
    lines.sort(key=lambda line: line[0] != "Host")  # Host first, as servers expect
    text = "".join(f"{name}: {value.strip()}\r\n" for name, value in lines)
    return f"GET {target} HTTP/1.1\r\n{text}\r\n".encode()


_SHUTDOWN_SECONDS = 1.0
_LATE_BODY = "context deadline exceeded (Client.Timeout or context cancellation while reading body)"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_INVALID = re.compile(r"[\x00-\x1f\x7f]|%(?![0-9a-fA-F]{2})")
_PATH_SAFE = "%/:=&~+!$,;'@()*[]"
_QUERY_SAFE = _PATH_SAFE + "?"


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a GET."""

    scheme: str
    host: str
    port: int
    target: str
    """Escaped path and query."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.target}"

    @property
    def address(self) -> str:
        """Host and port."""
        return join_host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response."""

    status: int
    location: str
    body: bytes
    """Body, at most its first 10 KiB."""
    broken: str = ""
    """Reason why the body could not be read to its end; empty if it could."""


class DialError(Exception):
    """No connection could be established; the cause is an OSError."""


def unverified_tls() -> ssl.SSLContext:
    """Return a TLS context without verification: pods have self-signed, expired and weak certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.set_alpn_protocols(["http/1.1"])
    return context


def parse_url(text: str) -> Url:
    """Parse a URL. Raises ValueError unless it is a valid HTTP or HTTPS URL."""
    parts = urlsplit(text)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f'unsupported protocol scheme "{parts.scheme}"')
    if not parts.hostname:
        raise ValueError("no Host in request URL")
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    return Url(parts.scheme, parts.hostname, port, _target(parts.path, parts.query))


def request_target(path: str) -> str:
    """Return the request target for the path in a spec; a query is kept, all else is escaped.

    An invalid path is escaped entirely rather than rejected.
    """
    if _INVALID.search(path):
        return _target(quote(path, safe="/"), "")
    try:
        parts = urlsplit(path)
    except ValueError:
        return _target(quote(path, safe="/"), "")
    return _target(parts.path, parts.query)


async def get(
    url: Url, headers: Sequence[tuple[str, str]], *, agent: str, tls: ssl.SSLContext, deadline: float | None
) -> HttpResponse:
    """Send a GET and return the response; `tls` is used for https.

    `deadline` is in loop time, None for no deadline. Raises DialError when no connection can be established
    in time, TimeoutError when the deadline passes before the response headers have arrived, OSError when the
    connection breaks, HttpProtocolError when the response is not HTTP, and ValueError when the request is
    invalid.
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
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS if secure else None,
            )
    except OSError as err:
        raise DialError from err
    reader = exchange.reader
    broken = ""
    try:
        async with asyncio.timeout_at(deadline):
            await exchange.finished
        if exchange.failure is not None:
            raise exchange.failure
    except TimeoutError:
        transport.abort()
        if not reader.status:
            raise
        broken = _LATE_BODY
    except (OSError, HttpProtocolError) as err:
        if not reader.status:
            raise
        broken = str(err)
    finally:
        transport.close()
    return HttpResponse(reader.status, reader.headers.get("location", ""), bytes(reader.body), broken)


class _Exchange(asyncio.Protocol):
    """The protocol of one request; `finished` is done with the end of the response or the connection."""

    def __init__(self, request: bytes, finished: asyncio.Future[None]) -> None:
        self.reader = ResponseReader(OUTPUT_LIMIT)
        self.finished = finished
        self.failure: OSError | HttpProtocolError | None = None
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        try:
            self.reader.feed(data)
        except HttpProtocolError as err:
            self._end(err)
        else:
            if self.reader.done:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        try:
            self.reader.end()
        except HttpProtocolError as err:
            self._end(exc if isinstance(exc, OSError) else err)
        else:
            self._end(None)

    def _end(self, failure: OSError | HttpProtocolError | None) -> None:
        # Not set on the future: asyncio logs an exception of a future that no task awaits.
        self.failure = failure
        self.finished.set_result(None)


def _target(path: str, query: str) -> str:
    target = quote(path, safe=_PATH_SAFE)
    if not target.startswith("/"):
        target = "/" + target
    return f"{target}?{quote(query, safe=_QUERY_SAFE)}" if query else target


async def tcp_check(action: TCPSocketAction, target: Target, timeout: float) -> ProbeResult:
    """Open a TCP connection and close it. Raises BadTarget."""
    host, port = resolve_host(action.host, target), resolve_port(action.port, target.container)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
    except (OSError, ValueError) as err:  # ValueError: an invalid host name
        return ProbeResult("failure", dial_failure(err, host, port))
    transport.close()
    return ProbeResult("success")


def dial_failure(err: Exception, host: str, port: int) -> str:
    """Return upstream's text for a connection that could not be established."""
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


_MAX_REDIRECTS = 10
_TOO_LATE = " (Client.Timeout exceeded while awaiting headers)"
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
Headers = Sequence[tuple[str, str]]


class HttpGetError(Exception):
    """A GET failed without a response; the text contains the URL and the reason."""

    def __init__(self, url: Url, reason: str, *, plain: bool = False) -> None:
        super().__init__(f'Get "{url}": {reason}')
        self.plain = plain
        """Whether the URL was https and the server uses plain HTTP."""


def user_agent(purpose: str) -> str:
    """Return the User-Agent: `kube-probe/1.36`."""
    return f"kube-{purpose}/{KUBERNETES_VERSION.removeprefix('v').rpartition('.')[0]}"


async def http_check(
    action: HTTPGetAction, target: Target, timeout: float, tls: ssl.SSLContext
) -> ProbeResult:
    """Run an HTTP probe; `timeout` covers all redirects. Raises BadTarget."""
    url = action_url(action, target)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        return evaluate_response(await follow(url, _headers(action), "probe", tls, deadline))
    except HttpGetError as err:
        return ProbeResult("failure", str(err))


@dataclass(frozen=True, slots=True)
class PlainGet:
    """The first GET of an HTTP probe without TLS at an IP address."""

    url: Url
    peer: Peer
    request: bytes


def plain_get(action: HTTPGetAction, target: Target) -> PlainGet | None:
    """Return the first GET of an HTTP probe, None if only `http_check` can run it or report its error."""
    try:
        url = action_url(action, target)
        peer = numeric_peer(url.host, url.port) if url.scheme == "http" else None
        if peer is None:
            return None
        request = write_request(url.target, url.address, _headers(action), user_agent("probe"))
        return PlainGet(url, peer, request)
    except (BadTarget, HttpProtocolError, ValueError):
        return None


def plain_response(url: Url, exchange: Exchange) -> HttpResponse:
    """Return the response of a plain GET that has ended. Raises HttpGetError."""
    reader, failure = exchange.reader, exchange.failure
    assert reader is not None
    if failure is not None and not reader.status:
        if not exchange.connected:
            dial_error = DialError()
            dial_error.__cause__ = failure
            failure = dial_error
        raise HttpGetError(url, _describe(failure, url, plain=False))
    broken = ""
    if failure is not None:
        broken = _LATE_BODY if isinstance(failure, TimeoutError) else str(failure)
    return HttpResponse(reader.status, reader.headers.get("location", ""), bytes(reader.body), broken)


def is_redirect(response: HttpResponse) -> bool:
    """Return whether a response names another URL to get."""
    return response.status in _REDIRECTS and bool(response.location)


async def redirected_check(
    action: HTTPGetAction, url: Url, response: HttpResponse, tls: ssl.SSLContext, deadline: float
) -> ProbeResult:
    """Continue an HTTP probe after the response to its first GET, such as a redirect."""
    try:
        return evaluate_response(await follow(url, _headers(action), "probe", tls, deadline, response))
    except HttpGetError as err:
        return ProbeResult("failure", str(err))


def tcp_peer(action: TCPSocketAction, target: Target) -> Peer | None:
    """Return the peer of a TCP probe, None if only `tcp_check` can run it or report its error."""
    try:
        return numeric_peer(resolve_host(action.host, target), resolve_port(action.port, target.container))
    except BadTarget:
        return None


def tcp_result(peer: Peer, exchange: Exchange) -> ProbeResult:
    """Return the result of a TCP probe that has ended."""
    failure = exchange.failure
    if failure is None:
        return ProbeResult("success")
    return ProbeResult("failure", dial_failure(failure, *peer.address))


async def lifecycle_get(
    action: HTTPGetAction,
    container: Container,
    address: str,
    on_fallback: Callable[[], None] = lambda: None,
) -> str | None:
    """Send the GET of a lifecycle hook; any response is a success. The caller bounds the time.

    Returns the reason of a failure, or None. If the URL is https and the server uses plain HTTP, the request
    is retried over HTTP without the Authorization header, as upstream does for compatibility;
    `on_fallback` is called when that succeeded.
    """
    tls = unverified_tls()
    headers = _headers(action)
    try:
        url = action_url(action, Target(container, "", address))
        try:
            await follow(url, headers, "lifecycle", tls, None)
        except HttpGetError as err:
            if not err.plain:
                raise
            public = [(name, value) for name, value in headers if name.lower() != "authorization"]
            await follow(replace(url, scheme="http"), public, "lifecycle", tls, None)
            on_fallback()
    except (BadTarget, HttpGetError) as err:
        return str(err)
    return None


def action_url(action: HTTPGetAction, target: Target) -> Url:
    """Return the URL of an HTTP action of a container. Raises BadTarget."""
    port = resolve_port(action.port, target.container)
    host = resolve_host(action.host, target)
    return Url(action.scheme.lower() or "http", host, port, request_target(action.path))


async def follow(
    url: Url,
    headers: Headers,
    purpose: str,
    tls: ssl.SSLContext,
    deadline: float | None,
    response: HttpResponse | None = None,
) -> HttpResponse:
    """Send a GET and follow redirects within the same host. Raises HttpGetError.

    With `response`, the GET of `url` has been made already.
    """
    agent, host = user_agent(purpose), url.host
    for _ in range(_MAX_REDIRECTS):
        try:
            if response is None:
                response = await get(url, headers, agent=agent, tls=tls, deadline=deadline)
            redirect = _redirect_url(response, url)
        except (DialError, OSError, HttpProtocolError, ValueError) as err:
            plain = isinstance(err.__cause__, ssl.SSLError) and err.__cause__.reason in _NOT_TLS
            raise HttpGetError(url, _describe(err, url, plain), plain=plain) from err
        if redirect is None or redirect.host != host:
            return response
        if (redirect.scheme, redirect.address) != (url.scheme, url.address):
            # A Host header of the spec is meant for the first server, not for the redirect's.
            headers = [(name, value) for name, value in headers if name.lower() != "host"]
        url, response = redirect, None
    raise HttpGetError(url, f"stopped after {_MAX_REDIRECTS} redirects")


def evaluate_response(response: HttpResponse) -> ProbeResult:
    """Return the probe result of a response."""
    if response.broken:
        return ProbeResult("failure", response.broken, errored=True)
    if not 200 <= response.status < 400:
        return ProbeResult("failure", f"HTTP probe failed with statuscode: {response.status}")
    body = response.body.decode(errors="replace")
    if response.status >= 300:
        return ProbeResult("warning", f"Probe terminated redirects, Response body: {body}")
    return ProbeResult("success", body)


def _headers(action: HTTPGetAction) -> Headers:
    return [(header.name, header.value) for header in action.http_headers]


def _redirect_url(response: HttpResponse, url: Url) -> Url | None:
    """Return the target of a redirect, or None if the response is not a redirect."""
    if not is_redirect(response):
        return None
    return parse_url(urljoin(str(url), response.location))


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
