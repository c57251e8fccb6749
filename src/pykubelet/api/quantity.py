"""Amounts of resources: `100m` of cpu, `64Mi` of memory.

A quantity keeps the exact value and the notation it was written in, because the notation
decides how it is written back (`1024Mi` becomes `1Gi`, but `1000M` becomes `1G`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Literal

Notation = Literal["decimal", "binary", "exponent"]

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_FORM = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))"
    r"(?:(?P<suffix>Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)|[eE](?P<exponent>[+-]?[0-9]{1,9}))?",
    re.ASCII,
)
_LARGEST = Decimal(2**63 - 1)
_SMALLEST_STEP = Decimal(1).scaleb(-9)


@dataclass(frozen=True, slots=True, order=False)
class Quantity:
    """An exact amount; compare and add by `.value`, print with `str()`."""

    value: Decimal
    notation: Notation = "decimal"

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Read a quantity; amounts finer than one billionth are rounded up, as everywhere in Kubernetes.

        Raises ValueError with one line that says what is wrong and shows an example.
        """
        form = _FORM.fullmatch(text)
        if form is None:
            raise ValueError(
                f"{text!r} is not a quantity: write a number with an optional suffix, such as 500m, 64Mi or 2G"
            )
        value, notation = Decimal(form["number"]), "decimal"
        if form["exponent"] is not None:
            exponent = int(form["exponent"])
            notation = "exponent"
            if value and not -200 <= exponent <= 200:
                raise ValueError(f"{text!r} is out of range for a quantity: the largest is 2^63-1")
            value = value.scaleb(exponent) if value else value
        elif form["suffix"] in _BINARY:
            value *= Decimal(1024) ** _BINARY[form["suffix"]]
            notation = "binary"
        else:
            value = value.scaleb(_DECIMAL[form["suffix"] or ""])
        value = _round_up(value, _SMALLEST_STEP)
        if abs(value) > _LARGEST:
            value = _LARGEST.copy_sign(value)
        return cls(value, notation)  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(_round_up(self.value, Decimal(1)))

    @property
    def milli(self) -> int:
        """The amount in thousandths, rounded up: cpu in millicores."""
        return int(_round_up(self.value.scaleb(3), Decimal(1)))

    def __str__(self) -> str:
        value = self.value
        if value == 0:
            return "0"
        if self.notation == "binary" and abs(value) >= 1024 and value == value.to_integral_value():
            number, power = int(value), 0
            while power < 6 and number % 1024 == 0:
                number, power = number // 1024, power + 1
            return f"{number}{dict(enumerate(('', *_BINARY)))[power]}"
        sign, digits, exponent = value.normalize().as_tuple()
        number = int("".join(map(str, digits)))
        scale = int(exponent) - int(exponent) % 3
        number *= 10 ** (int(exponent) - scale)
        while scale > 18:
            number, scale = number * 1000, scale - 3
        suffix = {power: name for name, power in _DECIMAL.items()}[scale]
        if self.notation == "exponent":
            suffix = f"e{scale}" if scale else ""
        return f"{'-' if sign else ''}{number}{suffix}"

    def __lt__(self, other: Quantity) -> bool:
        return self.value < other.value

    def __le__(self, other: Quantity) -> bool:
        return self.value <= other.value


def _round_up(value: Decimal, step: Decimal) -> Decimal:
    """Round away from zero to a multiple of `step`."""
    if value == value.quantize(step, rounding=ROUND_CEILING) if abs(value) < Decimal(10) ** 18 else True:
        return value
    return value.copy_abs().quantize(step, rounding=ROUND_CEILING).copy_sign(value)
