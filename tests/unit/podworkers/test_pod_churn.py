"""When many pods begin or end: for how long that counts."""

import asyncio

import pytest

from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podworkers.workers import CALM_SECONDS, MANY, TERMINATING_SECONDS, PodChurn, PodWorkers
from pykubelet.util.tasks import TaskScope
from tests.unit.podworkers.test_worker import Life, pod

pytestmark = pytest.mark.looptime


async def test_pod_churn_pods_wait_for_slot_bursts_until_calm_seconds() -> None:
    limiter = StartLimiter(2)
    churn = PodChurn(limiter)
    async with limiter.turn(1):
        async with limiter.turn(2):
            # Pods that start concurrently are no burst: statuses of a few pods are sent without delay.
            assert not churn.is_bursting()
            waiter = asyncio.create_task(limiter.take(3))
            await asyncio.sleep(0)
            assert churn.is_bursting()
        await waiter
        limiter.give_back()
    # The last of many are as much in a hurry as the first.
    await asyncio.sleep(CALM_SECONDS - 0.1)
    assert churn.is_bursting()
    await asyncio.sleep(0.2)
    assert not churn.is_bursting()


async def test_pod_churn_waiter_cancelled_does_not_burst() -> None:
    limiter = StartLimiter(1)
    churn = PodChurn(limiter)
    async with limiter.turn(1):
        waiter = asyncio.create_task(limiter.take(2))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert not churn.is_bursting()


@pytest.mark.parametrize(("count", "is_burst"), [(MANY, False), (MANY + 1, True)])
async def test_pod_churn_more_than_many_terminating_bursts_until_calm_seconds(
    count: int, is_burst: bool
) -> None:
    life = Life()
    names = [str(number) for number in range(count)]
    life.slow = {f"terminate {name}": 2.0 for name in names} | {f"clean_up {name}": 2.0 for name in names}
    async with TaskScope() as scope:
        churn = PodChurn()
        workers = PodWorkers(scope, 60, churn)
        workers.start(life)
        for name in names:
            workers.sync(pod(name, name))
        await asyncio.sleep(1)
        assert not churn.is_bursting()
        for name in names:
            workers.terminate(name)
        for _ in range(3):
            assert churn.is_bursting() is is_burst
            await asyncio.sleep(1)
        await asyncio.sleep(1.1 + CALM_SECONDS)
        assert not churn.is_bursting()


async def test_pod_churn_termination_stuck_stops_bursting_after_terminating_seconds() -> None:
    life = Life()
    names = [str(number) for number in range(MANY + 1)]
    life.slow = {f"terminate {name}": 1000.0 for name in names}
    async with TaskScope() as scope:
        churn = PodChurn()
        workers = PodWorkers(scope, 60, churn)
        workers.start(life)
        for name in names:
            workers.sync(pod(name, name))
            workers.terminate(name)
        assert churn.is_bursting()
        await asyncio.sleep(TERMINATING_SECONDS)
        assert not churn.is_bursting()
