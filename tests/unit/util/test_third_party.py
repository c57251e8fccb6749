"""Calls of third-party functions and their limits."""

import asyncio
import threading

import pytest

from pykubelet.util.third_party import BoundedFunction, TooManyCalls


async def test_call_returns_result_of_other_thread() -> None:
    function = BoundedFunction(lambda number: (number, threading.current_thread().name), "mine", 1)
    assert await function.call(30, 5) == (5, "mine")
    assert function.running == 0


async def test_call_raising_function_passes_exception() -> None:
    def fail() -> None:
        raise LookupError("broken")

    function = BoundedFunction(fail, "mine", 1)
    with pytest.raises(LookupError, match="broken"):
        await function.call(30)
    assert function.running == 0


async def test_call_function_raising_timeout_error_is_not_own_timeout() -> None:
    def fail() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(RuntimeError, match="of a socket"):
        await BoundedFunction(fail, "mine", 1).call(30)


async def test_call_hanging_function_times_out_and_counts_until_it_returns() -> None:
    release = threading.Event()
    function = BoundedFunction(release.wait, "mine", 2)
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await function.call(0.01)
        assert function.running == 2
        with pytest.raises(TooManyCalls, match="mine: 2 calls have not returned"):
            await function.call(30)
    finally:
        release.set()
    async with asyncio.timeout(30):
        while function.running:
            await asyncio.sleep(0.001)
    assert await function.call(30)


async def test_call_blocked_function_leaves_event_loop_free() -> None:
    release = threading.Event()
    function = BoundedFunction(release.wait, "mine", 1)
    call = asyncio.ensure_future(function.call(30))
    await asyncio.sleep(0)
    release.set()  # runs only if the loop is free
    assert await call
