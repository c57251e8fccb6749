"""Operations on volumes that may take long or hang: one at a time per volume, with deadlines for callers.

An operation continues when its caller times out or is cancelled, because a second one on the same volume
would conflict with it. A call for the same operation joins the one in progress, a call for another operation
on the same volume waits for its end. After a failure there is an exponential back-off, during which the same
error is raised again, unless `reset_backoff` is called because the conditions have changed. All state is in
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pykubelet.objects.base import ObjectError
from pykubelet.util.backoff import exponential_delay
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError

T = TypeVar("T")
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 122.0
"""Seconds of back-off, doubled with each failure; 2 min 2 s is distinguishable from common timeouts."""
FAILURES = (VolumePluginError, ObjectError, ValueError, OSError)
"""Exceptions that volume plugins raise."""


class OperationPending(VolumePluginError):
    """Raised when an operation is still in progress at the caller's deadline, or was cancelled."""


@dataclass(slots=True)
class _Failure:
    error: Exception
    count: int
    """Consecutive failures, with this one."""
    until: float


@dataclass(slots=True)
class _ActiveOperation:
    operation: str
    outcome: asyncio.Future[Any]
    task: asyncio.Task[Any] | None


class PendingOperations:
    """Operations by key; their tasks run in `scope`, or without a scope in the caller's task."""

    def __init__(self, scope: TaskScope | None) -> None:
        self._scope = scope
        self._running: dict[str, dict[str, _ActiveOperation]] = {}
        """Operations in progress, by pod (the key up to its first slash) and key."""
        self._failures: dict[str, dict[str, _Failure]] = {}
        """Failed operations, by pod, and by key and operation."""

    async def run(
        self,
        key: str,
        operation: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        timeout: float,
        use_backoff: bool = True,
    ) -> T:
        """Run an operation on a key, or join the same one in progress; return its result.

        Raises what the work raises, or raised before if its back-off has not expired (unless `use_backoff` is
        false), and OperationPending after `timeout` seconds.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while (
            running := self._running.get(_pod(key), {}).get(key)
        ) is not None and running.operation != operation:
            await self._wait(running, deadline - clock(), key)
        if running is None:
            if use_backoff and self.backoff_left(key, operation):
                # Otherwise each raise would extend the traceback of the cached exception.
                raise self._failures[_pod(key)][f"{key} {operation}"].error.with_traceback(None)
            if self._scope is None:
                return await self._run_with_backoff(key, operation, work)
            running = self._start(self._scope, key, operation, work)
        await self._wait(running, deadline - clock(), key)
        return cast(T, running.outcome.result())

    async def cancel(self, prefix: str, operation: str, *, timeout: float) -> None:
        """Cancel an operation on all keys with a prefix, and wait for its end.

        The prefix contains at least the pod and the slash after it. Raises OperationPending when one does not
        end within `timeout` seconds.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        for key, running in list(self._running.get(_pod(prefix), {}).items()):
            if key.startswith(prefix) and running.operation == operation and running.task is not None:
                running.task.cancel()
                await self._wait(running, deadline - asyncio.get_running_loop().time(), key)

    def backoff_left(self, key: str, operation: str) -> float:
        """Return the seconds until a failed operation may be retried; 0 if it may be retried now."""
        failure = self._failures.get(_pod(key), {}).get(f"{key} {operation}")
        return max(0.0, failure.until - asyncio.get_running_loop().time()) if failure is not None else 0.0

    def reset_backoff(self, prefix: str) -> None:
        """Reset the back-off of all keys with a prefix.

        The prefix contains at least the pod and the slash after it.
        """
        for name in [name for name in self._failures.get(_pod(prefix), ()) if name.startswith(prefix)]:
            self._clear_failure(prefix, name)

    def _clear_failure(self, key: str, name: str) -> None:
        """Remove a failure, if there is one."""
        failures = self._failures.get(_pod(key), {})
        if failures.pop(name, None) is not None and not failures:
            del self._failures[_pod(key)]

    async def _wait(self, running: _ActiveOperation, seconds: float, key: str) -> None:
        done, _ = await asyncio.wait([running.outcome], timeout=max(0.0, seconds))
        if not done:
            raise OperationPending(f"{running.operation} of {key.rpartition('/')[2]} is still under way")

    def _start(
        self, scope: TaskScope, key: str, operation: str, work: Callable[[], Awaitable[T]]
    ) -> _ActiveOperation:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        running = self._running.setdefault(_pod(key), {})[key] = _ActiveOperation(operation, outcome, None)

        async def run_work() -> None:
            try:
                outcome.set_result(await self._run_with_backoff(key, operation, work))
            except Exception as err:  # any exception, also a bug in a plugin, is the caller's
                outcome.set_exception(err)

        def on_done(task: asyncio.Task[Any]) -> None:
            # In a callback, because a task that is cancelled before its first step never runs.
            if not outcome.done():
                outcome.set_exception(OperationPending(f"{operation} was given up"))
            outcome.exception()  # mark as retrieved, also without a waiter
            running_of_pod = self._running[_pod(key)]
            del running_of_pod[key]
            if not running_of_pod:
                del self._running[_pod(key)]

        running.task = scope.start(run_work(), name=f"volume-{key}")
        running.task.add_done_callback(on_done)
        return running

    async def _run_with_backoff(self, key: str, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run the work, and set or reset its back-off."""
        name = f"{key} {operation}"
        try:
            result = await work()
        except VolumeNotReady:
            raise
        except FAILURES as err:
            previous = self._failures.get(_pod(key), {}).get(name)
            count = previous.count + 1 if previous is not None else 1
            delay = exponential_delay(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, count)
            failure = _Failure(err, count, asyncio.get_running_loop().time() + delay)
            self._failures.setdefault(_pod(key), {})[name] = failure
            raise
        self._clear_failure(key, name)
        return result


def _pod(key: str) -> str:
    """Return the part of a key that names the pod."""
    return key.partition("/")[0]


class Locks:
    """Mutexes by name, for what several pods share of a volume."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def is_held(self, name: str) -> bool:
        """Return whether a task holds the mutex of a name or waits for it."""
        return name in self._locks

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        """Hold the mutex of a name."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            _, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = lock, users - 1


async def run_concurrently(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; cancellation cancels and awaits all.

    They are expected not to raise: with several coroutines, an exception comes in an ExceptionGroup.
    """
    if len(coroutines) == 1:
        return [await coroutines[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]
