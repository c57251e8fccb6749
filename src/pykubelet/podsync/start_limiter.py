"""Limit on the number of pods that start concurrently, the oldest first.

The runtime needs the same total time for forty pods whether four or forty start concurrently; with four, the
first ones are ready early. A pod acquires a slot several times (for its sandbox, then for its containers), so
slots are granted by the pod's age and not by arrival: otherwise every pod would wait for every other pod's
sandbox. Starts that hang, in the runtime or on a dead server's volume, must not block all others, so a slot
counts for a limited time only.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
LONGEST_SECONDS = 10.0
"""Seconds that a held slot counts; a start that takes longer waits for something that hangs."""


class StartSlot:
    """A held slot, which can be released temporarily and is released when it is held too long."""

    def __init__(self, gate: StartLimiter, order: int) -> None:
        """Initialize with the limiter, which has just granted the slot."""
        self._gate = gate
        self._order = order
        self._counts: asyncio.TimerHandle | None = None
        self._hold()

    async def while_away(self, work: Awaitable[T], after: float = 0.0) -> T:
        """Await `work` with the slot released, and acquire it again.

        The slot is released only `after` so many seconds, for work that is mostly done by then: if all
        waiting pods were admitted immediately, their first operations would precede the next one of the
        oldest pod.
        """
        if isinstance(work, asyncio.Future) and work.done():
            done: T = work.result()
            return done
        timer = asyncio.get_running_loop().call_later(after, self.end) if after else None
        if timer is None:
            self.end()
        try:
            try:
                result = await work
            finally:
                if timer is not None:
                    timer.cancel()
        except Exception:
            await self._again()
            raise
        await self._again()
        return result

    def end(self) -> None:
        """Release the slot, if it is still held."""
        if self._counts is not None:
            self._counts.cancel()
            self._counts = None
            self._gate.give_back()

    async def _again(self) -> None:
        """Acquire the slot again; a cancelled task does not wait for it."""
        if self._counts is None:
            await self._gate.take(self._order)
            self._hold()

    def _hold(self) -> None:
        self._counts = asyncio.get_running_loop().call_later(LONGEST_SECONDS, self.end)


class StartLimiter:
    """Limiter of concurrent pod starts: at most `limit` slots, lowest order first."""

    def __init__(self, limit: int = 4) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ties = itertools.count()

    @property
    def has_waiters(self) -> bool:
        """Whether pods wait for a slot."""
        return any(not turn.done() for _, _, turn in self._waiting)

    @asynccontextmanager
    async def turn(self, order: int) -> AsyncIterator[StartSlot]:
        """Hold a slot while the context is open."""
        await self.take(order)
        turn = StartSlot(self, order)
        try:
            yield turn
        finally:
            turn.end()

    async def take(self, order: int) -> None:
        """Acquire a slot; the caller must release it."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            await self._wait(order)

    async def _wait(self, order: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._ties), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Release a slot to the oldest waiter."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
