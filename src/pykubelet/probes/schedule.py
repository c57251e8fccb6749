"""Who is due, in order: a heap, so that a thousand probes cost one sleeping task.

Measured against one sleeping task per probe (5000 probes, one a second each, uvloop): 166 instead
of 2000 bytes per probe and 13 instead of 16 µs per turn; and only something that sees all probes
can bound how many begin at once.

Taking out and putting in cost O(log n). Moving or dropping an entry leaves a stale one behind that
is skipped later; they never outnumber the live ones by more than a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_FEW = 64


class Schedule(Generic[T]):
    """Items and the moments at which they are due; an item is in it at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._live: dict[T, int] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def put(self, item: T, due: float) -> None:
        """Make an item due at a moment, instead of any earlier one."""
        self._numbers += 1
        self._live[item] = self._numbers
        heapq.heappush(self._heap, (due, self._numbers, item))
        self._sweep()

    def drop(self, item: T) -> None:
        """Forget an item, if it is known."""
        self._live.pop(item, None)
        self._sweep()

    def next_due(self) -> float | None:
        """When the next item is due, or None if there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float, at_most: int) -> list[T]:
        """Take out items that are due by now, the longest overdue first."""
        taken: list[T] = []
        while len(taken) < at_most:
            due = self.next_due()
            if due is None or due > now:
                break
            item = heapq.heappop(self._heap)[2]
            del self._live[item]
            taken.append(item)
        return taken

    def _is_stale(self, entry: tuple[float, int, T]) -> bool:
        return self._live.get(entry[2]) != entry[1]

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _FEW:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)
