"""One call for many askers, cancellation included."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.util.singleflight import ScopeClosed, Singleflight
from pykubelet.util.tasks import TaskScope


class Work:
    """Calls that end when they are told to, and how many there were at once."""

    def __init__(self) -> None:
        self.begun = 0
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.may_end = asyncio.Event()
        self.fails = False

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.fails:
            raise OSError(f"call {number}")
        return number


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as tasks:
        yield tasks


@pytest.fixture
def calls(scope: TaskScope) -> Singleflight[str, int]:
    return Singleflight(scope, "test")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_singleflight_concurrent_calls_share_result(calls: Singleflight[str, int], work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        askers = [group.create_task(calls.run("a", work)) for _ in range(40)]
        other = group.create_task(calls.run("b", work))
        await settle()
        work.may_end.set()
    assert {task.result() for task in askers} == {1}
    assert other.result() == 2
    assert work.begun == 2
    assert await calls.run("a", work) == 3, "an answer is not kept"


async def test_singleflight_failure_raised_to_all_callers(calls: Singleflight[str, int], work: Work) -> None:
    work.fails = True
    work.may_end.set()
    failures = await asyncio.gather(*(calls.run("a", work) for _ in range(3)), return_exceptions=True)
    assert [str(failure) for failure in failures] == ["call 1"] * 3
    work.fails = False
    assert await calls.run("a", work) == 2


async def test_singleflight_fresh_callers_share_second_call(
    calls: Singleflight[str, int], work: Work
) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(calls.run("a", work, fresh=True))
        await settle()
        fresh = [group.create_task(calls.run("a", work, fresh=True)) for _ in range(10)]
        await settle()
        assert (work.begun, work.running) == (1, 1), "the second one waits for the first"
        work.may_end.set()
    assert first.result() == 1
    assert {task.result() for task in fresh} == {2}
    assert work.most == 1


async def test_singleflight_first_caller_cancelled_call_continues(
    calls: Singleflight[str, int], work: Work
) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(calls.run("a", work))
        second = group.create_task(calls.run("a", work))
        await settle()
        first.cancel()
        await settle()
        assert work.running == 1
        work.may_end.set()
    assert first.cancelled()
    assert second.result() == 1
    assert work.cancelled == 0


async def test_singleflight_all_callers_cancelled_cancels_call(
    calls: Singleflight[str, int], work: Work
) -> None:
    async with asyncio.TaskGroup() as group:
        askers = [group.create_task(calls.run("a", work)) for _ in range(2)]
        await settle()
        for asker in askers:
            asker.cancel()
        await settle()
        assert (work.running, work.cancelled) == (0, 1)
        later = group.create_task(calls.run("a", work))
        await settle()
        work.may_end.set()
    assert later.result() == 2


async def test_singleflight_queued_fresh_call_cancelled_is_dropped(
    calls: Singleflight[str, int], work: Work
) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(calls.run("a", work))
        await settle()
        fresh = group.create_task(calls.run("a", work, fresh=True))
        await settle()
        fresh.cancel()
        await settle()
        joined = group.create_task(calls.run("a", work))
        await settle()
        assert work.begun == 1
        work.may_end.set()
    assert first.result() == joined.result() == 1


async def test_singleflight_scope_closed_raises_scope_closed(work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        async with TaskScope() as scope:
            calls: Singleflight[str, int] = Singleflight(scope, "test")
            waiting = group.create_task(_outcome(calls, work))
            await settle()
        assert isinstance(await waiting, ScopeClosed)
        assert isinstance(await _outcome(calls, work), ScopeClosed), "and later ones as well"
    assert work.running == 0


async def _outcome(calls: Singleflight[str, int], work: Work) -> int | Exception:
    try:
        return await calls.run("a", work)
    except ScopeClosed as err:
        return err


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["ask", "fresh", "cancel", "end"]), st.integers(0, 9)), max_size=30)
)
def test_singleflight_any_steps_never_overlap_and_all_callers_complete(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        work = Work()
        async with TaskScope() as scope:
            calls: Singleflight[str, int] = Singleflight(scope, "test")
            async with asyncio.TaskGroup() as group:
                askers: list[asyncio.Task[int]] = []
                for step, number in steps:
                    if step in ("ask", "fresh"):
                        asker = group.create_task(calls.run("a", work, fresh=step == "fresh"))
                        askers.append(asker)
                    elif step == "cancel" and askers:
                        askers[number % len(askers)].cancel()
                    elif step == "end":
                        work.may_end.set()
                        await settle()
                        work.may_end.clear()
                    await settle()
                    # A cancelled call ends at once here, so not even those overlap.
                    assert work.running <= 1
                work.may_end.set()
            assert all(asker.done() for asker in askers)
            await settle()
            assert (work.running, work.most <= 1) == (0, True)
            assert await calls.run("a", work) == work.begun, "nothing is left behind"

    asyncio.run(play())
