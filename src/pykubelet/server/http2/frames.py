"""HTTP/2 frame parser, frame budget per connection, and time limit for unauthorized clients.

Frames are cheap to send and expensive to handle, so each client has a budget: every frame is charged, long
ones more. Data transferred, completed responses and elapsed time restore it. A client that floods with PING,
SETTINGS, RST_STREAM, CONTINUATION or empty frames (CVE-2019-9511 … 9518, CVE-2023-44487, CVE-2024-27316)
exceeds it soon and is disconnected; one that reads a long log or sends thousands of requests does not. A
frame's length is checked before its payload is received.

Decoding header fields is slow, and the frame budget of one connection is about a second of it: many
connections together would block the event loop for minutes. `ReadingTurns` grants unauthorized connections a
fraction of the event loop's time. When it is used up, they are not read from until their turn; next is the
one with the least cost so far, so that a client with a small request waits for milliseconds only. Connections
with an authorized request are not limited. Waiting frames are bounded: above the limit the connection with
the most is closed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple, Protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""Client connection preface."""
LONGEST_FRAME = 16 * 1024
"""Initial SETTINGS_MAX_FRAME_SIZE, in bytes."""
DATA = 0
GOAWAY = 7
BUDGET = 4000.0
_PER_SECOND = 400.0
_FREE_BYTES = 256
_BYTES_PER_POINT = 1024
_HEADER_BYTES = 9


class BadFrames(Exception):
    """Raised for invalid frames and for too many frames."""


class BudgetExceeded(BadFrames):
    """Raised when the client has exceeded its budget."""


class Frame(NamedTuple):
    """A complete frame."""

    kind: int
    data: bytes
    """Header and payload."""


class Budget:
    """Token bucket for the work that a client may cause."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = BUDGET
        self._seen = clock()

    def spend(self, points: float) -> None:
        """Charge points. Raises BudgetExceeded if none are left."""
        self._left -= points
        if self._left < 0:
            now = self._clock()
            self.earn((now - self._seen) * _PER_SECOND)
            self._seen = now
            if self._left < 0:
                raise BudgetExceeded("too many frames for what they ask")

    def earn(self, points: float) -> None:
        """Restore points for useful work."""
        self._left = min(BUDGET, self._left + points)

    def moved(self, size: int) -> None:
        """Restore points for transferred payload bytes; less than 1 KiB restores nothing."""
        self.earn(size // _BYTES_PER_POINT)


class Frames:
    """Frame parser of one connection."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._preface = PREFACE
        self._held = bytearray()

    @property
    def unread_bytes(self) -> int:
        """Bytes of frames not returned yet."""
        return len(self._held)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add data and yield the complete frames, without the client's preface. Raises BadFrames."""
        self.add(data)
        yield from self.complete()

    def add(self, data: bytes) -> None:
        """Append received data. Raises BadFrames."""
        if self._preface:
            expected = self._preface[: len(data)]
            if not data.startswith(expected):
                raise BadFrames("this is not HTTP/2")
            self._preface = self._preface[len(expected) :]
            data = data[len(expected) :]
        self._held += data

    def complete(self) -> Iterator[Frame]:
        """Yield the complete frames; those not consumed are yielded by the next call. Raises BadFrames."""
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
"""Capacity of the token bucket, in seconds."""
SHARE = 0.25
"""Fraction of the event loop's time that refills the bucket."""
MOST_WAITING_BYTES = 8 * 1024 * 1024
_SECONDS_PER_BYTE = 1.5e-6
"""Estimated cost of waiting frames."""
_SHORTEST_PAUSE = 0.001


class Reader(Protocol):
    """A connection whose frames are handled in turns."""

    reading_seconds: float
    """Seconds spent on its frames."""

    @property
    def is_authorized(self) -> bool:
        """Whether a request of the connection was authorized."""

    @property
    def unread_bytes(self) -> int:
        """Bytes received and not handled yet."""

    def read_frames(self, seconds: float) -> bool:
        """Handle frames for about `seconds`; return False if frames are left."""

    def hold(self) -> None:
        """Stop reading from the client."""

    def resume(self) -> None:
        """Resume reading from the client."""

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
        """Handle the received frames of a connection, now or in its turn."""
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
        """Remove a closed connection."""
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
