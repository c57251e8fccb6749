"""When many pods begin or end: for how long that counts."""

import asyncio

import pytest

from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podworkers.workers import CALM_SECONDS, MANY, TERMINATING_SECONDS, PodChurn, PodWorkers
from pykubelet.util.tasks import TaskScope
from tests.unit.podworkers.test_worker import Life, pod

pytestmark = pytest.mark.looptime


async def test_pod_churn_start_limiter_full_bursts_until_calm_seconds() -> None:
    limiter = StartLimiter(2)
    churn = PodChurn(limiter)
    async with limiter.turn(1):
        assert not churn.is_bursting()
        async with limiter.turn(2):
            assert churn.is_bursting()
    # The last of many are as much in a hurry as the first.
    await asyncio.sleep(CALM_SECONDS - 0.1)
    assert churn.is_bursting()
    await asyncio.sleep(0.2)
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
