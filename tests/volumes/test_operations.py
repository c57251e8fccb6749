import asyncio
from collections.abc import AsyncIterator

import pytest

from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.operations import (
    INITIAL_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    Locks,
    OperationPending,
    PendingOperations,
)

pytestmark = pytest.mark.looptime


@pytest.fixture
async def operations() -> AsyncIterator[PendingOperations]:
    async with TaskScope() as scope:
        yield PendingOperations(scope)


class Work:
    """Something that takes time, and may fail."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.begun = 0
        self.cancelled = 0

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return number


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_who_asks_for_the_same_joins(operations: PendingOperations) -> None:
    work = Work(5)
    one, other = await asyncio.gather(
        operations.run("p/v", "up", work, timeout=60), operations.run("p/v", "up", work, timeout=60)
    )
    assert (one, other) == (1, 1)
    assert await operations.run("p/v", "up", work, timeout=60) == 2


async def test_who_asks_for_the_opposite_waits(operations: PendingOperations) -> None:
    up, down = Work(5), Work(1)
    async with asyncio.TaskGroup() as group:
        group.create_task(operations.run("p/v", "up", up, timeout=60))
        await asyncio.sleep(1)
        began = now()
        await operations.run("p/v", "down", down, timeout=60)
        assert now() - began == pytest.approx(4 + 1)


async def test_others_do_not_wait(operations: PendingOperations) -> None:
    with pytest.raises(OperationPending, match="up of v is still under way"):
        await operations.run("p/v", "up", Work(1000), timeout=1)
    began = now()
    await operations.run("p/w", "up", Work(), timeout=1)
    assert now() == began


async def test_it_goes_on_without_its_asker(operations: PendingOperations) -> None:
    work = Work(10)
    with pytest.raises(OperationPending):
        await operations.run("p/v", "up", work, timeout=3)
    asker = asyncio.ensure_future(operations.run("p/v", "up", work, timeout=60))
    await asyncio.sleep(1)
    asker.cancel()
    await asyncio.wait([asker])
    began = now()
    assert await operations.run("p/v", "up", work, timeout=60) == 1
    assert now() - began == pytest.approx(6)
    assert work.begun == 1


async def test_pauses_grow_after_failures_and_the_failure_is_told_meanwhile(
    operations: PendingOperations,
) -> None:
    work, waits = Work(error=VolumePluginError("no")), []
    for _ in range(12):
        with pytest.raises(VolumePluginError, match="no"):
            await operations.run("p/v", "up", work, timeout=60)
        waits.append(operations.backoff_left("p/v", "up"))
        with pytest.raises(VolumePluginError, match="no"):
            await operations.run("p/v", "up", work, timeout=60)
        await asyncio.sleep(waits[-1])
    assert work.begun == 12, "while there is a pause nothing is tried"
    assert waits[0] == INITIAL_BACKOFF_SECONDS
    assert waits[:9] == [
        pytest.approx(min(INITIAL_BACKOFF_SECONDS * 2**n, MAX_BACKOFF_SECONDS)) for n in range(9)
    ]
    assert waits[-1] == pytest.approx(MAX_BACKOFF_SECONDS)
    work.error = None
    assert await operations.run("p/v", "up", work, timeout=60) == 13
    assert operations.backoff_left("p/v", "up") == 0
    work.error = OSError("broken")
    with pytest.raises(OSError, match="broken"):
        await operations.run("p/v", "up", work, timeout=60)
    assert operations.backoff_left("p/v", "up") == INITIAL_BACKOFF_SECONDS, "it starts anew after a success"


async def test_news_end_the_pause(operations: PendingOperations) -> None:
    work = Work(error=VolumePluginError("no"))
    for uid in ("p", "q"):
        with pytest.raises(VolumePluginError):
            await operations.run(f"{uid}/v", "up", work, timeout=60)
    operations.reset_backoff("p/")
    assert operations.backoff_left("p/v", "up") == 0
    assert operations.backoff_left("q/v", "up") > 0


async def test_what_waits_to_be_woken_has_no_pause(operations: PendingOperations) -> None:
    work = Work(error=VolumeNotReady("not attached"))
    for _ in range(3):
        with pytest.raises(VolumeNotReady):
            await operations.run("p/v", "up", work, timeout=60)
    assert work.begun == 3


async def test_without_pauses_everything_is_tried_at_once(operations: PendingOperations) -> None:
    work = Work(error=OSError("busy"))
    for _ in range(3):
        with pytest.raises(OSError, match="busy"):
            await operations.run("p/", "down", work, timeout=60, use_backoff=False)
    assert work.begun == 3


async def test_operations_of_a_pod_can_be_ended(operations: PendingOperations) -> None:
    ours, others = Work(1000), Work(1000)
    for key, work in (("p/v", ours), ("p/w", ours), ("pp/v", others)):
        with pytest.raises(OperationPending):
            await operations.run(key, "up", work, timeout=1)
    await operations.cancel("p/", "up", timeout=5)
    assert (ours.cancelled, others.cancelled) == (2, 0)
    assert await operations.run("p/v", "down", Work(), timeout=0.1) == 1


async def test_what_does_not_end_is_told(operations: PendingOperations) -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(100)

    with pytest.raises(OperationPending):
        await operations.run("p/v", "up", stubborn, timeout=1)
    with pytest.raises(OperationPending):
        await operations.cancel("p/", "up", timeout=5)
    await operations.cancel("p/", "up", timeout=200)


async def test_one_that_is_ended_before_its_first_step(operations: PendingOperations) -> None:
    work = Work(5)
    asker = asyncio.ensure_future(operations.run("p/v", "up", work, timeout=60))
    await asyncio.sleep(0)
    await operations.cancel("p/", "up", timeout=5)
    with pytest.raises(OperationPending, match="given up"):
        await asker
    assert await operations.run("p/v", "down", Work(), timeout=1) == 1


async def test_a_bug_goes_to_who_asked_and_not_to_the_scope(operations: PendingOperations) -> None:
    with pytest.raises(ZeroDivisionError):
        await operations.run("p/v", "up", Work(error=ZeroDivisionError()), timeout=1)
    assert await operations.run("p/w", "up", Work(), timeout=1) == 1


async def test_locks() -> None:
    locks, order = Locks(), []

    async def visit(name: str, who: str) -> None:
        async with locks(name):
            order.append(f"{who} in")
            await asyncio.sleep(1)
            order.append(f"{who} out")

    await asyncio.gather(visit("v", "a"), visit("v", "b"), visit("w", "c"))
    assert order.index("a out") < order.index("b in")
    assert order.index("c in") < order.index("a out")
    assert locks._locks == {}
