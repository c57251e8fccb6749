"""The bytes of a watch as events, whatever the pieces they arrive in.

A watch is one JSON document per line, for hours. Lines are put together from the pieces, no more is
held than one unfinished line of bounded length, and of each line only the envelope is read here: the
object stays as it came for whoever knows its type.
"""

from __future__ import annotations

import msgspec

from pykubelet.kube.errors import BadAnswer

MAX_LINE_BYTES = 8 * 1024 * 1024


class WatchEvent(msgspec.Struct):
    """What happened (ADDED, MODIFIED, DELETED, BOOKMARK, ERROR), and the object as the server wrote it."""

    type: str
    object: msgspec.Raw


class WatchStream:
    """Puts events together: `feed` what arrives, and `finish` when nothing more does."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[WatchEvent]:
        """Give the events that this piece completes; raises BadAnswer on what is no event."""
        searched = len(self._buffer)
        self._buffer += chunk
        end = self._buffer.rfind(b"\n", searched)
        if end < 0:
            self._check(len(self._buffer))
            return []
        complete = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._check(len(self._buffer))
        return [self._read(line) for line in complete.split(b"\n") if line.strip()]

    def finish(self) -> bool:
        """Say whether the stream ended cleanly: after a whole line. A rest is dropped."""
        clean = not self._buffer.strip()
        self._buffer.clear()
        return clean

    def _read(self, line: bytes) -> WatchEvent:
        self._check(len(line))
        try:
            return msgspec.json.decode(line, type=WatchEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise BadAnswer(f"a line of a watch is not an event: {err}") from None

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise BadAnswer(f"an event of a watch is longer than {self._limit // 1024} KiB")
