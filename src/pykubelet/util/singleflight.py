"""Deduplication of concurrent calls with the same key.

Forty pods that start at the same time with the same image need one pull, not forty. The call runs in a task
of its own, so that the first caller can be cancelled (its pod was deleted) without affecting the others; when
no caller waits any more, the call is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pykubelet.util.tasks import TaskScope

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ScopeClosed(Exception):
    """Raised when the task scope, and with it the call, ends before the result."""

    def __str__(self) -> str:
        return "the agent is stopping"


@dataclass(slots=True, eq=False)
class _Call(Generic[V]):
    previous: _Call[V] | None
    """The call with the same key that this one waits for."""
    task: asyncio.Task[V | Exception] = field(init=False)
    started: bool = False
    waiting: int = 0


class Singleflight(Generic[K, V]):
    """At most one running call per key."""

    def __init__(self, tasks: TaskScope, name: str) -> None:
        self._tasks = tasks
        self._name = name
        self._calls: dict[K, _Call[V]] = {}

    async def run(self, key: K, make: Callable[[], Coroutine[Any, Any, V]], *, fresh: bool = False) -> V:
        """Return the result of the call in progress for this key, or else of a new one.

        With `fresh` a call that has started is not joined, so that the result is not older than the request:
        the next call starts when it ends, and all concurrent `fresh` callers share it.

        Raises what the call raises, and ScopeClosed if the task scope ends first.
        """
        call = self._calls.get(key)
        if call is None or (fresh and call.started):
            call = self._start(key, make, call)
        call.waiting += 1
        try:
            return await self._wait_result(call)
        finally:
            call.waiting -= 1
            if not call.waiting:
                self._leave(key, call)

    def _start(
        self, key: K, make: Callable[[], Coroutine[Any, Any, V]], previous: _Call[V] | None
    ) -> _Call[V]:
        call = _Call(previous)
        work = self._work(call, make)
        try:
            call.task = self._tasks.start(work, name=self._name)
        except RuntimeError:
            work.close()
            raise ScopeClosed from None
        self._calls[key] = call
        return call

    async def _work(self, call: _Call[V], make: Callable[[], Coroutine[Any, Any, V]]) -> V | Exception:
        if call.previous is not None:
            await asyncio.wait({call.previous.task})
        call.previous = None
        call.started = True
        try:
            return await make()
        except Exception as err:
            # Returned and raised by the waiters: an exception of the task would end the task scope.
            return err

    async def _wait_result(self, call: _Call[V]) -> V:
        await asyncio.wait({call.task})
        if call.task.cancelled():
            raise ScopeClosed
        result = call.task.result()
        if isinstance(result, Exception):
            raise result
        return result

    def _leave(self, key: K, call: _Call[V]) -> None:
        call.task.cancel()
        if self._calls.get(key) is call:
            if call.previous is not None and not call.previous.task.done():
                self._calls[key] = call.previous
            else:
                del self._calls[key]
