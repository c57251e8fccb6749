"""Incremental parser of HTTP/1.1 responses.

It does no I/O. Probes and API requests are frequent, and a general HTTP client takes several times the CPU
time of this parser per response.

The peer is not trusted: all sizes are bounded, and data that is not HTTP raises HttpProtocolError.
"""

from __future__ import annotations

import re
from typing import Literal

HEAD_LIMIT = 64 * 1024
"""Largest status line and headers of a response, in bytes."""
_LINE_LIMIT = 4096
_INTERIM_LIMIT = 5
_TRAILER_LIMIT = 64
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9][0-9])(?: .*)?")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")
_BODILESS = (204, 304)
Part = Literal["head", "sized", "chunk size", "chunk", "chunk end", "trailers", "until end", "done"]


class HttpProtocolError(Exception):
    """Raised for a request that must not be sent, or a response that is not HTTP."""


class ResponseReader:
    """Parser of one response: `feed` for received data, `end` when the peer closed the connection.

    It is done after `limit` bytes of the body; the rest is not read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.status = 0
        """Status code; zero until the headers are complete."""
        self.headers: dict[str, str] = {}
        """Headers by lower-case name; the first value counts, as for redirects."""
        self.body = bytearray()
        self._part: Part = "head"
        self._buffer = bytearray()
        self._searched = 0
        """Bytes at the start of the buffer in which the end of the headers does not begin."""
        self._left = 0
        self._interim = 0
        self._trailers = 0
        self._complete = False

    @property
    def done(self) -> bool:
        """Whether the response is complete, or enough of its body was read."""
        return self._part == "done"

    @property
    def reusable(self) -> bool:
        """Whether the connection can be reused: the response was read to its end, and nothing followed."""
        return self._complete and "close" not in self.headers.get("connection", "").lower()

    @property
    def begun(self) -> bool:
        """Whether any byte of a response has arrived."""
        return bool(self.status or self._buffer or self._interim)

    def feed(self, data: bytes) -> None:
        """Parse received data. Raises HttpProtocolError."""
        self._buffer += data
        while self._step():
            pass
        if len(self.body) >= self._limit:
            del self.body[self._limit :]
            self._finish()

    def end(self) -> None:
        """Handle the end of the connection. Raises HttpProtocolError if the response is incomplete."""
        if self._part == "until end":
            self._finish()
        elif self._part == "head":
            raise HttpProtocolError(_malformed(self._buffer) if self._buffer else "EOF")
        elif self._part == "trailers":
            self._finish()  # the body is complete
        elif self._part != "done":
            raise HttpProtocolError("unexpected EOF")

    def _step(self) -> bool:
        """Parse one part if it is complete; return whether another one may follow."""
        match self._part:
            case "head":
                return self._read_head()
            case "sized" | "chunk":
                return self._read_sized()
            case "chunk size":
                return self._read_chunk_size()
            case "chunk end":
                return self._read_line() is not None and self._go("chunk size")
            case "trailers":
                return self._read_trailer()
            case "until end":
                self.body += self._buffer
                self._buffer.clear()
        return False

    def _go(self, part: Part) -> bool:
        self._part = part
        return True

    def _finish(self, *, complete: bool = False) -> None:
        # Data after the response, without another request, makes the connection unusable.
        self._complete = complete and not self._buffer
        self._part = "done"
        self._buffer.clear()

    def _read_head(self) -> bool:
        end = _HEAD_END.search(self._buffer, self._searched)
        if end is None:
            if len(self._buffer) > HEAD_LIMIT or not b"HTTP/".startswith(self._buffer[:5]):
                raise HttpProtocolError(_malformed(self._buffer))
            # A server may send single bytes. The last three may be the first of b"\r\n\r\n".
            self._searched = max(0, len(self._buffer) - 3)
            return False
        self._searched = 0
        first, *rest = _LINE_END.split(bytes(self._buffer[: end.start()]))
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise HttpProtocolError(_malformed(first))
        del self._buffer[: end.end()]
        status = int(found[1])
        if 100 <= status < 200 and status != 101:
            self._interim += 1
            if self._interim > _INTERIM_LIMIT:
                raise HttpProtocolError("net/http: too many 1xx informational responses")
            return True
        self.headers = _read_headers(rest)
        self.status = status
        return self._choose_framing()

    def _choose_framing(self) -> bool:
        if self.status in _BODILESS or self.status == 101:
            self._finish(complete=self.status != 101)
            return False
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._go("chunk size")
        length = self.headers.get("content-length")
        if length is None:
            return self._go("until end")
        if not length.isascii() or not length.isdigit() or len(length) > 19:
            raise HttpProtocolError(f'bad Content-Length "{length[:64]}"')
        self._left = int(length)
        if not self._left:
            self._finish(complete=True)
            return False
        return self._go("sized")

    def _read_sized(self) -> bool:
        piece = self._buffer[: self._left]
        del self._buffer[: len(piece)]
        self.body += piece
        self._left -= len(piece)
        if self._left:
            return False
        if self._part == "chunk":
            return self._go("chunk end")
        self._finish(complete=True)
        return False

    def _read_chunk_size(self) -> bool:
        line = self._read_line()
        if line is None:
            return False
        digits = line.partition(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(digits):
            raise HttpProtocolError("invalid byte in chunk length")
        self._left = int(digits, 16)
        return self._go("chunk" if self._left else "trailers")

    def _read_trailer(self) -> bool:
        """Skip one trailer line; the empty line ends the response."""
        line = self._read_line()
        if line is None:
            return False
        self._trailers += 1
        if self._trailers > _TRAILER_LIMIT:
            raise HttpProtocolError("too many trailers")
        if not line:
            self._finish(complete=True)
        return bool(line)

    def _read_line(self) -> bytes | None:
        end = self._buffer.find(b"\n", 0, _LINE_LIMIT)
        if end < 0:
            if len(self._buffer) >= _LINE_LIMIT:
                raise HttpProtocolError("header line too long")
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line


def _read_headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if line[:1] in (b" ", b"\t"):
            continue  # obsolete line folding; no relevant header is that long
        if not colon or not name:
            raise HttpProtocolError(f"malformed MIME header line: {line[:64].decode('latin-1')}")
        headers.setdefault(name.strip().lower().decode("latin-1"), value.strip().decode("latin-1"))
    return headers


def _malformed(start: bytes | bytearray) -> str:
    shown = bytes(start[:64]).decode("ascii", errors="backslashreplace")
    return f"net/http: HTTP/1.x transport connection broken: malformed HTTP response {shown!a}"
