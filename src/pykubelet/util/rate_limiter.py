"""How often the API server may be asked: a token bucket.

The bucket holds `burst` tokens and gains `qps` of them each second. Who finds it empty takes a token
on credit and waits until it is paid for, so that everyone's turn comes in the order of asking.
"""

from __future__ import annotations

import asyncio


class TokenBucket:
    """A limit of `qps` requests per second after a burst; without a positive `qps` there is none."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps
        self._burst = max(burst, 1)
        self._tokens = float(self._burst)
        self._updated: float | None = None

    def take(self, now: float) -> float:
        """Take a token at this time (seconds of any steady clock); gives how long to wait for it."""
        if self._qps <= 0:
            return 0.0
        self._fill(now)
        self._tokens -= 1
        return max(0.0, -self._tokens / self._qps)

    def take_if_free(self, now: float) -> bool:
        """Take a token only when there is one."""
        if self._qps <= 0:
            return True
        self._fill(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Return a token that was taken and not used."""
        self._tokens = min(float(self._burst), self._tokens + 1)

    async def wait(self) -> float:
        """Take a token and wait for it; gives how long that took."""
        pause = self.take(asyncio.get_running_loop().time())
        if pause > 0:
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                self.give_back()
                raise
        return pause

    def _fill(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            self._tokens = min(float(self._burst), self._tokens + (now - self._updated) * self._qps)
        if self._updated is None or now > self._updated:
            self._updated = now
