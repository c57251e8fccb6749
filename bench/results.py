"""What a measurement gives: numbers with the bounds that they must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One measured number and the bound that it must keep."""

    what: str
    value: float
    unit: str
    bound: float

    @property
    def kept(self) -> bool:
        """Whether the number is within its bound."""
        return self.value <= self.bound

    def __str__(self) -> str:
        mark = "ok  " if self.kept else "OVER"
        return f"{mark} {self.what:<52} {self.value:8.2f} {self.unit:<10} (bound {self.bound:g})"
