"""Calls of third-party functions, bounded in time and in number.

Entry points bring code that may block, raise anything, or never return. `BoundedFunction` calls such a
function in a daemon thread of its own, so that it cannot block the event loop or the thread pool. A thread
cannot be stopped: a call that exceeds its timeout continues to count until it returns, and while `limit`
calls run, further ones fail immediately. So a hanging function costs at most `limit` threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from pykubelet.util.tasks import in_own_thread

P = ParamSpec("P")
T = TypeVar("T")


class TooManyCalls(Exception):
    """Raised while as many calls of a third-party function run as are allowed."""


class BoundedFunction(Generic[P, T]):
    """A third-party function that at most `limit` threads run at the same time."""

    def __init__(self, function: Callable[P, T], name: str, limit: int) -> None:
        self.name = name
        self._function = function
        self._limit = limit
        self._calls: set[object] = set()

    @property
    def running(self) -> int:
        """Number of calls that have not returned, including those that exceeded their timeout."""
        return len(self._calls)

    async def call(self, timeout: float, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread.

        Raises TimeoutError after `timeout` seconds, TooManyCalls, and what the function raises.
        """
        if len(self._calls) >= self._limit:
            raise TooManyCalls(f"{self.name}: {self._limit} calls have not returned")
        call = object()
        self._calls.add(call)

        def run() -> T:
            try:
                return self._function(*args, **kwargs)
            finally:
                self._calls.discard(call)  # atomic; the loop's thread only adds

        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await in_own_thread(run, name=self.name[:15], cancel_timeout=0)
        except TimeoutError as err:
            if deadline.expired():
                raise
            # The function's own TimeoutError is one of its failures, not this timeout.
            raise RuntimeError(f"TimeoutError: {err}") from err
