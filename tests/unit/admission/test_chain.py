"""The chain: its order, what is asked of pods that run, and links that others install."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
from pykubelet.admission.handler_chain import AdmitHandlerChain, installed_handlers, make_chain
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
    assert installed_handlers(surroundings(), entries) == [first, second]


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


def test_make_chain_entry_point_handler_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert make_chain(surroundings()).admit(attempt(pod())) == AdmitRejection("Never", "ns/web")


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
