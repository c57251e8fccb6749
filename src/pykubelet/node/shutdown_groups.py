"""Decisions of the node shutdown: groups of pods by priority, their grace periods, statuses. Pure.

Pods terminate in groups, the lowest priority first, each group within its own period. Without
`shutdownGracePeriodByPodPriority` there are two groups: critical pods, and all others. Reasons and messages
are upstream's, because users and controllers match on them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodCondition, PodStatus
from pykubelet.config.types import KubeletConfiguration
from pykubelet.podconfig.static_pods import SYSTEM_CRITICAL_PRIORITY

REJECTED_REASON = "NodeShutdown"
REJECTED_MESSAGE = "Pod was rejected as the node is shutting down."
TERMINATED_REASON = "Terminated"
TERMINATED_MESSAGE = "Pod was terminated in response to imminent node shutdown."
NODE_MESSAGE = "node is shutting down"
"""Message of the Ready condition."""
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, order=True)
class ShutdownPeriod:
    """Seconds for the pods from this priority up to the next one."""

    priority: int
    seconds: int


def shutdown_periods(
    config: KubeletConfiguration, is_enabled: Callable[[str], bool]
) -> tuple[ShutdownPeriod, ...]:
    """Return the periods by ascending priority; empty if the node shutdown is not handled."""
    if not is_enabled("GracefulNodeShutdown"):
        return ()
    by_priority = config.shutdown_grace_period_by_pod_priority
    if by_priority and is_enabled("GracefulNodeShutdownBasedOnPodPriority"):
        entries = (
            ShutdownPeriod(entry.priority, entry.shutdown_grace_period_seconds) for entry in by_priority
        )
        return tuple(sorted(entries, key=lambda period: period.priority))
    total, critical = config.shutdown_grace_period, config.shutdown_grace_period_critical_pods
    if total <= 0 or critical > total:
        return ()
    return (
        ShutdownPeriod(0, int(total - critical) // _SECOND),
        ShutdownPeriod(SYSTEM_CRITICAL_PRIORITY, int(critical) // _SECOND),
    )


def total_seconds(periods: Iterable[ShutdownPeriod]) -> int:
    """Return the seconds of all periods together."""
    return sum(period.seconds for period in periods)


def fit_periods(periods: Sequence[ShutdownPeriod], available: float) -> tuple[ShutdownPeriod, ...]:
    """Return the periods, shortened in proportion if fewer seconds are available than they need.

    Without that, the pods of the last group, the most important ones, would be killed without any period.
    """
    total = total_seconds(periods)
    if total <= available:
        return tuple(periods)
    return tuple(
        ShutdownPeriod(period.priority, int(period.seconds * max(available, 0.0) / total))
        for period in periods
    )


def group_index(periods: Sequence[ShutdownPeriod], pod: Pod) -> int:
    """Return the index of a pod's group: the highest priority that is not above the pod's, else the first."""
    priority = pod.spec.priority or 0
    index = bisect.bisect_left(periods, priority, key=lambda period: period.priority)
    if index == len(periods):
        return len(periods) - 1
    return index - 1 if index > 0 and periods[index].priority > priority else index


def grace_seconds(pod: Pod, period: int) -> int:
    """Return the grace period of a pod: its own, at most the period of its group."""
    own = pod.spec.termination_grace_period_seconds
    return period if own is None else min(own, period)


def terminated_status(pod: Pod, status: PodStatus, now: datetime) -> PodStatus:
    """Return the status of a pod that the node shutdown terminates."""
    before = next((known for known in status.conditions if known.type == "DisruptionTarget"), None)
    unchanged = before is not None and before.status == "True" and before.last_transition_time is not None
    target = PodCondition(
        type="DisruptionTarget",
        status="True",
        observed_generation=pod.metadata.generation or msgspec.UNSET,
        last_transition_time=before.last_transition_time if before is not None and unchanged else now,
        reason="TerminationByKubelet",
        message=TERMINATED_MESSAGE,
    )
    return msgspec.structs.replace(
        status,
        phase=status.phase if status.phase == "Succeeded" else "Failed",
        reason=TERMINATED_REASON,
        message=TERMINATED_MESSAGE,
        conditions=[*(known for known in status.conditions if known.type != target.type), target],
    )
