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


async def test_pending_operations_same_operation_is_joined(operations: PendingOperations) -> None:
    work = Work(5)
    one, other = await asyncio.gather(
        operations.run("p/v", "up", work, timeout=60), operations.run("p/v", "up", work, timeout=60)
    )
    assert (one, other) == (1, 1)
    assert await operations.run("p/v", "up", work, timeout=60) == 2


async def test_pending_operations_opposite_operation_waits(operations: PendingOperations) -> None:
    up, down = Work(5), Work(1)
    async with asyncio.TaskGroup() as group:
        group.create_task(operations.run("p/v", "up", up, timeout=60))
        await asyncio.sleep(1)
        began = now()
        await operations.run("p/v", "down", down, timeout=60)
        assert now() - began == pytest.approx(4 + 1)


async def test_pending_operations_other_volume_does_not_wait(operations: PendingOperations) -> None:
    with pytest.raises(OperationPending, match="up of v is still under way"):
        await operations.run("p/v", "up", Work(1000), timeout=1)
    began = now()
    await operations.run("p/w", "up", Work(), timeout=1)
    assert now() == began


async def test_pending_operations_caller_cancelled_operation_continues(operations: PendingOperations) -> None:
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


async def test_pending_operations_failure_backs_off_and_returns_last_error(
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


async def test_pending_operations_reset_backoff_only_for_prefix(operations: PendingOperations) -> None:
    work = Work(error=VolumePluginError("no"))
    for uid in ("p", "q"):
        with pytest.raises(VolumePluginError):
            await operations.run(f"{uid}/v", "up", work, timeout=60)
    operations.reset_backoff("p/")
    assert operations.backoff_left("p/v", "up") == 0
    assert operations.backoff_left("q/v", "up") > 0


async def test_pending_operations_volume_not_ready_has_no_back_off(operations: PendingOperations) -> None:
    work = Work(error=VolumeNotReady("not attached"))
    for _ in range(3):
        with pytest.raises(VolumeNotReady):
            await operations.run("p/v", "up", work, timeout=60)
    assert work.begun == 3


async def test_pending_operations_backoff_disabled_retries_immediately(operations: PendingOperations) -> None:
    work = Work(error=OSError("busy"))
    for _ in range(3):
        with pytest.raises(OSError, match="busy"):
            await operations.run("p/", "down", work, timeout=60, use_backoff=False)
    assert work.begun == 3


async def test_pending_operations_cancel_prefix_cancels_only_its_operations(
    operations: PendingOperations,
) -> None:
    ours, others = Work(1000), Work(1000)
    for key, work in (("p/v", ours), ("p/w", ours), ("pp/v", others)):
        with pytest.raises(OperationPending):
            await operations.run(key, "up", work, timeout=1)
    await operations.cancel("p/", "up", timeout=5)
    assert (ours.cancelled, others.cancelled) == (2, 0)
    assert await operations.run("p/v", "down", Work(), timeout=0.1) == 1


async def test_pending_operations_cancel_ignored_raises_operation_pending(
    operations: PendingOperations,
) -> None:
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


async def test_pending_operations_cancelled_before_start_raises_operation_pending(
    operations: PendingOperations,
) -> None:
    work = Work(5)
    asker = asyncio.ensure_future(operations.run("p/v", "up", work, timeout=60))
    await asyncio.sleep(0)
    await operations.cancel("p/", "up", timeout=5)
    with pytest.raises(OperationPending, match="given up"):
        await asker
    assert await operations.run("p/v", "down", Work(), timeout=1) == 1


async def test_pending_operations_unexpected_exception_raised_to_caller_only(
    operations: PendingOperations,
) -> None:
    with pytest.raises(ZeroDivisionError):
        await operations.run("p/v", "up", Work(error=ZeroDivisionError()), timeout=1)
    assert await operations.run("p/w", "up", Work(), timeout=1) == 1


async def test_locks_same_name_serialized_and_unused_removed() -> None:
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
