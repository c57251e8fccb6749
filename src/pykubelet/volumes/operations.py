"""What is done to volumes that may take long: one thing at a time for each, and no one is held up by it.

An operation goes on when whoever asked for it has lost patience or was cancelled: a second one on the
same volume would meet it half-way. Whoever asks for the same again joins it, whoever asks for the
opposite waits for its end. After a failure there is a growing pause, and until it is over the same
failure is the answer, unless somebody knows that things have changed (`forget`).

Several things at once, and no leaving before all of them have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pykubelet.objects.base import ObjectError
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError

T = TypeVar("T")
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 122.0
"""Seconds after a failure, doubled with each; 2 min 2 s can be told from other people's two minutes."""
FAILURES = (VolumePluginError, ObjectError, ValueError, OSError)
"""What kinds raise."""


class OperationPending(VolumePluginError):
    """An operation takes longer than its asker waits; it goes on."""


@dataclass(slots=True)
class _Failure:
    error: Exception
    pause: float
    until: float


@dataclass(slots=True)
class _Running:
    what: str
    outcome: asyncio.Future[Any]
    task: asyncio.Task[Any] | None


class PendingOperations:
    """Operations by key; their tasks live in `scope`, without one they end with whoever asks for them."""

    def __init__(self, scope: TaskScope | None) -> None:
        self._scope = scope
        self._running: dict[str, dict[str, _Running]] = {}
        """Operations in progress by the pod (the key up to its first slash) and the key."""
        self._failures: dict[str, dict[str, _Failure]] = {}
        """Failed operations by the pod, and by the key and the operation."""

    async def run(
        self,
        key: str,
        what: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        patience: float,
        pauses: bool = True,
    ) -> T:
        """Do something to what the key names, or join who does that already; gives the outcome.

        Raises what the work raises, or raised before while the pause is not over (unless there shall be
        no `pauses`), and StillBusy when it takes longer than `patience` (seconds).
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience
        while (running := self._running.get(_pod(key), {}).get(key)) is not None and running.what != what:
            await self._wait(running, deadline - clock(), key)
        if running is None:
            if pauses and self.pause_left(key, what):
                # Raised again and again, it would grow by a trace each time.
                raise self._failures[_pod(key)][f"{key} {what}"].error.with_traceback(None)
            if self._scope is None:
                return await self._watched(key, what, work)
            running = self._begin(self._scope, key, what, work)
        await self._wait(running, deadline - clock(), key)
        return cast(T, running.outcome.result())

    async def end(self, prefix: str, what: str, *, patience: float) -> None:
        """Cancel operations of a sort on all keys that begin so, and wait for their end.

        The prefix contains at least the pod and the slash after it. Raises StillBusy when one does not end
        within `patience` (seconds).
        """
        deadline = asyncio.get_running_loop().time() + patience
        for key, running in list(self._running.get(_pod(prefix), {}).items()):
            if key.startswith(prefix) and running.what == what and running.task is not None:
                running.task.cancel()
                await self._wait(running, deadline - asyncio.get_running_loop().time(), key)

    def pause_left(self, key: str, what: str) -> float:
        """Seconds until something that failed may be tried again; 0 when it may now."""
        failure = self._failures.get(_pod(key), {}).get(f"{key} {what}")
        return max(0.0, failure.until - asyncio.get_running_loop().time()) if failure is not None else 0.0

    def forget(self, prefix: str) -> None:
        """Let everything be tried at once on all keys that begin so.

        The prefix contains at least the pod and the slash after it.
        """
        for name in [name for name in self._failures.get(_pod(prefix), ()) if name.startswith(prefix)]:
            self._succeeded(prefix, name)

    def _succeeded(self, key: str, name: str) -> None:
        """Drop a failure, if there was one."""
        failures = self._failures.get(_pod(key), {})
        if failures.pop(name, None) is not None and not failures:
            del self._failures[_pod(key)]

    async def _wait(self, running: _Running, seconds: float, key: str) -> None:
        done, _ = await asyncio.wait([running.outcome], timeout=max(0.0, seconds))
        if not done:
            raise OperationPending(f"{running.what} of {key.rpartition('/')[2]} is still under way")

    def _begin(self, scope: TaskScope, key: str, what: str, work: Callable[[], Awaitable[T]]) -> _Running:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        running = self._running.setdefault(_pod(key), {})[key] = _Running(what, outcome, None)

        async def live() -> None:
            try:
                outcome.set_result(await self._watched(key, what, work))
            except Exception as err:  # whatever it is, a bug in a kind too: it goes to who asked
                outcome.set_exception(err)

        def over(task: asyncio.Task[Any]) -> None:
            # A task that is cancelled before its first step never runs, so this is not done in it.
            if not outcome.done():
                outcome.set_exception(OperationPending(f"{what} was given up"))
            outcome.exception()  # seen, also when nobody waits for it any more
            running_of_pod = self._running[_pod(key)]
            del running_of_pod[key]
            if not running_of_pod:
                del self._running[_pod(key)]

        running.task = scope.start(live(), name=f"volume-{key}")
        running.task.add_done_callback(over)
        return running

    async def _watched(self, key: str, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, and set or end the pause that a failure leads to."""
        name = f"{key} {what}"
        try:
            result = await work()
        except VolumeNotReady:
            raise
        except FAILURES as err:
            before = self._failures.get(_pod(key), {}).get(name)
            pause = min(before.pause * 2, LONGEST_PAUSE) if before is not None else FIRST_PAUSE
            failure = _Failure(err, pause, asyncio.get_running_loop().time() + pause)
            self._failures.setdefault(_pod(key), {})[name] = failure
            raise
        self._succeeded(key, name)
        return result


def _pod(key: str) -> str:
    """Return the part of a key that names the pod."""
    return key.partition("/")[0]


class Locks:
    """One at a time for each name: for what several pods share of a volume."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        """Be alone with what this names."""
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


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and give their results in order; when cancelled, all are, and are waited for.

    They are expected not to raise: whatever one does raise comes in an ExceptionGroup.
    """
    if len(work) == 1:
        return [await work[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in work]
    return [task.result() for task in tasks]
