"""Answers that were expensive to get, kept for a while; nobody asks for one that is being fetched.

Bounded: when it is full, the answer that was used longest ago goes. Failures are not kept. Fetching
goes on when the one who began it gives up, because others may be waiting for the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pykubelet.tasks import TaskScope

K = TypeVar("K")
V = TypeVar("V")


class AnswerCache(Generic[K, V]):
    """Answers by question; `seconds` says for how long an answer is kept (0: not at all)."""

    def __init__(self, scope: TaskScope, seconds: Callable[[V], float], *, most: int, name: str) -> None:
        self._scope = scope
        self._seconds = seconds
        self._most = most
        self._name = name
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._fetching: dict[K, asyncio.Future[V]] = {}

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
        """Give the answer that is known, or fetch it; raises what `fetch` raises."""
        answer = self.known(question)
        if answer is not None:
            return answer
        pending = self._fetching.get(question)
        if pending is None:
            pending = asyncio.get_running_loop().create_future()
            self._fetching[question] = pending
            self._scope.start(self._fetch(question, fetch, pending), name=self._name)
        return await asyncio.shield(pending)

    async def _fetch(
        self, question: K, fetch: Callable[[], Awaitable[V]], pending: asyncio.Future[V]
    ) -> None:
        try:
            answer = await fetch()
            self._keep(question, answer)
            pending.set_result(answer)
        except Exception as err:  # handed to whoever waits, whatever it is
            pending.set_exception(err)
            # They may all have gone.
            pending.exception()
        finally:
            pending.cancel()
            self._fetching.pop(question, None)

    def _keep(self, question: K, answer: V) -> None:
        seconds = self._seconds(answer)
        if seconds <= 0:
            return
        self._known[question] = (asyncio.get_running_loop().time() + seconds, answer)
        self._known.move_to_end(question)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
