"""The loop that drives everything: one place where all news arrives, and it never blocks.

News are changes of the desired pods, changes in the runtime, probe results, and the passing of
time (a tick each second, housekeeping every other). Each is handed to the pod's worker, which does
the work; the loop only knows whom to tell. While the runtime is unhealthy it takes no news and
waits, from 100 ms doubling to 5 s: nothing is lost meanwhile, and a runtime that is coming back
is not stormed.

`/healthz/syncloop` fails when no round began for two minutes (or two resync periods): the one sign
of a stuck agent that an outside supervisor can act on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pykubelet.api.duration import Duration
from pykubelet.logs import get_logger
from pykubelet.podconfig.mux import PodChange
from pykubelet.podsync.contract import PodLifecycleEvent

log = get_logger(__name__)
TICK_SECONDS = 1.0
HOUSEKEEPING_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
STUCK_SECONDS = 120.0


class Handlers(Protocol):
    """Whom the loop tells."""

    def pod_changed(self, change: PodChange) -> None:
        """The desired pods changed."""
        ...

    def runtime_changed(self, change: PodLifecycleEvent) -> None:
        """Something of a pod changed in the runtime."""
        ...

    def probe_changed(self, uid: str) -> None:
        """A probe of a pod changed its verdict."""
        ...

    async def housekeep(self) -> None:
        """Clean up what belongs to nobody; must be quick."""
        ...


News = Callable[[], None]


class SyncLoop:
    """Rounds of the main loop, and their health."""

    def __init__(self, handlers: Handlers, runtime_errors: Callable[[], list[str]], resync: Duration) -> None:
        self._handlers = handlers
        self._runtime_errors = runtime_errors
        self._longest_round = max(STUCK_SECONDS, 2 * resync.seconds)
        self._began: float | None = None
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._complaint: list[str] = []

    # The doors: called by whoever has news, at any time, and never waiting.

    def pods(self, changes: Sequence[PodChange]) -> None:
        """Take changes of the desired pods, in their order."""
        for change in changes:
            self._news.put_nowait(lambda change=change: self._handlers.pod_changed(change))  # type: ignore[misc]

    def runtime(self, change: PodLifecycleEvent) -> None:
        """Take a change in the runtime."""
        self._news.put_nowait(lambda: self._handlers.runtime_changed(change))

    def probe(self, uid: str) -> None:
        """Take a probe's new verdict."""
        self._news.put_nowait(lambda: self._handlers.probe_changed(uid))

    def after(self, call: News) -> None:
        """Make a call when everything that came before has been handed on."""
        self._news.put_nowait(call)

    async def run(self) -> None:
        """Go round for ever."""
        clock = asyncio.get_running_loop().time
        pause, housekeeping = FIRST_PAUSE, clock()
        while True:
            self._began = clock()
            if self._runtime_is_down():
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            if clock() >= housekeeping:
                await self._guarded(self._handlers.housekeep())
                housekeeping = clock() + HOUSEKEEPING_SECONDS
            await self._next_news()

    def health(self) -> str | None:
        """Why the loop counts as stuck, or None."""
        if self._began is None:
            return None
        age = asyncio.get_running_loop().time() - self._began
        if age > self._longest_round:
            return f"sync loop took longer than expected: the last round began {age:.0f} s ago"
        return None

    def _runtime_is_down(self) -> bool:
        errors = self._runtime_errors()
        if errors and errors != self._complaint:
            log.error("; ".join(errors), "Skipping pod synchronization")
        self._complaint = errors
        return bool(errors)

    async def _next_news(self) -> None:
        """Hand on all news there is, or wait up to a tick for some."""
        try:
            async with asyncio.timeout(TICK_SECONDS):
                news = await self._news.get()
        except TimeoutError:
            return
        while True:
            self._guarded_call(news)
            if self._news.empty():
                return
            news = self._news.get_nowait()

    def _guarded_call(self, news: News) -> None:
        try:
            news()
        except Exception as err:  # one bad piece of news must not stop the agent
            log.exception(err, "Unexpected error in the sync loop")

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as err:  # the same for housekeeping
            log.exception(err, "Unexpected error while housekeeping")
