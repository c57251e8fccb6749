"""Waiting for a condition in tests."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait until a condition holds; return the seconds it took. Fails after `seconds` of real time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"the condition was not met in {seconds:g} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - began
