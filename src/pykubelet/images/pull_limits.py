"""How many images are pulled at once, and how often.

Two limits protect a registry and the node's disk: a number of pulls under way, for which others
wait in the order of their arrival, and a rate (`registryPullQPS`, `registryBurst`), beyond which a
pull fails at once and is left to the back-off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext


class PullRateExceeded(Exception):
    """More pulls were asked for than the configured rate allows."""

    def __str__(self) -> str:
        # These words are known to people and to tools.
        return "pull QPS exceeded"


class TokenBucket:
    """A rate with a burst: starts full, and gains `rate` tokens a second up to `burst`."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled = -math.inf

    def take(self, now: float) -> bool:
        """Take a token if there is one; `now` in seconds of any clock that does not go back."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class PullLimits:
    """The limits of one node, as its configuration has them."""

    def __init__(
        self, *, serialize: bool = True, max_parallel: int | None = None, qps: float = 5, burst: int = 10
    ) -> None:
        parallel = 1 if serialize else max_parallel or 0
        self._turns = asyncio.Semaphore(parallel) if parallel > 0 else None
        # A rate of zero means no limit, whatever the burst.
        self._bucket = TokenBucket(qps, burst) if qps > 0 else None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it while inside; raises PullRateExceeded when it comes too soon."""
        async with self._turns or nullcontext():
            if self._bucket and not self._bucket.take(asyncio.get_running_loop().time()):
                raise PullRateExceeded
            yield
