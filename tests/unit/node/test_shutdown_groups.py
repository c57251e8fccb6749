"""Groups, periods and statuses of a node shutdown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.api.meta import to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition, PodStatus
from pykubelet.config.types import KubeletConfiguration, ShutdownGracePeriodByPodPriority
from pykubelet.node.shutdown_groups import (
    ShutdownPeriod,
    fit_periods,
    grace_seconds,
    group_index,
    shutdown_periods,
    terminated_status,
    total_seconds,
)
from tests.support.pods import LATER, NOW, make_pod

CRITICAL = 2_000_000_000


def pod_with(priority: int | None = None, grace: int | None = 30) -> Pod:
    pod = make_pod()
    pod.spec.priority = priority
    pod.spec.termination_grace_period_seconds = grace
    return pod


def config(total: str = "0s", critical: str = "0s", **by_priority: int) -> KubeletConfiguration:
    return KubeletConfiguration(
        shutdown_grace_period=Duration.parse(total),
        shutdown_grace_period_critical_pods=Duration.parse(critical),
        shutdown_grace_period_by_pod_priority=[
            ShutdownGracePeriodByPodPriority(priority=int(key[1:]), shutdown_grace_period_seconds=seconds)
            for key, seconds in by_priority.items()
        ],
    )


@pytest.mark.parametrize(
    ("settings", "off", "periods"),
    [
        (config(), (), []),
        (config("30s", "10s"), (), [(0, 20), (CRITICAL, 10)]),
        (config("30s"), (), [(0, 30), (CRITICAL, 0)]),
        (config("30s", "30s"), (), [(0, 0), (CRITICAL, 30)]),
        (config("2500ms", "1s"), (), [(0, 1), (CRITICAL, 1)]),
        (config("10s", "30s"), (), []),
        (config("30s", "10s"), ("GracefulNodeShutdown",), []),
        (config(p1000=5, p0=7, p10=6), (), [(0, 7), (10, 6), (1000, 5)]),
        (config(p1000=5), ("GracefulNodeShutdownBasedOnPodPriority",), []),
        (
            config("30s", "10s", p1000=5),
            ("GracefulNodeShutdownBasedOnPodPriority",),
            [(0, 20), (CRITICAL, 10)],
        ),
        (config(p1000=5), ("GracefulNodeShutdown",), []),
    ],
)
def test_shutdown_periods_follow_fields_and_gates(
    settings: KubeletConfiguration, off: tuple[str, ...], periods: list[tuple[int, int]]
) -> None:
    found = shutdown_periods(settings, lambda gate: gate not in off)
    assert [(period.priority, period.seconds) for period in found] == periods
    assert total_seconds(found) == sum(seconds for _, seconds in periods)


PERIODS = (ShutdownPeriod(10, 1), ShutdownPeriod(100, 2), ShutdownPeriod(1000, 3))


@pytest.mark.parametrize(
    ("priority", "index"),
    [(None, 0), (-5, 0), (0, 0), (10, 0), (99, 0), (100, 1), (101, 1), (999, 1), (1000, 2), (CRITICAL, 2)],
)
def test_group_index_by_priority_picks_lower_boundary(priority: int | None, index: int) -> None:
    assert group_index(PERIODS, pod_with(priority)) == index


def test_group_index_same_priority_twice_picks_first() -> None:
    assert group_index((ShutdownPeriod(0, 1), ShutdownPeriod(5, 1), ShutdownPeriod(5, 2)), pod_with(5)) == 1


@given(
    st.lists(st.integers(-100, 100), min_size=1, unique=True), st.integers(-200, 200), st.integers(-200, 200)
)
def test_group_index_any_priorities_is_monotonic(priorities: list[int], one: int, other: int) -> None:
    periods = [ShutdownPeriod(priority, 1) for priority in sorted(priorities)]
    low, high = sorted((one, other))
    first, second = group_index(periods, pod_with(low)), group_index(periods, pod_with(high))
    assert 0 <= first <= second < len(periods)
    if low >= periods[0].priority:
        assert periods[first].priority <= low
    if first + 1 < len(periods):
        assert low < periods[first + 1].priority


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.floats(0, 5000))
def test_fit_periods_any_delay_never_exceeds_it(seconds: list[int], available: float) -> None:
    periods = [ShutdownPeriod(number, period) for number, period in enumerate(seconds)]
    fitted = fit_periods(periods, available)
    assert [period.priority for period in fitted] == [period.priority for period in periods]
    assert total_seconds(fitted) <= max(available, 0)
    assert all(new.seconds <= old.seconds for new, old in zip(fitted, periods, strict=True))
    if sum(seconds) <= available:
        assert list(fitted) == periods


def test_fit_periods_shorter_delay_keeps_time_for_last_group() -> None:
    assert [period.seconds for period in fit_periods((ShutdownPeriod(0, 20), ShutdownPeriod(1, 10)), 15)] == [
        10,
        5,
    ]
    assert total_seconds(fit_periods((ShutdownPeriod(0, 20),), -1)) == 0


@pytest.mark.parametrize(
    ("own", "period", "grace"), [(30, 10, 10), (5, 10, 5), (10, 10, 10), (0, 10, 0), (None, 10, 10)]
)
def test_grace_seconds_is_own_at_most_period(own: int | None, period: int, grace: int) -> None:
    assert grace_seconds(pod_with(grace=own), period) == grace


def test_terminated_status_has_upstream_reason_message_and_condition() -> None:
    before = PodStatus(phase="Running", conditions=[PodCondition(type="Ready", status="True")])
    status = terminated_status(make_pod(), before, NOW)
    assert (status.phase, status.reason) == ("Failed", "Terminated")
    assert status.message == "Pod was terminated in response to imminent node shutdown."
    ready, target = status.conditions
    assert ready.type == "Ready"
    assert to_document(target) == {
        "type": "DisruptionTarget",
        "status": "True",
        "lastProbeTime": None,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": "TerminationByKubelet",
        "message": "Pod was terminated in response to imminent node shutdown.",
    }
    assert before.phase == "Running"
    again = terminated_status(make_pod(), status, LATER)
    assert again == status
    assert terminated_status(make_pod(), PodStatus(phase="Succeeded"), NOW).phase == "Succeeded"
