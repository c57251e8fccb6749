"""What sets of NUMA nodes have in common, for many sets: a pure function with a bounded price.

Sets are bits of a number. Two resources on a machine of sixteen nodes have sixty thousand hints each, and
trying each pair would hold up the agent for an hour. How many sets contain a given one is quickly counted
for all of them at once; what is common to a pair contains a set if both do, so these counts multiply, and
from the product it can be told which sets are met exactly.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import add, mul, sub


def meets(some: Collection[int], others: Collection[int]) -> set[int]:
    """Give what each of `some` has in common with each of `others`."""
    places = _places(some, others)
    if not places or len(some) * len(others) <= 3 * len(places) << len(places):
        return {one & other for one in some for other in others}
    if len(places) != places[-1] + 1:
        packed = meets({_packed(one, places) for one in some}, {_packed(one, places) for one in others})
        return {_spread(one, places) for one in packed}
    counts = list(map(mul, _containing(some, len(places)), _containing(others, len(places))))
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(sub, counts[half], counts[begin + size : begin + 2 * size])
    return {number for number, count in enumerate(counts) if count}


def _containing(sets: Collection[int], bits: int) -> list[int]:
    """Count for each set of so many bits how many of these sets contain it."""
    counts = [0] * (1 << bits)
    for one in sets:
        counts[one] += 1
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(add, counts[half], counts[begin + size : begin + 2 * size])
    return counts


def _halves(counts: list[int]) -> list[int]:
    return [1 << bit for bit in range(len(counts).bit_length() - 1)]


def _places(some: Collection[int], others: Collection[int]) -> list[int]:
    """Give the bits that are anywhere set: numbers of nodes may have gaps."""
    union = 0
    for one in (*some, *others):
        union |= one
    return [place for place in range(union.bit_length()) if union >> place & 1]


def _packed(number: int, places: list[int]) -> int:
    return sum(1 << index for index, place in enumerate(places) if number >> place & 1)


def _spread(number: int, places: list[int]) -> int:
    return sum(1 << place for index, place in enumerate(places) if number >> index & 1)
