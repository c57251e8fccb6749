"""Durations in Go's format (`1m30s`, `100ms`).

Stored as whole nanoseconds, as in Go, so that any parsed value is formatted back exactly.
"""

from __future__ import annotations

import re

from pykubelet.util.text import quoted

_NANOS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_TERM = re.compile(r"(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_MAX_CHARACTERS = 200
_MAX = 2**63 - 1


class Duration(int):
    """A duration in nanoseconds; `.seconds` is for asyncio."""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse text such as `1h2m3.5s`; fractions of a nanosecond are dropped.

        Raises ValueError with one line that states the problem and shows an example.
        """
        negative = text.startswith("-")
        rest = text[1:] if negative or text.startswith("+") else text
        if rest == "0":
            return cls(0)
        nanos, position = 0, 0
        while len(rest) <= _MAX_CHARACTERS and (term := _TERM.match(rest, position)):
            integer, fraction, unit = term[1], term[2] or "", _NANOS[term[3]]
            nanos += int(integer or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
            position = term.end()
        if not rest or position != len(rest):
            why = "has no unit" if re.fullmatch(r"[0-9.]+", rest, re.ASCII) else "is not a duration"
            raise ValueError(f"{quoted(text)} {why}: write a number and a unit, such as 10s, 1m30s or 100ms")
        # The minimum is -2^63, one more than the maximum in magnitude.
        if nanos > _MAX + negative:
            raise ValueError(f"{quoted(text)} is too long: the longest duration is about 292 years")
        return cls(-nanos if negative else nanos)

    @classmethod
    def from_seconds(cls, seconds: float) -> Duration:
        """Return the duration of a number of seconds."""
        return cls(round(seconds * 1_000_000_000))

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return int(self) / 1_000_000_000

    def __str__(self) -> str:
        nanos = abs(int(self))
        sign = "-" if self < 0 else ""
        if nanos == 0:
            return "0s"
        if nanos < 1_000_000_000:
            unit = "ns" if nanos < 1_000 else "µs" if nanos < 1_000_000 else "ms"
            return f"{sign}{_decimal(nanos, _NANOS[unit])}{unit}"
        minutes, rest = divmod(nanos, _NANOS["m"])
        hours, minutes = divmod(minutes, 60)
        text = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
        return f"{sign}{text}{_decimal(rest, _NANOS['s'])}s"

    def __repr__(self) -> str:
        return f"Duration({str(self)!r})"


def _decimal(value: int, unit: int) -> str:
    integer, fraction = divmod(value, unit)
    if not fraction:
        return str(integer)
    digits = len(str(unit)) - 1
    return f"{integer}.{fraction:0{digits}d}".rstrip("0")
