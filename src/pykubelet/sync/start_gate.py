"""Bounds how many pods are being started at once, the oldest first.

The runtime takes the same total time for forty pods whether it is asked for four or forty at a
time; at four, the first ones are ready early. A pod asks for a turn more than once on its way (for
its sandbox, then for its containers), so turns go by age and not by arrival: otherwise every
pod would wait for every other one's sandbox.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Turn:
    """A turn that is held; it can be lent to others for a while."""

    def __init__(self, gate: StartGate, order: int) -> None:
        self._gate = gate
        self._order = order

    async def while_away(self, work: Awaitable[T], after: float = 0.0) -> T:
        """Wait for something that takes no turn; others may have this one meanwhile.

        `after` so many seconds only, where it is mostly over by then: if all that wait were let in at
        once, what they do first would come before what the oldest does next.
        """
        if isinstance(work, asyncio.Future) and work.done():
            done: T = work.result()
            return done
        lending = _Lending(self._gate)
        timer = asyncio.get_running_loop().call_later(after, lending.begin) if after else None
        if timer is None:
            lending.begin()
        try:
            return await work
        finally:
            if timer is not None:
                timer.cancel()
            if lending.begun:
                await self._gate.take(self._order)


class _Lending:
    """Whether a turn was given to others for a while."""

    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self.begun = False

    def begin(self) -> None:
        self.begun = True
        self._gate.give_back()


class StartGate:
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
    async def turn(self, order: int) -> AsyncIterator[Turn]:
        """Hold a turn while inside."""
        await self.take(order)
        try:
            yield Turn(self, order)
        finally:
            self.give_back()

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
