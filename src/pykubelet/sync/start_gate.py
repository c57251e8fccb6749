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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StartGate:
    """Hands out at most `limit` turns, lowest order first."""

    def __init__(self, limit: int = 4) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ties = itertools.count()

    @asynccontextmanager
    async def turn(self, order: int) -> AsyncIterator[None]:
        """Hold a turn while inside."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            await self._wait(order)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, order: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._ties), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
