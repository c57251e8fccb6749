"""Threads for blocking work on a node that permits no further thread."""

import asyncio
import errno
from collections.abc import AsyncIterator

import pytest

from pykubelet.util.tasks import WorkerPool, finish_in_thread, in_own_thread
from pykubelet.util.third_party import BoundedFunction, TooManyCalls
from tests.support.threads import forbid_threads


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    found = WorkerPool()
    asyncio.get_running_loop().set_default_executor(found)
    yield found
    found.shutdown()


async def test_worker_pool_without_further_threads_runs_work_in_its_first(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_threads(monkeypatch)
    results = await asyncio.gather(*(finish_in_thread(lambda n=n: n) for n in range(20)))  # type: ignore[misc]
    assert results == list(range(20))
    assert await asyncio.to_thread(lambda: 1) == 1


async def test_in_own_thread_without_further_threads_raises_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_threads(monkeypatch)
    with pytest.raises(OSError, match="raise the limit of tasks") as raised:
        await in_own_thread(lambda: 1, name="work")
    assert raised.value.errno == errno.EAGAIN


async def test_bounded_function_without_further_threads_keeps_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = BoundedFunction(lambda: 1, "mine", 1)
    with monkeypatch.context() as patch:
        forbid_threads(patch)
        with pytest.raises(TooManyCalls, match="mine: cannot start a thread"):
            await function.call(30)
    assert await function.call(30) == 1
