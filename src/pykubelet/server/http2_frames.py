"""What a client sends over HTTP/2, cut into frames, and paid for.

Frames are cheap to send and dear to read, so a client has a budget: every frame costs, long ones more. Work
that is done for it (data sent to it, requests answered) pays back, and so does time. Whoever pings, sets,
resets, continues or sends nothing in many frames (CVE-2019-9511 … 9518, CVE-2023-44487, CVE-2024-27316)
has spent it soon and is hung up on; whoever reads a long log or asks thousands of times never does.

Pure: bytes in, frames out; time is an argument. A frame's length is checked before its content has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

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


class TooBusy(BadFrames):
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
                raise TooBusy("too many frames for what they ask")

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
