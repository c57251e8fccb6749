"""Time limit on reading HTTP/2 frames of clients that are not authorized yet, over all connections.

Decoding header fields is slow, and the frame budget of a connection (`http2_frames`) is a second of it: many
connections together would block the event loop for minutes. `ReadingTurns` grants them a fraction of the
event loop's time. A connection that has used it up is not read from until its turn; next is the one with the
least cost so far, so that a client with a small request waits for milliseconds only. Connections with an
authorized request are not limited. The frames that wait are bounded: above the limit the connection
with the most is closed.
"""

from __future__ import annotations

import asyncio
import math
from time import perf_counter
from typing import Protocol

MOST_SECONDS = 0.05
"""Seconds that may be used in succession."""
SHARE = 0.25
"""Fraction of the event loop's time."""
MOST_WAITING_BYTES = 8 * 1024 * 1024

_SECONDS_PER_BYTE = 1.5e-6
"""Estimated cost of frames that wait."""
_SHORTEST_PAUSE = 0.001


class Reader(Protocol):
    """A connection whose frames are read in turns."""

    reading_seconds: float
    """Seconds that its frames have taken."""

    @property
    def is_authorized(self) -> bool:
        """Whether a request of the connection was authorized."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that were received and not handled yet."""

    def read_frames(self, seconds: float) -> bool:
        """Handle frames for about this time; return False when frames are left."""

    def hold(self) -> None:
        """Stop reading from the client."""

    def resume(self) -> None:
        """Read from the client again."""

    def force_close(self) -> None:
        """Close the connection."""


class ReadingTurns:
    """Token bucket of event loop time, in seconds, and the connections that wait for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = MOST_SECONDS
        self._since = perf_counter()
        self._waiting: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def received(self, reader: Reader) -> None:
        """Handle the frames that a connection has received, now or in its turn."""
        if reader in self._waiting:
            self._limit_waiting()
            return
        self._refill()
        if reader.is_authorized:
            reader.read_frames(math.inf)
        elif self._waiting or self._left <= 0:
            self._wait(reader)
        else:
            self._read(reader)

    def forget(self, reader: Reader) -> None:
        """Drop a connection that is closed."""
        self._waiting.pop(reader, None)

    def _read(self, reader: Reader) -> None:
        began = perf_counter()
        is_done = reader.read_frames(math.inf if reader.is_authorized else self._left)
        took = perf_counter() - began
        self._left -= took
        reader.reading_seconds += took
        if is_done:
            reader.resume()
        else:
            self._wait(reader)

    def _wait(self, reader: Reader) -> None:
        reader.hold()
        self._waiting[reader] = None
        self._limit_waiting()
        self._schedule()

    def _limit_waiting(self) -> None:
        while sum(reader.unread_bytes for reader in self._waiting) > MOST_WAITING_BYTES:
            largest = max(self._waiting, key=lambda reader: reader.unread_bytes)
            self.forget(largest)
            largest.force_close()

    def _schedule(self) -> None:
        if self._timer is None and self._waiting:
            pause = max(-self._left / SHARE, _SHORTEST_PAUSE)
            self._timer = self._loop.call_later(pause, self._take_turns)

    def _take_turns(self) -> None:
        self._timer = None
        self._refill()
        while self._waiting and self._left > 0:
            reader = min(self._waiting, key=self._priority)
            del self._waiting[reader]
            self._read(reader)
        self._schedule()

    def _priority(self, reader: Reader) -> float:
        return reader.reading_seconds + reader.unread_bytes * _SECONDS_PER_BYTE

    def _refill(self) -> None:
        now = perf_counter()
        self._left = min(MOST_SECONDS, self._left + (now - self._since) * SHARE)
        self._since = now
