"""Results of slow sources, refreshed on demand and cached for all readers.

A source (a CRI call, a walk over log directories) is called at most once per interval, and never twice at the
same time, no matter how many clients request statistics. A reader waits a bounded time for a refresh in
progress; then it gets the previous result, if that is not too old, or nothing. So a source that hangs delays
only the readers of its first seconds, and stale values disappear from responses.

With `keep_fresh`, the source is called at the interval without a reader for that time after the last one, so
that a periodic reader does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
T = TypeVar("T")
MIN_INTERVAL_SECONDS = 1.0
"""Seconds between two calls even if results are invalidated constantly."""


class SharedWork:
    """Work for which concurrent callers wait together; it runs in `tasks` and goes on without a caller."""

    def __init__(self, name: str, tasks: TaskScope) -> None:
        self._name = name
        self._tasks = tasks
        self._task: asyncio.Task[Exception | None] | None = None

    @property
    def in_progress(self) -> bool:
        """Whether the work is running."""
        return self._task is not None and not self._task.done()

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the work unless it is in progress, and wait for it. Raises its exception to every caller.

        If the scope is left, the work is cancelled, and its callers return.
        """
        if not self.in_progress:
            self._task = self._tasks.start(_outcome(work), name=self._name)
        if (err := await self.wait()) is not None:
            raise err

    async def wait(self) -> Exception | None:
        """Wait for work in progress; return its exception."""
        task = self._task
        if task is None:
            return None
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()


async def _outcome(work: Callable[[], Coroutine[Any, Any, None]]) -> Exception | None:
    # An exception is for the callers; raised in the task, it would end the scope and with it the kubelet.
    try:
        await work()
    except Exception as err:
        return err
    return None


class CachedCall(Generic[T]):
    """The latest result of `fetch`, which runs in `tasks`; all times are in seconds.

    Exceptions of `fetch` that are listed in `errors` are logged and leave the previous result.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[], Awaitable[T]],
        tasks: TaskScope,
        *,
        interval: float,
        wait: float,
        max_age: float,
        keep_fresh: float = 0.0,
        errors: tuple[type[Exception], ...] = (),
    ) -> None:
        """Initialize; `wait` limits the delay of a reader, counted from the start of the call."""
        self._name = name
        self._fetch = fetch
        self._tasks = tasks
        self._interval = interval
        self._wait = wait
        self._max_age = max_age
        self._keep_fresh = keep_fresh
        self._errors = errors
        self._error_log = ErrorLogLimiter(log, "Failed to collect statistics", source=name)
        self._task: asyncio.Task[None] | None = None
        self._started_at = float("-inf")
        self._invalidated = False
        self._is_outdated = False
        """Whether the result was invalidated before the call in progress started."""
        self._wanted_until = float("-inf")
        self._result: T | None = None
        self._result_at = float("-inf")
        """Start of the call that returned the result: the result is at least as new."""

    async def get(self) -> T | None:
        """Return the latest result, after a refresh if it is due; None if it is unknown or too old."""
        now = asyncio.get_running_loop().time()
        self._wanted_until = now + self._keep_fresh
        task = self.refresh()
        if task is None or (self._is_fresh(now) and not self._is_outdated):
            return self.latest()
        if (remaining := self._started_at + self._wait - now) > 0:
            await asyncio.wait([task], timeout=wait_seconds(remaining))
        return self.latest()

    def _is_fresh(self, now: float) -> bool:
        """Return whether the result is as new as calls at the interval allow."""
        return self._keep_fresh > 0 and now - self._result_at <= self._interval + self._wait

    def latest(self) -> T | None:
        """Return the latest result without waiting; None if it is unknown or too old."""
        age = asyncio.get_running_loop().time() - self._result_at
        return self._result if age <= self._max_age else None

    def invalidate(self) -> None:
        """Make the next reader refresh the result before the interval has elapsed."""
        self._invalidated = True

    def refresh(self) -> asyncio.Task[None] | None:
        """Start a call if it is due and none is in progress; return the call in progress, if any."""
        if self._task is not None:
            return self._task
        now = asyncio.get_running_loop().time()
        interval = min(self._interval, MIN_INTERVAL_SECONDS) if self._invalidated else self._interval
        if now - self._started_at < interval:
            return None
        self._started_at, self._is_outdated, self._invalidated = now, self._invalidated, False
        work = self._run()
        try:
            self._task = self._tasks.start(work, name=f"stats-{self._name}")
        except RuntimeError:  # the kubelet is stopping
            work.close()
        return self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        started_at = self._started_at
        try:
            result = await self._fetch()
        except self._errors as err:
            self._error_log.failed(err, loop.time())
        else:
            self._result, self._result_at = result, started_at
            self._error_log.succeeded(loop.time())
        finally:
            self._task = None
            if self._keep_fresh:
                loop.call_at(max(loop.time(), started_at + self._interval), self._refresh_if_wanted)

    def _refresh_if_wanted(self) -> None:
        if asyncio.get_running_loop().time() < self._wanted_until:
            self.refresh()
