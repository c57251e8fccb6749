"""Measurement of the longest time for which the event loop runs no other task."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Stalls:
    """Gaps between the turns of a task that is always ready; the loop's other work is in between."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds, with the time for which other processes had the processor."""
        self.longest_cpu = 0.0
        """Seconds of processor time of the loop's thread, which do not depend on other processes."""

    async def watch(self) -> None:
        """Measure until cancelled."""
        last, last_cpu = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now, cpu = time.perf_counter(), time.thread_time()
            self.longest = max(self.longest, now - last)
            self.longest_cpu = max(self.longest_cpu, cpu - last_cpu)
            last, last_cpu = now, cpu


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Stalls]:
    """Measure stalls while the context is open; the processor is busy all the time.

    Garbage collections do not go over the objects of earlier tests, which may take longer than any stall.
    """
    stalls = Stalls()
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(stalls.watch(), name="stalls")
    try:
        yield stalls
        # The last gap ends after the measured work has ended.
        await asyncio.sleep(0)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        gc.unfreeze()
