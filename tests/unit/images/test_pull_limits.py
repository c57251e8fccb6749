"""How many pulls at once, and how often."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.images.puller import PullLimits, PullRateExceeded
from pykubelet.util.rate_limiter import TokenBucket


def test_token_bucket_refills_at_rate_up_to_burst() -> None:
    bucket = TokenBucket(qps=2, burst=3)
    assert [bucket.try_acquire(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.try_acquire(100.4)
    assert bucket.try_acquire(100.5)
    assert not bucket.try_acquire(100.5)
    assert [bucket.try_acquire(1000.0) for _ in range(4)] == [True, True, True, False]


def test_token_bucket_zero_burst_returns_false() -> None:
    bucket = TokenBucket(qps=5, burst=0)
    assert not any(bucket.try_acquire(float(second)) for second in range(10))


@given(
    rate=st.floats(0.1, 20),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_token_bucket_never_exceeds_rate_and_burst(rate: float, burst: int, pauses: list[float]) -> None:
    bucket, now, taken = TokenBucket(rate, burst), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.try_acquire(now)
        assert taken <= burst + rate * now + 1e-6


async def most_at_once(limits: PullLimits, count: int) -> int:
    running = most = 0

    async def pull() -> None:
        nonlocal running, most
        async with limits.slot():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(pull())
    return most


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("serialize", "max_parallel", "expected"),
    [(True, None, 1), (True, 5, 1), (False, 3, 3), (False, 1, 1), (False, None, 8), (False, 0, 8)],
)
async def test_pull_limits_bounds_parallel_pulls(
    serialize: bool, max_parallel: int | None, expected: int
) -> None:
    limits = PullLimits(serialize=serialize, max_parallel=max_parallel, qps=0)
    assert await most_at_once(limits, 8) == expected


@pytest.mark.looptime
async def test_pull_limits_rate_checked_when_slot_acquired() -> None:
    limits = PullLimits(serialize=True, qps=1, burst=2)

    async def pull(seconds: float) -> None:
        async with limits.slot():
            await asyncio.sleep(seconds)

    # Five seconds each: by the time of the third there is a token again.
    await asyncio.gather(*(pull(5) for _ in range(4)))
    await asyncio.gather(pull(0), pull(0))
    with pytest.raises(PullRateExceeded, match=r"^pull QPS exceeded$"):
        await pull(0)
    await asyncio.sleep(1)
    await pull(0)


@pytest.mark.looptime
async def test_pull_limits_failed_or_cancelled_slot_is_released() -> None:
    limits = PullLimits(serialize=True, qps=0)
    with pytest.raises(OSError):
        async with limits.slot():
            raise OSError
    async with asyncio.TaskGroup() as group:
        async with limits.slot():
            waiting = group.create_task(most_at_once(limits, 1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
    assert await most_at_once(limits, 2) == 1
