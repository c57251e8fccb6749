"""Adaptive limit on concurrent requests: few while the API server is quick, more while it is slow."""

from __future__ import annotations

import asyncio

import pytest

from pykubelet.apiserver.connection_pool import ConcurrencyLimiter
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime


class _Server:
    """Takes its time for each request, and counts how many are there at once."""

    def __init__(self, turns: ConcurrencyLimiter, seconds: float) -> None:
        self._turns = turns
        self.seconds = seconds
        self.now = self.most = 0
        self.order: list[int] = []

    async def ask(self, number: int = 0) -> None:
        async with self._turns:
            self.order.append(number)
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.now -= 1

    async def ask_many(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self.ask(number))


async def test_concurrency_limiter_fast_server_uses_one_slot() -> None:
    server = _Server(ConcurrencyLimiter(12), 0.004)
    await server.ask_many(40)
    assert server.most == 1
    assert server.order == list(range(40))


async def test_concurrency_limiter_slow_server_grows_to_limit() -> None:
    loop = asyncio.get_running_loop()
    server = _Server(ConcurrencyLimiter(12), 0.2)
    began = loop.time()
    await server.ask_many(120)
    assert server.most == 12
    assert loop.time() - began < 2.4, "ten rounds of twelve, and a moment to get there"


async def test_concurrency_limiter_stuck_requests_do_not_block_others() -> None:
    loop = asyncio.get_running_loop()
    turns = ConcurrencyLimiter(12)
    stuck, quick = _Server(turns, 60), _Server(turns, 0.01)
    async with asyncio.TaskGroup() as group:
        group.create_task(stuck.ask_many(14))
        await asyncio.sleep(0.5)
        began = loop.time()
        for _ in range(20):
            await quick.ask()
        assert loop.time() - began < 5
        assert stuck.now == 14
        group.create_task(stuck.ask_many(200))
        await asyncio.sleep(55)
        assert stuck.now < 96
    assert stuck.most <= 96


async def test_concurrency_limiter_idle_resets_limit() -> None:
    turns = ConcurrencyLimiter(12)
    server = _Server(turns, 0.2)
    await server.ask_many(40)
    server.seconds, server.most = 0.004, 0
    await server.ask_many(20)
    assert server.most == 12, "the connections are there"
    await asyncio.sleep(31)
    server.most = 0
    await server.ask_many(20)
    assert server.most == 1


async def test_concurrency_limiter_waiter_cancelled_releases_slot() -> None:
    turns = ConcurrencyLimiter(1)
    server = _Server(turns, 1.0)
    first, second, third = (asyncio.ensure_future(server.ask(number)) for number in range(3))
    await asyncio.sleep(0.5)
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert server.order == [0, 2]
    # Cancelled in the very moment in which the turn was given.
    first, second, third = (asyncio.ensure_future(server.ask(number)) for number in range(3))
    await asyncio.sleep(0.5)
    first.cancel()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    async with asyncio.timeout(5):
        await server.ask(9)
    assert server.order[-2:] == [2, 9]


async def test_concurrency_limiter_cancelled_during_handover_raises_cancelled() -> None:
    """Whoever is cancelled ends by that and nothing else, or the one who cancelled would not know it."""
    turns = ConcurrencyLimiter(1)
    async with TaskScope() as scope:
        async with turns:
            waiting = scope.start(_enter(turns), name="waiting")
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        async with turns:
            pass


async def _enter(turns: ConcurrencyLimiter) -> None:
    async with turns:
        pass
