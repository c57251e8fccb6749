"""Third-party rankings and their limits."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pykubelet.eviction.custom_ranking import CustomRanking, EvictionCandidate, installed_ranking
from pykubelet.eviction.ranking import PreviewedOrder, RankedPod, rank
from pykubelet.eviction.signals import Disks
from tests.support.eviction import pod, usage

PODS = [pod("a"), pod("b"), pod("c"), pod("critical", priority=2_000_000_000)]
USAGES = {"a": usage("3Mi"), "b": usage("2Mi"), "c": usage("1Mi"), "critical": usage("9Mi")}


def built_in() -> list[RankedPod]:
    return rank("memory.available", PODS, USAGES, Disks())


async def order(function: Any, timeout: float = 5.0) -> list[str]:
    ranked = await CustomRanking(function, "mine", timeout).order("memory.available", built_in())
    return [found.pod.metadata.name for found in ranked]


async def test_order_function_decides_and_rest_follows() -> None:
    asked: list[tuple[str, Sequence[EvictionCandidate]]] = []

    def function(signal: str, candidates: Sequence[EvictionCandidate]) -> Iterable[str]:
        asked.append((signal, candidates))
        return ["c", "unknown", "c", "a"]

    assert await order(function) == ["c", "a", "b", "critical"]
    ((signal, candidates),) = asked
    assert signal == "memory.available"
    assert [one.name for one in candidates] == ["a", "b", "c"]
    assert (candidates[0].usage, candidates[0].qos_class) == (3 << 20, "BestEffort")


def failing(signal: str, candidates: object) -> list[str]:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "function",
    [
        failing,
        lambda signal, candidates: None,
        lambda signal, candidates: [1, 2],
        lambda signal: ["c"],
    ],
    ids=["raises", "no list", "no uids", "signature"],
)
async def test_order_failing_function_uses_built_in(function: Any) -> None:
    assert await order(function) == ["a", "b", "c", "critical"]


async def test_order_endless_result_is_bounded() -> None:
    assert (await order(lambda signal, candidates: itertools.repeat("c")))[0] == "c"


async def test_order_hanging_function_times_out_and_is_not_called_again() -> None:
    release, calls = threading.Event(), itertools.count()
    ended = threading.Event()

    def hanging(signal: str, candidates: object) -> list[str]:
        next(calls)
        release.wait(30)
        ended.set()
        return ["c"]

    ranking = CustomRanking(hanging, "mine", 0.05)
    for _ in range(2):
        ranked = await ranking.order("memory.available", built_in())
        assert [found.pod.metadata.name for found in ranked] == ["a", "b", "c", "critical"]
    assert next(calls) == 1
    release.set()
    assert ended.wait(30)


class SlowRanking:
    """A ranking function whose first call returns when it is released, and later ones immediately."""

    def __init__(self) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        self.calls = itertools.count()

    def __call__(self, signal: str, candidates: object) -> list[str]:
        if next(self.calls) == 0:
            self.started.set()
            self.release.wait(30)
        return ["c"]


async def preview(ranking: CustomRanking) -> PreviewedOrder:
    return await ranking.preview("memory.available", built_in(), ranking.report_deadline())


def first(ranked: Sequence[RankedPod]) -> str:
    return ranked[0].pod.metadata.name


@pytest.mark.parametrize("cancelled", [False, True])
async def test_order_during_call_of_report_does_not_wait(cancelled: bool) -> None:
    """Verify that an eviction has the custom order immediately while a report waits for the function."""
    slow = SlowRanking()
    ranking = CustomRanking(slow, "mine", 30)
    report = asyncio.create_task(preview(ranking))
    assert await asyncio.to_thread(slow.started.wait, 30)
    if cancelled:
        report.cancel()
    async with asyncio.timeout(10):
        assert first(await ranking.order("memory.available", built_in())) == "c"
    assert not report.done()
    slow.release.set()
    if cancelled:
        with pytest.raises(asyncio.CancelledError):
            await report
    else:
        assert first((await report).ranked) == "c"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_preview_during_another_report_waits_for_it(cancelled: bool) -> None:
    slow = SlowRanking()
    ranking = CustomRanking(slow, "mine", 30)
    reports = [asyncio.create_task(preview(ranking))]
    assert await asyncio.to_thread(slow.started.wait, 30)
    if cancelled:
        reports[0].cancel()
    reports.append(asyncio.create_task(preview(ranking)))
    done, _ = await asyncio.wait(reports, timeout=0.05)
    assert not done
    slow.release.set()
    second = await reports[1]
    assert (first(second.ranked), second.problem) == ("c", "")
    await asyncio.wait(reports)
    assert reports[0].cancelled() == cancelled


async def test_preview_slow_function_bounded_per_report_with_reason() -> None:
    """Verify that one deadline holds for all signals and reports, and that the reason is reported."""
    slow = SlowRanking()
    ranking = CustomRanking(slow, "mine", 0.2)
    clock = asyncio.get_running_loop().time
    started, deadline = clock(), ranking.report_deadline()
    previews = [ranking.preview("memory.available", built_in(), deadline) for _ in range(8)]
    for found in (*await asyncio.gather(*previews[:4]), *[await one for one in previews[4:]]):
        assert first(found.ranked) == "a"
        assert found.problem == (
            'custom ranking "mine" is slow: it did not order the pods within the 0.2 s of this report'
        )
    assert clock() - started < 5
    slow.release.set()


async def test_preview_slow_for_each_signal_bounded_per_report() -> None:
    def slow(signal: str, candidates: object) -> list[str]:
        time.sleep(0.2)
        return ["c"]

    ranking = CustomRanking(slow, "mine", 1.0)
    deadline = ranking.report_deadline()
    found = [await ranking.preview("memory.available", built_in(), deadline) for _ in range(10)]
    assert (first(found[0].ranked), found[0].problem) == ("c", "")
    assert (first(found[-1].ranked), "is slow" in found[-1].problem) == ("a", True)


async def test_preview_failing_function_has_reason() -> None:
    found = await preview(CustomRanking(failing, "mine"))
    assert (first(found.ranked), found.problem) == (
        "a",
        'custom ranking "mine" failed: RuntimeError: broken',
    )


@dataclass
class Entry:
    """An entry point."""

    name: str
    loaded: Any
    value: str = "package:function"

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


async def test_installed_ranking_first_by_name_is_used() -> None:
    ranking = installed_ranking([Entry("b", failing), Entry("a", lambda signal, candidates: ["b"])])
    assert ranking is not None
    ranked = await ranking.order("memory.available", built_in())
    assert ranked[0].pod.metadata.name == "b"


@pytest.mark.parametrize("loaded", [ImportError("no module"), "not a function"])
def test_installed_ranking_broken_entry_is_ignored(loaded: Any) -> None:
    assert installed_ranking([Entry("a", loaded)]) is None
    assert installed_ranking([]) is None
