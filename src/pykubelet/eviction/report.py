"""State of the eviction signals for `pykubelet pressure`: distance to each threshold, first victims. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pykubelet.eviction.decide import EvictionState, thresholds_met
from pykubelet.eviction.observations import Observations
from pykubelet.eviction.ranking import PreviewedOrder, RankedPod
from pykubelet.eviction.signals import SIGNAL_RESOURCES, Threshold


class ThresholdReport(msgspec.Struct, kw_only=True, rename="camel"):
    """A threshold and how far the node is from it; amounts are bytes or counts."""

    kind: str
    """hard or soft."""
    value: int | None = None
    """Amount below which it is met; None while the capacity is unknown."""
    distance: int | None = None
    """Amount that may still be used before it is met; negative when it is met."""
    grace_period_seconds: float = 0.0
    min_reclaim: int = 0
    is_met: bool = False
    met_for_seconds: float | None = None
    """Time for which it has been met in every round."""


class VictimReport(msgspec.Struct, kw_only=True, rename="camel"):
    """A pod that would be evicted."""

    namespace: str
    name: str
    uid: str
    reason: str


class SignalReport(msgspec.Struct, kw_only=True, rename="camel"):
    """A signal with its thresholds."""

    signal: str
    resource: str
    available: int | None = None
    """None if it could not be measured."""
    capacity: int | None = None
    age_seconds: float | None = None
    thresholds: list[ThresholdReport] = []
    first_victim: VictimReport | None = None
    """Pod that would be evicted first; None if no pod may be evicted."""
    ranking_problem: str = ""
    """Reason why that pod is first by the built-in order and not by the custom ranking; empty otherwise."""


class PressureReport(msgspec.Struct, kw_only=True, rename="camel"):
    """Response of the control socket."""

    conditions: list[str] = []
    """Node conditions that are True."""
    signals: list[SignalReport] = []


def build_report(
    thresholds: Sequence[Threshold],
    observations: Observations,
    state: EvictionState,
    conditions: Sequence[str],
    orders: Mapping[str, PreviewedOrder],
    *,
    now: float,
    wall: float,
) -> PressureReport:
    """Return the report; `now` is the clock of `state`, `wall` seconds since the epoch."""
    by_signal: dict[str, list[Threshold]] = {}
    for threshold in thresholds:
        by_signal.setdefault(threshold.signal, []).append(threshold)
    reports = []
    for signal, own in by_signal.items():
        observed = observations.get(signal)
        report = SignalReport(
            signal=signal,
            resource=SIGNAL_RESOURCES[signal],
            thresholds=[_threshold(threshold, observations, state, now) for threshold in own],
        )
        if (order := orders.get(signal)) is not None:
            report.first_victim, report.ranking_problem = _victim(order.ranked), order.problem
        if observed is not None:
            report.available, report.capacity = observed.available, observed.capacity
            report.age_seconds = round(max(0.0, wall - observed.time), 3)
        reports.append(report)
    return PressureReport(conditions=list(conditions), signals=reports)


def _threshold(
    threshold: Threshold, observations: Observations, state: EvictionState, now: float
) -> ThresholdReport:
    report = ThresholdReport(
        kind="hard" if threshold.is_hard else "soft", grace_period_seconds=threshold.grace_period
    )
    observed = observations.get(threshold.signal)
    if observed is not None:
        report.value = threshold.amount(observed.capacity)
        report.min_reclaim = threshold.amount(observed.capacity, with_reclaim=True) - report.value
        report.distance = observed.available - report.value
        report.is_met = bool(thresholds_met([threshold], observations))
    if (since := state.first_met.get(threshold)) is not None:
        report.met_for_seconds = round(now - since, 3)
    return report


def _victim(ranked: Sequence[RankedPod]) -> VictimReport | None:
    for found in ranked:
        if found.is_evictable:
            metadata = found.pod.metadata
            return VictimReport(
                namespace=metadata.namespace, name=metadata.name, uid=metadata.uid, reason=found.explain()
            )
    return None
