"""Waiting for what must come: with an end, because a test that waits for ever stops all others, too."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition holds; fails after so long."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
