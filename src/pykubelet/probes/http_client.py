"""One GET over a connection of its own: no pool, no cookies, no proxy, no trust in certificates.

What a probe (or a container's HTTP hook) wants of an HTTP client, and no more; a connection that is
kept would hide that no new one can be made.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, urlsplit

from pykubelet.host.http_answer import ResponseReader, WireError
from pykubelet.probes.http_wire import write_request
from pykubelet.probes.outcome import OUTPUT_LIMIT, join_host_port

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
    except (OSError, WireError) as err:
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
        self.failure: OSError | WireError | None = None
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            return
        try:
            self.reader.feed(data)
        except WireError as err:
            self._end(err)
        else:
            if self.reader.done:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        try:
            self.reader.end()
        except WireError as err:
            self._end(exc if isinstance(exc, OSError) else err)
        else:
            self._end(None)

    def _end(self, failure: OSError | WireError | None) -> None:
        # Kept beside the future: one that nobody waits for any more would complain.
        self.failure = failure
        self.over.set_result(None)


def _target(path: str, query: str) -> str:
    target = quote(path, safe=_PATH_SAFE)
    if not target.startswith("/"):
        target = "/" + target
    return f"{target}?{quote(query, safe=_QUERY_SAFE)}" if query else target
