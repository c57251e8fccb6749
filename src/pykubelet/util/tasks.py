"""Long-lived tasks that end when their owner ends.

asyncio's TaskGroup waits for its tasks; an agent's tasks never finish by themselves. A
`TaskScope` cancels them when its block is left, and still fails as a whole when one of them
fails, so that no part of the agent can die silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, cast

T = TypeVar("T")
SHORTEST_WAIT_SECONDS = 0.001
"""Lower bound of a wait that is computed from a due time."""


def wait_seconds(remaining: float) -> float:
    """Return the seconds to wait for a due time that is `remaining` seconds away, bounded below.

    A timer ends up to one clock resolution early. A loop that sleeps for the remainder and compares the
    clock with the due time again would spin for as long as the remainder is below that resolution: for a
    moment on a real clock, and without end on a clock that moves by its resolution only (loop time).
    """
    return max(remaining, SHORTEST_WAIT_SECONDS)


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


async def begun(beginning: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Await the beginning of something that cannot be cut in two, such as the start of a program.

    A caller that is cancelled meanwhile waits until it has begun and has it undone: nobody else would
    know of it.
    """
    task = asyncio.ensure_future(beginning)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await undo(task.result())
        raise


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


async def in_own_thread(work: Callable[[], T], *, name: str, patience: float = 5.0) -> T:
    """Run blocking work that may never end in a thread that nobody has to wait for.

    A call to a dead server hangs in the kernel and cannot be ended: in the pool of threads it would take
    the place of others' work, and keep the process from ending. A caller that is cancelled waits for so
    long (seconds), because work that does end must not race with what comes next, and then leaves.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, err: BaseException | None) -> None:
        if future.done():
            return
        if err is not None:
            future.set_exception(err)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as err:
            failure = err
        # The loop may be closed by now: then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await _last_wait(future, patience)
        if future.done():
            future.exception()  # seen, so that nobody warns about it
        else:
            future.cancel()
        raise
    return future.result()


async def _last_wait(future: asyncio.Future[Any], seconds: float) -> None:
    """Wait for work whose caller was cancelled, also when it is cancelled again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not future.done() and (left := deadline - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=wait_seconds(left))
