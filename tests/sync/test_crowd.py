"""When many pods begin or end: for how long that counts."""

import asyncio

import pytest

from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podworkers.workers import CALM_SECONDS, MANY, PATIENCE_SECONDS, PodChurn, PodWorkers
from pykubelet.util.tasks import TaskScope
from tests.sync.test_worker import Life, pod

pytestmark = pytest.mark.looptime


async def test_many_that_start() -> None:
    async with TaskScope() as scope:
        gate = StartLimiter(2)
        crowd = PodChurn(gate, PodWorkers(Life(), scope, 60))
        async with gate.turn(1):
            assert not crowd.is_there()
            async with gate.turn(2):
                assert crowd.is_there()
        # The last of many are as much in a hurry as the first.
        await asyncio.sleep(CALM_SECONDS - 0.1)
        assert crowd.is_there()
        await asyncio.sleep(0.2)
        assert not crowd.is_there()


@pytest.mark.parametrize(("count", "is_crowd"), [(MANY, False), (MANY + 1, True)])
async def test_many_that_end(count: int, is_crowd: bool) -> None:
    life = Life()
    names = [str(number) for number in range(count)]
    life.slow = {f"terminate {name}": 2.0 for name in names} | {f"clean_up {name}": 2.0 for name in names}
    async with TaskScope() as scope:
        workers = PodWorkers(life, scope, 60)
        crowd = PodChurn(StartLimiter(), workers)
        for name in names:
            workers.sync(pod(name, name))
        await asyncio.sleep(1)
        assert not crowd.is_there()
        for name in names:
            workers.terminate(name)
        for _ in range(3):
            assert crowd.is_there() is is_crowd
            await asyncio.sleep(1)
        await asyncio.sleep(1.1 + CALM_SECONDS)
        assert not crowd.is_there()


async def test_pods_that_will_not_end_are_not_waited_for() -> None:
    life = Life()
    names = [str(number) for number in range(MANY + 1)]
    life.slow = {f"terminate {name}": 1000.0 for name in names}
    async with TaskScope() as scope:
        workers = PodWorkers(life, scope, 60)
        crowd = PodChurn(StartLimiter(), workers)
        for name in names:
            workers.sync(pod(name, name))
            workers.terminate(name)
        assert crowd.is_there()
        await asyncio.sleep(PATIENCE_SECONDS)
        assert not crowd.is_there()
