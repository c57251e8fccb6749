"""Third-party rankings and their limits."""

import asyncio
import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pykubelet.eviction.custom_ranking import CustomRanking, EvictionCandidate, installed_ranking
from pykubelet.eviction.ranking import RankedPod, rank
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


@pytest.mark.parametrize("cancelled", [False, True])
async def test_order_during_another_call_waits_for_it(cancelled: bool) -> None:
    release, started = threading.Event(), threading.Event()

    def slow(signal: str, candidates: object) -> list[str]:
        started.set()
        release.wait(30)
        return ["c"]

    ranking = CustomRanking(slow, "mine", 30)
    report = asyncio.create_task(ranking.order("memory.available", built_in()))
    assert await asyncio.to_thread(started.wait, 30)
    if cancelled:
        report.cancel()
    round_ = asyncio.create_task(ranking.order("memory.available", built_in()))
    done, _ = await asyncio.wait((round_,), timeout=0.05)
    assert not done
    release.set()
    assert (await round_)[0].pod.metadata.name == "c"
    if cancelled:
        with pytest.raises(asyncio.CancelledError):
            await report
    else:
        assert (await report)[0].pod.metadata.name == "c"


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
