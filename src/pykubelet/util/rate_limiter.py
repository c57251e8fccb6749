"""Token bucket rate limiter for API requests.

The bucket has a capacity of `burst` tokens and gains `qps` tokens per second. A caller that finds it empty
reserves a future token and waits for it, so that callers are served in FIFO order.
"""

from __future__ import annotations

import asyncio


class TokenBucket:
    """A limit of `qps` requests per second after a burst; unlimited without a positive `qps`."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps
        self._burst = burst
        self._tokens = float(self._burst)
        self._updated: float | None = None

    def reserve(self, now: float) -> float:
        """Reserve a token at `now` (seconds of any monotonic clock); return the seconds to wait for it."""
        if self._qps <= 0:
            return 0.0
        self._fill(now)
        self._tokens -= 1
        return max(0.0, -self._tokens / self._qps)

    def try_acquire(self, now: float) -> bool:
        """Consume a token if one is available; return whether it was."""
        if self._qps <= 0:
            return True
        self._fill(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def release(self) -> None:
        """Return a token that was reserved and not used."""
        self._tokens = min(float(self._burst), self._tokens + 1)

    async def wait(self) -> float:
        """Reserve a token and wait for it; return the seconds waited. A cancellation returns the token."""
        delay = self.reserve(asyncio.get_running_loop().time())
        if delay > 0:
            try:
                await asyncio.sleep(delay)
            except asyncio.CancelledError:
                self.release()
                raise
        return delay

    def _fill(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            self._tokens = min(float(self._burst), self._tokens + (now - self._updated) * self._qps)
        if self._updated is None or now > self._updated:
            self._updated = now
