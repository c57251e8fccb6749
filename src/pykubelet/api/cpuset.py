"""CPU sets in the list format of the kernel and Kubernetes: `0-3,5`."""

from collections.abc import Iterable, Iterator

from pykubelet.util.text import quoted

MOST_CPUS = 65536
"""Upper bound of CPU numbers, far above any kernel's limit; a larger number is a mistake."""


def parse(text: str) -> frozenset[int]:
    """Parse a list of CPUs and ranges; an empty text is the empty set.

    Raises ValueError with one line that states the problem and shows an example.
    """
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        low = _number(first, text)
        high = _number(last, text) if dash else low
        if low > high:
            raise ValueError(f"{quoted(part)} runs backwards: write the smaller number first, such as 0-3")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def format(cpus: Iterable[int]) -> str:
    """Format a set of CPUs as the shortest list, in ascending order."""
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in _ranges(sorted(cpus)))


def _number(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        raise ValueError(f"{quoted(text)} is not a list of CPUs: write numbers and ranges, such as 0-3,5")
    if (number := int(digits)) >= MOST_CPUS:
        raise ValueError(f"{quoted(text)} names CPU {number}: the largest possible is {MOST_CPUS - 1}")
    return number


def _ranges(ordered: list[int]) -> Iterator[tuple[int, int]]:
    low = high = None
    for cpu in ordered:
        if low is None or high is None:
            low = high = cpu
        elif cpu <= high + 1:
            high = cpu
        else:
            yield low, high
            low = high = cpu
    if low is not None and high is not None:
        yield low, high
