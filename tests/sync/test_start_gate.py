import asyncio

import pytest

from pykubelet.sync.start_gate import StartGate


async def test_no_more_than_the_limit_at_once_and_the_oldest_first() -> None:
    gate, inside, most, order = StartGate(2), 0, 0, []

    async def pod(number: int) -> None:
        nonlocal inside, most
        for part in ("sandbox", "containers"):
            async with gate.turn(number):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                order.append((number, part))
                inside -= 1

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(pod(number))
    assert most == 2
    done = [number for number, part in order if part == "containers"]
    assert done == sorted(done)
    assert order.index((1, "containers")) < order.index((4, "sandbox"))


async def test_a_cancelled_waiter_leaves_no_hole() -> None:
    gate = StartGate(1)
    async with gate.turn(0):
        waiting = asyncio.ensure_future(_take(gate, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(1), gate.turn(2):
        pass


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:
    gate = StartGate(1)
    async with gate.turn(0):
        first = asyncio.ensure_future(_take(gate, 1))
        second = asyncio.ensure_future(_take(gate, 2))
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    async with asyncio.timeout(1):
        await second


async def test_a_failing_turn_is_given_back() -> None:
    gate = StartGate(1)
    with pytest.raises(ValueError):
        async with gate.turn(0):
            raise ValueError
    async with asyncio.timeout(1), gate.turn(0):
        pass


async def _take(gate: StartGate, order: int) -> None:
    async with gate.turn(order):
        await asyncio.sleep(0)
