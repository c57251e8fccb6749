"""Resource quantities: `100m` of CPU, `64Mi` of memory.

A quantity has its exact amount in billionths and the notation it was written in, because the notation decides
how it is formatted (`1024Mi` becomes `1Gi`, but `1000M` becomes `1G`). Two quantities are equal if their
amounts are, regardless of the notation.
"""

from __future__ import annotations

import re
from functools import total_ordering
from typing import Literal

from pykubelet.util.text import quoted

Notation = Literal["decimal", "binary", "exponent"]
_NANO = 10**9
_MAX = (2**63 - 1) * _NANO
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_SUFFIX = {power: suffix for suffix, power in _DECIMAL.items()}
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_FORM = re.compile(
    r"(?P<sign>[+-]?)(?=\.?[0-9])(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?"
    r"(?:(?P<binary>[KMGTPE]i)|(?P<decimal>[numkMGTPE]?)|[eE](?P<exponent>[+-]?[0-9]+))",
    re.ASCII,
)
_MAX_CHARACTERS = 200

# Beyond these powers of ten any number of that length is capped, or rounded up to one billionth.
_MAX_EXPONENT = 2 * _MAX_CHARACTERS


@total_ordering
class Quantity:
    """An exact amount: `int()` is whole units, `.milli` thousandths, `str()` the canonical text.

    Not a dataclass on purpose: msgspec would decode and encode it as an object with two fields.
    """

    __slots__ = ("nanos", "notation")

    def __init__(self, nanos: int, notation: Notation = "decimal") -> None:
        self.nanos = nanos
        self.notation = notation

    def __eq__(self, other: object) -> bool:
        return self.nanos == other.nanos if isinstance(other, Quantity) else NotImplemented

    def __lt__(self, other: Quantity) -> bool:
        return self.nanos < other.nanos

    def __hash__(self) -> int:
        return hash(self.nanos)

    def __repr__(self) -> str:
        return f"Quantity({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Parse a quantity.

        Amounts finer than one billionth are rounded away from zero, and amounts beyond 2^63-1 are capped, as
        everywhere in Kubernetes. Raises ValueError with one line that states the problem and shows an
        example.
        """
        form = _FORM.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
        if form is None:
            raise ValueError(
                f"{quoted(text)} is not a quantity: "
                "write a number with an optional suffix, such as 500m, 64Mi or 2G"
            )
        fraction = form["fraction"] or ""
        number, power = int(form["whole"] + fraction), 9 - len(fraction)
        notation: Notation = "decimal"
        if form["binary"]:
            notation = "binary"
            number *= 1024 ** _BINARY.index(form["binary"])
        elif form["exponent"]:
            notation = "exponent"
            power += max(-_MAX_EXPONENT, min(int(form["exponent"]), _MAX_EXPONENT))
        else:
            power += _DECIMAL[form["decimal"]]
        nanos = number * 10**power if power >= 0 else _divide_up(number, 10**-power)
        nanos = min(nanos, _MAX)
        return cls(-nanos if form["sign"] == "-" else nanos, notation)

    @classmethod
    def from_units(cls, units: int, notation: Notation = "decimal") -> Quantity:
        """Return the quantity of whole units, such as bytes."""
        return cls(units * _NANO, notation)

    def __int__(self) -> int:
        return _divide_up(self.nanos, _NANO)

    @property
    def milli(self) -> int:
        """The amount in thousandths, rounded away from zero: CPU in millicores."""
        return _divide_up(self.nanos, 10**6)

    @property
    def is_integer(self) -> bool:
        """Whether the amount is whole units, so that `int()` is exact."""
        return self.nanos % _NANO == 0

    def __str__(self) -> str:
        if self.nanos == 0:
            return "0"
        if self.notation == "binary" and self.is_integer and abs(self.nanos) >= 1024 * _NANO:
            number, steps = _without_factor(self.nanos // _NANO, 1024)
            return f"{number}{_BINARY[steps]}"
        number, steps = _without_factor(self.nanos, 1000)
        power = 3 * steps - 9
        if self.notation == "exponent":
            return f"{number}e{power}" if power else str(number)
        return f"{number}{_DECIMAL_SUFFIX[power]}"


def _divide_up(number: int, by: int) -> int:
    """Divide and round away from zero."""
    quotient = -(-abs(number) // by)
    return quotient if number >= 0 else -quotient


def _without_factor(number: int, factor: int) -> tuple[int, int]:
    """Divide by the factor while the remainder is zero; return the quotient and the number of divisions."""
    times = 0
    while number % factor == 0:
        number, times = number // factor, times + 1
    return number, times
