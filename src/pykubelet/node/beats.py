"""Doing something again and again, early when there is a reason to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

JITTER = 0.04
"""Rounds are stretched by chance up to so much, so that a cluster's nodes do not fall into step."""


class Bell:
    """Lets a loop sleep until its time has come or somebody rings; ringing twice is ringing once."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """End the sleep, or the next one at once when nobody sleeps now."""
        self._rung.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep; says whether somebody rang."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True


def stretched(seconds: float, chance: Callable[[], float] = random.random) -> float:
    """Give a time between two rounds, a little longer by chance."""
    return seconds * (1 + JITTER * chance())
