"""Bounds how many pods are being started at once, the oldest first.

The runtime takes the same total time for forty pods whether it is asked for four or forty at a
time; at four, the first ones are ready early. A pod asks for a turn more than once on its way (for
its sandbox, then for its containers), so turns go by age and not by arrival: otherwise every
pod would wait for every other one's sandbox. A few pods whose starts hang, in the runtime or on a dead
server's volume, must not keep all others from starting: a turn is theirs for a while only.
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
"""How long a turn counts. Whoever has it for longer waits for something that hangs, a dead server perhaps."""


class StartSlot:
    """A turn that is held; it can be lent to others for a while, and who takes too long has lent it."""

    def __init__(self, gate: StartLimiter, order: int) -> None:
        """Take the gate, which has given the turn just now."""
        self._gate = gate
        self._order = order
        self._counts: asyncio.TimerHandle | None = None
        self._hold()

    async def while_away(self, work: Awaitable[T], after: float = 0.0) -> T:
        """Wait for something that takes no turn; others may have this one meanwhile.

        `after` so many seconds only, where it is mostly over by then: if all that wait were let in at
        once, what they do first would come before what the oldest does next.
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
        """Pass the turn on, if it is still held."""
        if self._counts is not None:
            self._counts.cancel()
            self._counts = None
            self._gate.give_back()

    async def _again(self) -> None:
        """Have a turn again; whoever is cancelled needs none any more, and does not wait for it."""
        if self._counts is None:
            await self._gate.take(self._order)
            self._hold()

    def _hold(self) -> None:
        self._counts = asyncio.get_running_loop().call_later(LONGEST_SECONDS, self.end)


class StartLimiter:
    """Hands out at most `limit` turns, lowest order first."""

    def __init__(self, limit: int = 4) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ties = itertools.count()

    @property
    def is_full(self) -> bool:
        """Whether the next pod would have to wait."""
        return self._free <= 0

    @asynccontextmanager
    async def turn(self, order: int) -> AsyncIterator[StartSlot]:
        """Hold a turn while inside."""
        await self.take(order)
        turn = StartSlot(self, order)
        try:
            yield turn
        finally:
            turn.end()

    async def take(self, order: int) -> None:
        """Wait for a turn; whoever takes one gives it back."""
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
        """Pass a turn on to the oldest that waits."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
