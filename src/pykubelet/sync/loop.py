"""The loop that drives everything: it never blocks, and it knows when it last came round.

Each round it looks at what is new and hands it on. While the runtime is unhealthy it skips the
round and waits, from 100 ms doubling to 5 s, so that a runtime that is coming back is not
stormed. `/healthz/syncloop` fails when no round began for two minutes (or two resync periods):
the one sign of a stuck agent that an outside supervisor can act on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pykubelet.api.duration import Duration
from pykubelet.logs import get_logger

log = get_logger(__name__)

TICK_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
STUCK_SECONDS = 120.0


class SyncLoop:
    """Rounds of the main loop, and their health."""

    def __init__(self, runtime_errors: Callable[[], list[str]], resync: Duration) -> None:
        self._runtime_errors = runtime_errors
        self._longest_round = max(STUCK_SECONDS, 2 * resync.seconds)
        self._began: float | None = None

    async def run(self) -> None:
        """Go round for ever."""
        pause = FIRST_PAUSE
        while True:
            self._began = asyncio.get_running_loop().time()
            errors = self._runtime_errors()
            if errors:
                log.error("; ".join(errors), "Skipping pod synchronization")
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            await asyncio.sleep(TICK_SECONDS)

    def health(self) -> str | None:
        """Why the loop counts as stuck, or None."""
        if self._began is None:
            return None
        age = asyncio.get_running_loop().time() - self._began
        if age > self._longest_round:
            return f"sync loop took longer than expected: the last round began {age:.0f} s ago"
        return None
