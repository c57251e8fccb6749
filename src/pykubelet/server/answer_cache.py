"""Answers that were expensive to get, kept for a while; nobody asks for one that is being fetched.

Bounded: when it is full, the answer that was used longest ago goes. Failures are not kept. Fetching goes
on when the one who began it gives up, as long as another caller waits for the same; without any it is
cancelled, so that nothing of an abandoned question is retained. No more than `most_waiting` callers wait
at a time: one more evicts the one that has waited longest (`WaitEvicted`), so that callers with
worthless questions cannot keep all others out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pykubelet.tasks import TaskScope

MOST_WAITING = 256
"""Callers that may wait at a time."""

K = TypeVar("K")
V = TypeVar("V")


class WaitEvicted(Exception):
    """Raised in the caller that has waited longest when too many wait."""


class _Fetch(Generic[V]):
    """An answer that is being fetched, and who waits for it."""

    def __init__(self) -> None:
        self.waiters: set[asyncio.Future[V]] = set()
        self.task: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        """Stop fetching."""
        if self.task is not None:
            self.task.cancel()

    def end(self, answer: V) -> None:
        """Return the answer to all who wait."""
        for waiter in self._pending():
            waiter.set_result(answer)

    def fail(self, err: Exception) -> None:
        """Raise the error in all who wait."""
        for waiter in self._pending():
            waiter.set_exception(err)

    def cancel(self) -> None:
        """Cancel all who still wait."""
        for waiter in self._pending():
            waiter.cancel()

    def _pending(self) -> list[asyncio.Future[V]]:
        return [waiter for waiter in self.waiters if not waiter.done()]


class AnswerCache(Generic[K, V]):
    """Answers by question; `seconds` says for how long an answer is kept (0: not at all)."""

    def __init__(
        self,
        scope: TaskScope,
        seconds: Callable[[V], float],
        *,
        most: int,
        name: str,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._scope = scope
        self._seconds = seconds
        self._most = most
        self._name = name
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._most_waiting = most_waiting
        self._fetching: dict[K, _Fetch[V]] = {}
        self._waiting: dict[asyncio.Future[V], None] = {}
        """Who waits, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._known)

    def known(self, question: K) -> V | None:
        """The answer that is remembered, if one is."""
        found = self._known.get(question)
        if found is None:
            return None
        until, answer = found
        if asyncio.get_running_loop().time() >= until:
            del self._known[question]
            return None
        self._known.move_to_end(question)
        return answer

    async def get(self, question: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the known answer, or fetch it. Raises WaitEvicted and what `fetch` raises."""
        answer = self.known(question)
        if answer is not None:
            return answer
        fetching = self._fetching.get(question)
        if fetching is None:
            fetching = self._fetching[question] = _Fetch()
            fetching.task = self._scope.start(self._fetch(question, fetch, fetching), name=self._name)
        waiter: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        fetching.waiters.add(waiter)
        self._waiting[waiter] = None
        self._evict()
        try:
            return await waiter
        finally:
            self._waiting.pop(waiter, None)
            fetching.waiters.discard(waiter)
            if not fetching.waiters:
                self._forget(question, fetching)
                fetching.abandon()

    def _evict(self) -> None:
        while len(self._waiting) > self._most_waiting:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.done():
                longest.set_exception(WaitEvicted("too many requests wait for an answer"))

    async def _fetch(self, question: K, fetch: Callable[[], Awaitable[V]], fetching: _Fetch[V]) -> None:
        try:
            answer = await fetch()
            self._keep(question, answer)
            fetching.end(answer)
        except Exception as err:  # handed to whoever waits, whatever it is
            fetching.fail(err)
        finally:
            fetching.cancel()
            self._forget(question, fetching)

    def _forget(self, question: K, fetching: _Fetch[V]) -> None:
        """Drop a fetch, unless another one of the same question has taken its place."""
        if self._fetching.get(question) is fetching:
            del self._fetching[question]

    def _keep(self, question: K, answer: V) -> None:
        seconds = self._seconds(answer)
        if seconds <= 0:
            return
        self._known[question] = (asyncio.get_running_loop().time() + seconds, answer)
        self._known.move_to_end(question)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
