"""Answers of HTTP/1.1, read piece by piece as they arrive.

Bytes in, facts out; nothing here waits. A general client takes several times the processor time of
this for one answer, and probes and the agent's reports to the API server are many.

The reader trusts nothing: sizes are bounded, whatever does not look like HTTP is a WireError.
"""

from __future__ import annotations

import re
from typing import Literal

HEAD_LIMIT = 64 * 1024
"""The longest head of an answer, in bytes."""
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
    """A request that must not be sent, or an answer that is not HTTP."""


class ResponseReader:
    """Takes an answer piece by piece (`feed`, and `end` when the peer closed).

    It is done after `limit` bytes of the body: what follows is not read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.status = 0
        """Zero until the whole head is there."""
        self.headers: dict[str, str] = {}
        """By lower-case name; the first value counts, as for redirects."""
        self.body = bytearray()
        self._part: Part = "head"
        self._buffer = bytearray()
        self._searched = 0
        """Bytes of the buffer in which the end of the head does not begin."""
        self._left = 0
        self._interim = 0
        self._trailers = 0
        self._whole = False

    @property
    def done(self) -> bool:
        """Whether there is nothing more to read: the answer's end, or enough of its body."""
        return self._part == "done"

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the same connection: the answer was read to its very end."""
        return self._whole and "close" not in self.headers.get("connection", "").lower()

    @property
    def begun(self) -> bool:
        """Whether anything of an answer has arrived."""
        return bool(self.status or self._buffer or self._interim)

    def feed(self, data: bytes) -> None:
        """Take what arrived. Raises WireError."""
        self._buffer += data
        while self._step():
            pass
        if len(self.body) >= self._limit:
            del self.body[self._limit :]
            self._finish()

    def end(self) -> None:
        """Take the end of the connection. Raises WireError when the answer was not complete."""
        if self._part == "until end":
            self._finish()
        elif self._part == "head":
            raise HttpProtocolError(_malformed(self._buffer) if self._buffer else "EOF")
        elif self._part == "trailers":
            self._finish()  # the body is complete
        elif self._part != "done":
            raise HttpProtocolError("unexpected EOF")

    def _step(self) -> bool:
        """Read one part, if it is all there."""
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

    def _finish(self, *, whole: bool = False) -> None:
        # What follows an answer that nobody asked for more after makes the connection unusable.
        self._whole = whole and not self._buffer
        self._part = "done"
        self._buffer.clear()

    def _read_head(self) -> bool:
        end = _HEAD_END.search(self._buffer, self._searched)
        if end is None:
            if len(self._buffer) > HEAD_LIMIT or not b"HTTP/".startswith(self._buffer[:5]):
                raise HttpProtocolError(_malformed(self._buffer))
            # A server may send each byte alone. The last three may be the first of b"\r\n\r\n".
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
            self._finish(whole=self.status != 101)
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
            self._finish(whole=True)
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
        self._finish(whole=True)
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
        """Pass by what follows the last chunk, up to an empty line."""
        line = self._read_line()
        if line is None:
            return False
        self._trailers += 1
        if self._trailers > _TRAILER_LIMIT:
            raise HttpProtocolError("too many trailers")
        if not line:
            self._finish(whole=True)
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
            continue  # the obsolete continuation of a line; no header that matters here is that long
        if not colon or not name:
            raise HttpProtocolError(f"malformed MIME header line: {line[:64].decode('latin-1')}")
        headers.setdefault(name.strip().lower().decode("latin-1"), value.strip().decode("latin-1"))
    return headers


def _malformed(start: bytes | bytearray) -> str:
    shown = bytes(start[:64]).decode("ascii", errors="backslashreplace")
    return f"net/http: HTTP/1.x transport connection broken: malformed HTTP response {shown!a}"
