"""Connections to the runtime's streaming server: the request for a protocol upgrade and its response.

Exec, attach and port-forward of the server and of the command line use it. Redirects are not followed:
following one would send the request to another host (CVE-2020-8559).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 30.0
"""Seconds in which the streaming server must accept the connection, and respond."""
MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})\r\n", re.IGNORECASE)


class StreamUnavailable(Exception):
    """Raised when the streaming server cannot be reached or does not respond with HTTP; one line."""


class UpgradeRejected(Exception):
    """Raised when the streaming server responds with another status than 101."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body.strip()}" if body.strip() else f"status {status}")
        self.status = status
        self.body = body


class _Reader(asyncio.StreamReader):
    """Reader of the response head; `rest` returns the bytes received after it."""

    ended = False
    """Whether the server has sent EOF."""

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()

    async def rest(self) -> bytes:
        super().feed_eof()
        return await self.read()


@dataclass(frozen=True, slots=True)
class UpgradedConnection:
    """Connection after the response 101, whose head is `head`."""

    transport: asyncio.Transport
    head: bytes
    _reader: _Reader
    _protocol: asyncio.StreamReaderProtocol

    def header(self, name: str) -> str:
        """Return a header of the response; empty if it is missing."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            found, _, value = line.partition(":")
            if found.strip().lower() == name.lower():
                return value.strip()
        return ""

    async def take_over(self, protocol: asyncio.Protocol) -> tuple[bytes, bool]:
        """Install a protocol; return the bytes received before, and whether the server has sent EOF."""
        self.transport.set_protocol(protocol)
        return await self._reader.rest(), self._reader.ended

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection as a reader and a writer, instead of `take_over`."""
        loop = asyncio.get_running_loop()
        return self._reader, asyncio.StreamWriter(self.transport, self._protocol, self._reader, loop)


async def connect_upgraded(
    url: str, upgrade: str, headers: Iterable[tuple[str, str]], *, method: str = "POST"
) -> UpgradedConnection:
    """Request an upgrade at the URL that the runtime returned; the caller closes the transport.

    Raises StreamUnavailable and UpgradeRejected.
    """
    stream_url = urlsplit(url)
    if stream_url.scheme not in ("http", "https") or stream_url.hostname is None:
        raise StreamUnavailable("has an address that is none")
    tls = ssl.create_default_context() if stream_url.scheme == "https" else None
    port = stream_url.port or (443 if tls else 80)
    reader = _Reader(limit=MAX_HEAD_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: protocol, stream_url.hostname, port, ssl=tls
            )
    except (OSError, TimeoutError) as err:
        raise StreamUnavailable(f"cannot be reached: {err or 'timeout'}") from err
    try:
        target = (stream_url.path or "/") + (f"?{stream_url.query}" if stream_url.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {stream_url.netloc}"]
        lines += ["Connection: Upgrade", f"Upgrade: {upgrade}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if method not in ("GET", "HEAD"):
            lines.append("Content-Length: 0")
        transport.write("".join(f"{line}\r\n" for line in (*lines, "")).encode("utf-8", "surrogateescape"))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        status = _status(head)
        if status != 101:
            raise UpgradeRejected(status, await _body(head, reader) if 400 <= status < 600 else "")
        return UpgradedConnection(transport, head, reader, protocol)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
        transport.abort()
        raise StreamUnavailable(f"did not answer: {err or 'timeout'}") from err
    except BaseException:
        transport.abort()
        raise


def _status(head: bytes) -> int:
    fields = head.split(b"\r\n", 1)[0].split()
    return int(fields[1]) if len(fields) > 1 and len(fields[1]) == 3 and fields[1].isdigit() else 0


async def _body(head: bytes, reader: asyncio.StreamReader) -> str:
    body = b""
    length = _LENGTH.search(head)
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if length is not None:
                body = await reader.readexactly(min(int(length[1]), _MAX_BODY_BYTES))
            else:
                body = await reader.read(_MAX_BODY_BYTES)
    return body.decode(errors="replace")
