import asyncio
from contextlib import AsyncExitStack

import pytest

from pykubelet.podsync.start_limiter import LONGEST_SECONDS, StartLimiter


async def test_start_limiter_admits_at_most_limit_oldest_first() -> None:
    gate, inside, most, order = StartLimiter(2), 0, 0, []

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


async def test_start_limiter_waiter_cancelled_next_turn_is_granted() -> None:
    gate = StartLimiter(1)
    async with gate.turn(0):
        waiting = asyncio.ensure_future(_take(gate, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(30), gate.turn(2):
        pass


async def test_start_limiter_waiter_cancelled_at_wakeup_turn_passes_to_next() -> None:
    gate = StartLimiter(1)
    async with gate.turn(0):
        first = asyncio.ensure_future(_take(gate, 1))
        second = asyncio.ensure_future(_take(gate, 2))
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    async with asyncio.timeout(30):
        await second


async def test_start_limiter_turn_raises_is_released() -> None:
    gate = StartLimiter(1)
    with pytest.raises(ValueError):
        async with gate.turn(0):
            raise ValueError
    async with asyncio.timeout(30), gate.turn(0):
        pass


@pytest.mark.looptime
async def test_start_limiter_turns_hang_longest_seconds_next_pod_starts() -> None:
    """Four pods on a dead server's volume would be enough to start nothing any more."""
    gate, forever = StartLimiter(2), asyncio.Event()

    async def hang(number: int) -> None:
        async with gate.turn(number) as turn:
            await forever.wait()
            await turn.while_away(asyncio.sleep(0))
            await asyncio.sleep(1)
            assert await _is_full(gate), "they have their turns again"
            await asyncio.sleep(1)

    hanging = [asyncio.ensure_future(hang(number)) for number in range(2)]
    await asyncio.sleep(0)
    assert await _is_full(gate)
    async with asyncio.timeout(LONGEST_SECONDS + 1):
        await _take(gate, 9)
    forever.set()
    await asyncio.gather(*hanging)
    await _has_turns(gate, 2)


@pytest.mark.looptime
async def test_while_away_cancelled_raises_and_turn_count_unchanged() -> None:
    gate = StartLimiter(1)

    async def away(seconds: float) -> None:
        async with gate.turn(0) as turn:
            await turn.while_away(asyncio.sleep(seconds))

    for seconds in (1000, 1):
        waiting = asyncio.ensure_future(away(seconds))
        await asyncio.sleep(0.5)
        async with gate.turn(1):
            await asyncio.sleep(2)  # by now the second one waits for its turn
            waiting.cancel()
            async with asyncio.timeout(30):
                with pytest.raises(asyncio.CancelledError):
                    await waiting
        await _has_turns(gate, 1)


@pytest.mark.looptime
@pytest.mark.parametrize("after", [0.0, 1.0, 5.0])
async def test_while_away_coroutine_fails_reacquires_turn(after: float) -> None:
    gate = StartLimiter(1)

    async def fail() -> None:
        await asyncio.sleep(2)
        raise ValueError

    async with gate.turn(0) as turn:
        with pytest.raises(ValueError):
            await turn.while_away(fail(), after=after)
        await asyncio.sleep(5)
        assert await _is_full(gate)
    await _has_turns(gate, 1)


async def _has_turns(gate: StartLimiter, number: int) -> None:
    """Check how many turns there are."""
    async with AsyncExitStack() as stack:
        for order in range(number):
            assert not await _is_full(gate)
            await stack.enter_async_context(gate.turn(order))
        assert await _is_full(gate)


async def _is_full(gate: StartLimiter) -> bool:
    """Return whether a pod younger than all others would have to wait."""
    take = asyncio.ensure_future(gate.take(1000))
    await asyncio.sleep(0)
    if take.done():
        gate.give_back()
        return False
    take.cancel()
    await asyncio.wait([take])
    return True


async def _take(gate: StartLimiter, order: int) -> None:
    async with gate.turn(order):
        await asyncio.sleep(0)
