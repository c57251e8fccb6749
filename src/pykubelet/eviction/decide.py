"""One round of the eviction manager as a pure function: which thresholds are met, and which one to act on.

A soft threshold acts when it has been met in every round of its grace period. A threshold that has acted
stays met until its minimum reclaim is available as well. A node condition stays True for the transition
period after the last round in which a threshold was met, so that a node at the limit does not oscillate.

A threshold whose sample is the same as in the previous round does not act again: the effect of the last
eviction is not part of it yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pykubelet.eviction.observations import Observations
from pykubelet.eviction.signals import (
    EPHEMERAL_STORAGE,
    INODES,
    MEMORY,
    Disks,
    NodeConditionType,
    Threshold,
    is_disk_signal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionState:
    """State between two rounds; times are those of the caller's monotonic clock, in seconds."""

    first_met: Mapping[Threshold, float] = field(default_factory=lambda: MappingProxyType({}))
    """Thresholds that are met, with the time since when."""
    acting: tuple[Threshold, ...] = ()
    """Met thresholds whose grace period has elapsed, the most urgent first."""
    conditions: Mapping[NodeConditionType, float] = field(default_factory=lambda: MappingProxyType({}))
    """Node conditions, with the time at which each was last observed."""
    observations: Observations = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a round."""

    state: EvictionState
    conditions: tuple[NodeConditionType, ...]
    """Node conditions that are True."""
    to_act: tuple[Threshold, ...]
    """Thresholds to act on now, the most urgent first."""


def decide(
    state: EvictionState,
    thresholds: Sequence[Threshold],
    observations: Observations,
    now: float,
    transition_period: float,
) -> Decision:
    """Return the decision of a round at the monotonic time `now`; the transition period is in seconds."""
    met = thresholds_met(thresholds, observations)
    met += [
        threshold
        for threshold in thresholds_met(state.acting, observations, with_reclaim=True)
        if threshold not in met
    ]
    first_met = {threshold: state.first_met.get(threshold, now) for threshold in met}
    observed = {**state.conditions, **{threshold.condition: now for threshold in met}}
    conditions = {
        condition: at for condition, at in observed.items() if at == now or now - at < transition_period
    }
    acting = tuple(
        sorted(
            (threshold for threshold, since in first_met.items() if now - since >= threshold.grace_period),
            key=_urgency,
        )
    )
    return Decision(
        EvictionState(first_met=first_met, acting=acting, conditions=conditions, observations=observations),
        tuple(sorted(conditions, key=_CONDITION_ORDER.index)),
        tuple(
            threshold for threshold in acting if _is_new_sample(threshold, observations, state.observations)
        ),
    )


def thresholds_met(
    thresholds: Iterable[Threshold], observations: Observations, *, with_reclaim: bool = False
) -> list[Threshold]:
    """Return the thresholds that are met; those without an observation are not."""
    found = []
    for threshold in thresholds:
        observed = observations.get(threshold.signal)
        if observed is not None and observed.available < threshold.amount(
            observed.capacity, with_reclaim=with_reclaim
        ):
            found.append(threshold)
    return found


_CONDITION_ORDER: Sequence[NodeConditionType] = ("MemoryPressure", "DiskPressure", "PIDPressure")


def _urgency(threshold: Threshold) -> tuple[bool, bool]:
    """Sort key: memory first, as upstream; of one resource, hard thresholds first."""
    return threshold.resource != MEMORY, not threshold.is_hard


def _is_new_sample(threshold: Threshold, observations: Observations, previous: Observations) -> bool:
    observed, before = observations.get(threshold.signal), previous.get(threshold.signal)
    # Not "later than": the clock may have been set back.
    return observed is not None and (before is None or observed.time != before.time)


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """What to remove from the node before a pod is evicted."""

    containers: bool = False
    """Dead containers, with their writable layers and logs."""
    images: bool = False
    """Images that no container uses."""


def reclaim_plan(threshold: Threshold, disks: Disks) -> ReclaimPlan:
    """Return what frees space on the disk of a threshold.

    Logs of dead containers are on nodefs, and their writable layers on containerfs, and they keep images in
    use: removing them helps on every disk. Upstream reclaims nothing for nodefs with a dedicated imagefs.
    """
    if threshold.resource not in (EPHEMERAL_STORAGE, INODES):
        return ReclaimPlan()
    if not disks.dedicated_imagefs:
        return ReclaimPlan(containers=True, images=True)
    is_images_disk = threshold.signal.startswith("imagefs.") or (
        threshold.signal.startswith("containerfs.") and not disks.split
    )
    return ReclaimPlan(containers=True, images=is_images_disk)


@dataclass(frozen=True, slots=True)
class Release:
    """Expected effect of an eviction on a disk."""

    signal: str
    available: int
    """Amount of the signal when the files of the pod are deleted."""
    deadline: float
    """Time of the caller's monotonic clock until which the next eviction waits for that."""


def expected_release(
    threshold: Threshold, usage: int | None, observations: Observations, deadline: float
) -> Release | None:
    """Return what the eviction of a pod with this usage releases; None if nothing is released later."""
    observed = observations.get(threshold.signal)
    if observed is None or not usage or not is_disk_signal(threshold.signal):
        return None
    # Not all of it: other pods continue to write.
    return Release(threshold.signal, observed.available + usage * 9 // 10, deadline)


def is_released(release: Release, threshold: Threshold, observations: Observations) -> bool:
    """Return whether the files are deleted, or the threshold is not met without that."""
    observed = observations.get(threshold.signal)
    if observed is None or observed.available >= release.available:
        return True
    return not thresholds_met([threshold], observations, with_reclaim=True)
