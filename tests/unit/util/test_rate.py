import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.util.rate_limiter import TokenBucket


@pytest.mark.looptime
async def test_token_bucket_after_burst_waits_at_rate() -> None:
    loop = asyncio.get_running_loop()
    bucket = TokenBucket(2, 3)
    begin = loop.time()
    times = []

    async def ask() -> None:
        await bucket.wait()
        times.append(loop.time() - begin)

    await asyncio.gather(*(ask() for _ in range(6)))
    assert times == [0, 0, 0, 0.5, 1.0, 1.5]
    await asyncio.sleep(100)
    begin, times = loop.time(), []
    await asyncio.gather(*(ask() for _ in range(4)))
    assert times == [0, 0, 0, 0.5]


@pytest.mark.looptime
async def test_token_bucket_wait_cancelled_releases_token() -> None:
    bucket = TokenBucket(1, 1)
    assert await bucket.wait() == 0
    task = asyncio.ensure_future(bucket.wait())
    await asyncio.sleep(0.25)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await bucket.wait() == 0.75


async def test_token_bucket_negative_qps_never_waits() -> None:
    bucket = TokenBucket(-1, 0)
    for _ in range(1000):
        assert await bucket.wait() == 0
    assert bucket.try_acquire(0)


@given(
    st.floats(0.01, 100),
    st.integers(1, 50),
    st.lists(st.floats(0, 10), max_size=100),
)
def test_token_bucket_any_gaps_never_exceed_rate(qps: float, burst: int, gaps: list[float]) -> None:
    bucket, now, granted = TokenBucket(qps, burst), 0.0, 0
    for gap in gaps:
        now += gap
        granted += bucket.try_acquire(now)
        assert granted <= burst + now * qps + 1e-6
