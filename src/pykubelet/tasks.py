"""Long-lived tasks that end when their owner ends.

asyncio's TaskGroup waits for its tasks; an agent's tasks never finish by themselves. A
`TaskScope` cancels them when its block is left, and still fails as a whole when one of them
fails, so that no part of the agent can die silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class TaskScope:
    """An async context manager that owns tasks: `scope.start(work(), name="...")`."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run the coroutine until it ends or the scope does."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await self._group.__aexit__(kind, err, trace)


async def finish_in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread; a caller that is cancelled waits for it, or others would race with it.

    What the work raises after its caller was cancelled is lost with the caller's interest in it.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as err:
            cancelled = err
    if cancelled is not None:
        future.exception()  # seen, so that nobody warns about it
        raise cancelled
    return future.result()
