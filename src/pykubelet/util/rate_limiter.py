"""Token bucket rate limiter for API requests.

The bucket has a capacity of `burst` tokens and gains `qps` tokens per second. A caller that finds it empty
reserves a future token and waits for it, so that callers are served in FIFO order. After `set_rate` waiting
callers reserve again, in their order, so that a higher rate also applies to them.
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
        self._changed: asyncio.Event | None = None
        """Set when the rate changes; None without a waiting caller."""

    def set_rate(self, qps: float, burst: int) -> None:
        """Change the limit; callers that wait reserve again with the new one."""
        if (qps, burst) == (self._qps, self._burst):
            return
        # Waiting callers reserve their tokens again.
        self._tokens = float(burst) if self._updated is None else min(float(burst), max(0.0, self._tokens))
        self._qps, self._burst = qps, burst
        if self._changed is not None:
            self._changed.set()
            self._changed = None

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
        clock = asyncio.get_running_loop().time
        started, waited = clock(), 0.0
        while (delay := self.reserve(clock())) > 0:
            if self._changed is None:
                self._changed = asyncio.Event()
            changed = self._changed
            try:
                async with asyncio.timeout(delay):
                    await changed.wait()
            except TimeoutError:
                return waited + delay
            except asyncio.CancelledError:
                if not changed.is_set():
                    self.release()
                raise
            waited = clock() - started
        return waited

    def _fill(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            self._tokens = min(float(self._burst), self._tokens + (now - self._updated) * self._qps)
        if self._updated is None or now > self._updated:
            self._updated = now
