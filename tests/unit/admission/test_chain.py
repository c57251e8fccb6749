"""The chain: its order, what is asked of pods that run, and links that others install."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import (
    AdmitHandlerDeps,
    AdmitRejection,
    AdmitResult,
    DeferredResult,
    PodAdmitAttributes,
    PodAdmitHandler,
    Preempt,
)
from pykubelet.admission.handler_chain import (
    MAX_CALLS,
    AdmitHandlerChain,
    ThirdPartyHandler,
    installed_handlers,
    make_chain,
)
from pykubelet.podworkers.pod_admission import AdmissionMetrics
from tests.support.admission import attempt, pod, surroundings


class Saying:
    """A link with one answer."""

    def __init__(self, answer: AdmitResult, *, for_running: bool = False) -> None:
        self.for_running = for_running
        self.asked = 0
        self._answer = answer

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
        self.asked += 1
        return self._answer


class Failing:
    for_running = False

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
        raise RuntimeError("lost")


def test_admit_handler_chain_returns_first_rejection() -> None:
    first, second = AdmitRejection("First", "one"), AdmitRejection("Second", "two")
    last = Saying(second)
    assert AdmitHandlerChain([Saying(None), Saying(first), last]).admit(attempt(pod())) == first
    assert not last.asked


def test_admit_handler_chain_preempt_then_rejection_returns_rejection() -> None:
    room = Preempt([pod("victim")], "cpu")
    refusal = AdmitRejection("No", "never")
    assert AdmitHandlerChain([Saying(room), Saying(refusal)]).admit(attempt(pod())) == refusal
    assert AdmitHandlerChain([Saying(room), Saying(None)]).admit(attempt(pod())) == room


def test_admit_handler_chain_running_pod_calls_only_for_running_handlers() -> None:
    refusal = AdmitRejection("No", "never")
    giver = Saying(None, for_running=True)
    chain = AdmitHandlerChain([Saying(refusal), giver])
    assert chain.admit(attempt(pod(), running=True)) is None
    assert giver.asked == 1
    assert chain.admit(attempt(pod())) == refusal


def test_admit_handler_chain_handler_raises_rejects_pod() -> None:
    answer = AdmitHandlerChain([Failing()]).admit(attempt(pod()))
    assert answer == AdmitRejection("UnexpectedAdmissionError", "Failing failed: lost")


class Waiting:
    """A link that answers only after a while."""

    for_running = True

    def __init__(self, answer: AdmitResult, err: Exception | None = None) -> None:
        self.waited = 0
        self._answer = answer
        self._err = err

    def admit(self, attempt: PodAdmitAttributes) -> DeferredResult:
        return DeferredResult(self._wait)

    async def _wait(self) -> AdmitResult:
        self.waited += 1
        await asyncio.sleep(0)
        if self._err is not None:
            raise self._err
        return self._answer


async def test_admit_handler_chain_deferred_handlers_awaited_in_order() -> None:
    first, second, last = Waiting(None), Waiting(None), Saying(AdmitRejection("Last", "told last"))
    answer = AdmitHandlerChain([Saying(None), first, second, last]).admit(attempt(pod()))
    assert isinstance(answer, DeferredResult)
    # Nothing was given out, and nobody behind was asked.
    assert (first.waited, second.waited, last.asked) == (0, 0, 0)
    assert await answer.result() == AdmitRejection("Last", "told last")
    assert (first.waited, second.waited, last.asked) == (1, 1, 1)


async def test_admit_handler_chain_deferred_rejection_or_error_rejects_pod() -> None:
    room, behind = Preempt([pod("victim")], "cpu"), Waiting(None)
    for link, expected in (
        (Waiting(None), room),
        (Waiting(AdmitRejection("Busy", "all taken")), AdmitRejection("Busy", "all taken")),
        (
            Waiting(None, RuntimeError("lost")),
            AdmitRejection("UnexpectedAdmissionError", "Waiting failed: lost"),
        ),
    ):
        answer = AdmitHandlerChain([Saying(room), link, behind]).admit(attempt(pod()))
        assert isinstance(answer, DeferredResult)
        assert await answer.result() == expected
    assert behind.waited == 1


def test_admit_handler_chain_rejected_before_deferred_handler_not_deferred() -> None:
    refusal = AdmitRejection("No", "never")
    assert AdmitHandlerChain([Saying(refusal), Waiting(None)]).admit(attempt(pod())) == refusal


def test_make_chain_handler_order() -> None:
    pressure, allocation, shutdown = (Saying(None) for _ in range(3))
    chain = make_chain(surroundings(pressure=pressure, allocation=allocation, shutdown=shutdown))
    names = [type(link).__name__ for link in chain.handlers]
    assert names == [
        "Saying",
        "Sysctls",
        "Saying",
        "OperatingSystem",
        "SupplementalGroups",
        "Predicates",
        "AppArmor",
        "PodLevelResources",
        "DeclaredFeatures",
        "Saying",
    ]
    assert (chain.handlers[0], chain.handlers[2], chain.handlers[-1]) == (pressure, allocation, shutdown)
    assert chain.admit(attempt(pod())) is None
    assert [one.asked for one in (pressure, allocation, shutdown)] == [1, 1, 1]


@dataclass
class Entry:
    name: str
    made: Callable[[AdmitHandlerDeps], PodAdmitHandler]
    value: str = "their.module:Link"

    def load(self) -> Callable[[AdmitHandlerDeps], PodAdmitHandler]:
        return self.made


def test_installed_handlers_sorted_by_entry_point_name() -> None:
    first, second = Saying(None), Saying(None)
    entries = [Entry("b", lambda _: second), Entry("a", lambda _: first)]
    handlers = installed_handlers(surroundings(), entries)
    assert [found.handler for found in handlers if isinstance(found, ThirdPartyHandler)] == [first, second]


def broken(_: AdmitHandlerDeps) -> PodAdmitHandler:
    raise OSError("no such socket")


@pytest.mark.parametrize(
    ("made", "problem"),
    [(broken, "no such socket"), (lambda _: object(), "is no link: it has no for_running and no admit")],
)
def test_installed_handlers_unusable_entry_point_rejects_new_pods_only(
    made: Callable[[AdmitHandlerDeps], PodAdmitHandler], problem: str
) -> None:
    chain = AdmitHandlerChain(installed_handlers(surroundings(), [Entry("mine", made)]))
    refusal = chain.admit(attempt(pod()))
    assert isinstance(refusal, AdmitRejection)
    assert refusal.reason == "UnexpectedAdmissionError"
    assert refusal.message.startswith("the admission link mine (their.module:Link) cannot be used: ")
    assert problem in refusal.message
    # What runs stays.
    assert chain.admit(attempt(pod(), running=True)) is None


async def test_make_chain_entry_point_handler_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "never-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: never\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pykubelet.admission]\nnever = never_link:Never\n")
    (tmp_path / "never_link.py").write_text(
        "from pykubelet.admission.handler import AdmitRejection\n"
        "class Never:\n"
        "    for_running = False\n"
        "    def __init__(self, given): ...\n"
        "    def admit(self, attempt): return AdmitRejection('Never', attempt.pod.full_name)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert await decide(make_chain(surroundings())) == AdmitRejection("Never", "ns/web")


async def decide(chain: AdmitHandlerChain) -> AdmitResult:
    result = chain.admit(attempt(pod()))
    return await result.result() if isinstance(result, DeferredResult) else result


class Calling:
    """A handler that calls a function."""

    for_running = False

    def __init__(self, function: Callable[[PodAdmitAttributes], Any]) -> None:
        self.admit = function


def leaving(_: object) -> Any:
    raise SystemExit(3)


async def never() -> AdmitResult:
    await asyncio.Event().wait()
    return None


async def leaving_later() -> AdmitResult:
    raise SystemExit(3)


async def cancelled() -> AdmitResult:
    raise asyncio.CancelledError


async def ready() -> AdmitResult:
    return None


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (leaving, "SystemExit: 3"),
        (lambda _: True, "TypeError: it must return an AdmitRejection"),
        (lambda _: AdmitRejection("No", 5), "TypeError: it must return an AdmitRejection"),  # type: ignore[arg-type]
        (lambda _: Preempt(["web"], "cpu"), "TypeError: it must return an AdmitRejection"),  # type: ignore[list-item]
        (lambda _: DeferredResult(never), "it did not decide within 0.05 s"),
        (lambda _: DeferredResult(ready, again=True), "it did not decide within 0.05 s"),
        (lambda _: DeferredResult(leaving_later), "SystemExit: 3"),
        (lambda _: DeferredResult(cancelled), "CancelledError: "),
    ],
    ids=["exit", "bool", "message", "victims", "waits", "repeats", "exits later", "cancelled"],
)
async def test_third_party_handler_broken_rejects_pod(function: Any, problem: str) -> None:
    handler = ThirdPartyHandler(Calling(function), "mine", timeout=30, wait_timeout=0.05)
    async with asyncio.timeout(30):
        found = await decide(AdmitHandlerChain([handler]))
    assert isinstance(found, AdmitRejection)
    assert found.reason == "UnexpectedAdmissionError"
    assert found.message.startswith(f"mine failed: {problem}")


async def test_third_party_handler_hanging_rejects_pods_and_its_calls_are_limited() -> None:
    release = threading.Event()
    calls: list[object] = []

    def hang(_: PodAdmitAttributes) -> None:
        calls.append(_)
        release.wait()

    chain = AdmitHandlerChain([ThirdPartyHandler(Calling(hang), "mine", timeout=0.01)])
    try:
        found = [await decide(chain) for _ in range(MAX_CALLS + 1)]
    finally:
        release.set()
    assert (
        found[:-1]
        == [AdmitRejection("UnexpectedAdmissionError", "mine failed: it did not return within 0.01 s")]
        * MAX_CALLS
    )
    assert isinstance(found[-1], AdmitRejection)
    assert "4 calls have not returned" in found[-1].message
    assert len(calls) == MAX_CALLS


async def test_third_party_handler_long_message_is_cut() -> None:
    handler = ThirdPartyHandler(Saying(AdmitRejection("R" * 10_000, "m" * 100_000)), "mine")
    assert await decide(AdmitHandlerChain([handler])) == AdmitRejection("R" * 128, "m" * 1000)


async def test_third_party_handler_lazy_attributes_are_read_in_event_loop() -> None:
    threads = []

    def devices() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    handler = ThirdPartyHandler(Calling(lambda attempt: attempt.devices() or None), "mine")
    result = handler.admit(replace(attempt(pod()), devices=devices))
    assert await result.result() is None
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("OutOfcpu", "OutOfcpu"),
        ("OutOfexample.com/dongle", "OutOfExtendedResources"),
        ("SysctlForbidden", "SysctlForbidden"),
        ("NodeAffinity", "Other"),
        ("Anything", "Other"),
    ],
)
def test_admission_metrics_rejections_and_preemptions_labelled(reason: str, label: str) -> None:
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    metrics.rejected(reason)
    metrics.preempted("cpu")
    assert registry.get_sample_value("kubelet_admission_rejections_total", {"reason": label}) == 1
    assert registry.get_sample_value("kubelet_preemptions", {"preemption_signal": "cpu"}) == 1
