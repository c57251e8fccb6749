"""What a client sends over HTTP/2, cut into frames, and paid for.

Frames are cheap to send and dear to read, so a client has a budget: every frame costs, long ones more. Work
that is done for it (data sent to it, requests answered) pays back, and so does time. Whoever pings, sets,
resets, continues or sends nothing in many frames (CVE-2019-9511 … 9518, CVE-2023-44487, CVE-2024-27316)
has spent it soon and is hung up on; whoever reads a long log or asks thousands of times never does.

Pure: bytes in, frames out; time is an argument. A frame's length is checked before its content has come.

Time limit on reading HTTP/2 frames of clients that are not authorized yet, over all connections.

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
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple, Protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client says first."""
LONGEST_FRAME = 16 * 1024
"""What every peer must take and none may exceed without having been allowed to."""
DATA = 0
GOAWAY = 7
BUDGET = 4000.0
_PER_SECOND = 400.0
_FREE_BYTES = 256
_BYTES_PER_POINT = 1024
_HEADER_BYTES = 9


class BadFrames(Exception):
    """The client does not speak HTTP/2, or too much of it."""


class BudgetExceeded(BadFrames):
    """The client has spent its budget."""


class Frame(NamedTuple):
    """A frame, whole."""

    kind: int
    data: bytes
    """With its header."""


class Budget:
    """How much work a client can still make."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = BUDGET
        self._seen = clock()

    def spend(self, points: float) -> None:
        """Take points away; raises TooBusy when there are none left."""
        self._left -= points
        if self._left < 0:
            now = self._clock()
            self.earn((now - self._seen) * _PER_SECOND)
            self._seen = now
            if self._left < 0:
                raise BudgetExceeded("too many frames for what they ask")

    def earn(self, points: float) -> None:
        """Give points back, for something done."""
        self._left = min(BUDGET, self._left + points)

    def moved(self, size: int) -> None:
        """Give back for bytes of content, which are what it is all about; tiny pieces earn nothing."""
        self.earn(size // _BYTES_PER_POINT)


class Frames:
    """Cuts what comes on one connection into frames."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._preface = PREFACE
        self._held = bytearray()

    @property
    def unread_bytes(self) -> int:
        """Bytes of frames that were not returned yet."""
        return len(self._held)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete, the client's preface aside. Raises BadFrames."""
        self.add(data)
        yield from self.complete()

    def add(self, data: bytes) -> None:
        """Append what the client has sent. Raises BadFrames."""
        if self._preface:
            expected = self._preface[: len(data)]
            if not data.startswith(expected):
                raise BadFrames("this is not HTTP/2")
            self._preface = self._preface[len(expected) :]
            data = data[len(expected) :]
        self._held += data

    def complete(self) -> Iterator[Frame]:
        """Yield the frames that are complete; those that are not taken are yielded the next time.

        Raises BadFrames.
        """
        held = self._held
        while len(held) >= _HEADER_BYTES:
            length, kind = int.from_bytes(held[:3], "big"), held[3]
            if length > LONGEST_FRAME:
                raise BadFrames(f"a frame of {length} bytes is too long")
            size = _HEADER_BYTES + length
            if len(held) < size:
                return
            frame = Frame(kind, bytes(held[:size]))
            del held[:size]
            self._budget.spend(1 if kind == DATA else 1 + length // _FREE_BYTES)
            yield frame


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
