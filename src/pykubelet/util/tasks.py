"""Task scopes for long-lived tasks, and non-cancellable and blocking work.

asyncio's TaskGroup waits for its tasks, but the kubelet's tasks do not finish by themselves. A `TaskScope`
cancels them when its block is left, and still fails as a whole when one of them fails, so that no component
can die silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, cast

T = TypeVar("T")
SHORTEST_WAIT_SECONDS = 0.001
"""Minimum seconds of a wait that is computed from a due time."""


def wait_seconds(remaining: float) -> float:
    """Return the seconds to wait for a due time that is `remaining` seconds away, bounded below.

    A timer may fire up to one clock resolution early. A loop that sleeps for the remainder and compares the
    clock with the due time again would spin while the remainder is below that resolution: briefly on a real
    clock, and without end on a clock that only moves by its resolution (loop time).
    """
    return max(remaining, SHORTEST_WAIT_SECONDS)


def seconds_to_tick(period: float) -> float:
    """Return the seconds until the next multiple of `period` on the loop's clock.

    Periodic tasks that wait for it wake the process together.
    """
    now = asyncio.get_running_loop().time()
    return wait_seconds((now // period + 1) * period - now)


class RenderTurns:
    """Turns in which long documents are rendered, one part of one document per iteration of the event loop.

    Without it, each of many concurrent responses would render a part in the same iteration.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, render: Callable[[], T]) -> T:
        """Return the result of `render` in the next free turn."""
        async with self._lock:
            rendered = render()
            # The others wait until the loop has run all other tasks once.
            await asyncio.sleep(0)
        return rendered


class TaskScope:
    """An async context manager that owns tasks: `scope.start(work(), name="...")`."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run the coroutine in a task until it ends or the scope is left."""
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


async def run_or_undo(operation: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Await an operation that cannot be interrupted midway, such as the start of a process.

    A cancelled caller waits until the operation is complete and undoes it, since no other task has its
    result.
    """
    task = asyncio.ensure_future(operation)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await undo(task.result())
        raise


class WorkerPool(ThreadPoolExecutor):
    """A thread pool that goes on with the threads it has when the kernel permits no further one.

    Without it, `submit` would raise RuntimeError on a node with too many tasks, although its work is queued.
    The first thread exists from the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.submit(int)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


async def finish_in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread; a cancelled caller waits for it, so that nothing races with it.

    An exception of the work after a cancellation of its caller is dropped.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as err:
            cancelled = err
    if cancelled is not None:
        future.exception()  # mark as retrieved, so that asyncio does not log it
        raise cancelled
    return future.result()


async def in_own_thread(work: Callable[[], T], *, name: str, cancel_timeout: float = 5.0) -> T:
    """Run blocking work that may never end in a daemon thread of its own.

    A call to a dead server hangs in the kernel and cannot be interrupted: in the thread pool it would occupy
    a worker, and keep the process from exiting. A cancelled caller waits up to `cancel_timeout` seconds,
    because work that does end must not race with what follows, and then abandons it. Raises OSError (EAGAIN)
    if the kernel permits no further thread, and the exceptions of the work.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, err: BaseException | None) -> None:
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
        # The loop may be closed by now: then no caller waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_outcome, result, failure)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await _last_wait(future, cancel_timeout)
        if future.done():
            future.exception()  # mark as retrieved, so that asyncio does not log it
        else:
            future.cancel()
        raise
    return future.result()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises OSError (EAGAIN) if the kernel permits no further one."""
    try:
        thread.start()
    except RuntimeError as err:
        message = "cannot start a thread; raise the limit of tasks (pids.max, TasksMax)"
        raise OSError(errno.EAGAIN, message) from err


async def _last_wait(future: asyncio.Future[Any], seconds: float) -> None:
    """Wait for the work of a cancelled caller, also if the caller is cancelled again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not future.done() and (remaining := deadline - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=wait_seconds(remaining))
