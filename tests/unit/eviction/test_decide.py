"""Rounds of the eviction manager as pure functions."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pykubelet.eviction.decide import (
    Decision,
    EvictionState,
    ReclaimPlan,
    Release,
    decide,
    expected_release,
    is_released,
    reclaim_plan,
    thresholds_met,
)
from pykubelet.eviction.observations import MAX_SAMPLE_AGE_SECONDS, NodeMeasurements, Observation, observe
from pykubelet.eviction.signals import SIGNAL_RESOURCES, Disks, Threshold
from tests.support.eviction import GI, cgroup, disk, seen, threshold

HARD = threshold("memory.available", "1Gi", reclaim="500Mi")
SOFT = threshold("memory.available", "2Gi", grace=60)
DISK = threshold("nodefs.available", "10%")


class Rounds:
    """Consecutive rounds with a state."""

    def __init__(self, *thresholds: Threshold, transition: float = 300) -> None:
        self.thresholds = thresholds
        self.transition = transition
        self.state = EvictionState()

    def step(self, now: float, **available: str) -> Decision:
        observations = {
            name.replace("_", "."): seen(text, "4Gi" if "memory" in name else "100Gi", now)
            for name, text in available.items()
        }
        decision = decide(self.state, self.thresholds, observations, now, self.transition)
        self.state = decision.state
        return decision


def test_decide_hard_threshold_acts_immediately() -> None:
    rounds = Rounds(HARD)
    assert rounds.step(0, memory_available="1Gi").to_act == ()
    decision = rounds.step(10, memory_available="1023Mi")
    assert (decision.to_act, decision.conditions) == ((HARD,), ("MemoryPressure",))


def test_decide_minimum_reclaim_acts_until_available() -> None:
    rounds = Rounds(HARD)
    rounds.step(0, memory_available="900Mi")
    assert rounds.step(10, memory_available="1523Mi").to_act == (HARD,)
    assert rounds.step(20, memory_available="1524Mi").to_act == ()
    # Resolved: it acts again only below the threshold itself.
    assert rounds.step(30, memory_available="1200Mi").to_act == ()


def test_decide_soft_threshold_acts_after_grace_period() -> None:
    rounds = Rounds(SOFT)
    assert rounds.step(0, memory_available="1900Mi").conditions == ("MemoryPressure",)
    assert rounds.step(59, memory_available="1900Mi").to_act == ()
    assert rounds.step(60, memory_available="1900Mi").to_act == (SOFT,)


def test_decide_soft_threshold_interrupted_grace_starts_again() -> None:
    rounds = Rounds(SOFT)
    rounds.step(0, memory_available="1900Mi")
    rounds.step(50, memory_available="3Gi")
    assert rounds.step(60, memory_available="1900Mi").to_act == ()
    assert rounds.step(119, memory_available="1900Mi").to_act == ()
    assert rounds.step(120, memory_available="1900Mi").to_act == (SOFT,)


def test_decide_condition_stays_for_transition_period() -> None:
    rounds = Rounds(HARD, transition=300)
    rounds.step(0, memory_available="500Mi")
    assert rounds.step(299, memory_available="3Gi").conditions == ("MemoryPressure",)
    assert rounds.step(300, memory_available="3Gi").conditions == ()


def test_decide_transition_period_zero_reports_present_pressure() -> None:
    rounds = Rounds(HARD, transition=0)
    assert rounds.step(0, memory_available="500Mi").conditions == ("MemoryPressure",)
    assert rounds.step(1, memory_available="3Gi").conditions == ()


def test_decide_memory_before_disk_and_hard_before_soft() -> None:
    soft = threshold("memory.available", "2Gi", grace=0.5)
    rounds = Rounds(DISK, soft, HARD)
    rounds.step(0, memory_available="500Mi", nodefs_available="1Gi")
    decision = rounds.step(10, memory_available="500Mi", nodefs_available="1Gi")
    assert decision.to_act == (HARD, soft, DISK)
    assert decision.conditions == ("MemoryPressure", "DiskPressure")


def test_decide_same_sample_does_not_act_twice() -> None:
    observations = {"memory.available": seen("500Mi", "4Gi", 7.0)}
    first = decide(EvictionState(), [HARD], observations, 0, 300)
    second = decide(first.state, [HARD], observations, 10, 300)
    assert (first.to_act, second.to_act) == ((HARD,), ())
    assert second.conditions == ("MemoryPressure",)


def test_decide_clock_set_back_acts_on_new_sample() -> None:
    first = decide(EvictionState(), [HARD], {"memory.available": seen("500Mi", "4Gi", 7000.0)}, 0, 300)
    second = decide(first.state, [HARD], {"memory.available": seen("500Mi", "4Gi", 10.0)}, 10, 300)
    assert second.to_act == (HARD,)


def test_decide_signal_without_observation_is_not_met() -> None:
    rounds = Rounds(HARD, DISK)
    decision = rounds.step(0, nodefs_available="50Gi")
    assert (decision.to_act, decision.conditions) == ((), ())
    rounds.step(10, memory_available="500Mi")
    # It was met before, but now it is unknown: the condition stays, and no pod is evicted by guess.
    decision = rounds.step(20)
    assert (decision.to_act, decision.conditions) == ((), ("MemoryPressure",))


@given(
    st.lists(st.integers(0, 4 * GI), min_size=1, max_size=12),
    st.integers(1, 4 * GI),
    st.integers(0, GI),
)
def test_decide_any_samples_acts_only_while_short(amounts: list[int], limit: int, reclaim: int) -> None:
    one = threshold("memory.available", str(limit), reclaim=str(reclaim) if reclaim else "")
    state = EvictionState()
    for now, available in enumerate(amounts):
        decision = decide(
            state, [one], {"memory.available": Observation(available, 4 * GI, float(now))}, now, 300
        )
        state = decision.state
        if available < limit:
            assert decision.to_act == (one,)
        if available >= limit + reclaim:
            assert decision.to_act == ()
        if decision.to_act:
            assert "MemoryPressure" in decision.conditions


@pytest.mark.parametrize(
    ("disks", "signal", "plan"),
    [
        (Disks(), "nodefs.available", ReclaimPlan(containers=True, images=True)),
        (Disks(), "imagefs.inodesFree", ReclaimPlan(containers=True, images=True)),
        (Disks(), "containerfs.available", ReclaimPlan(containers=True, images=True)),
        (Disks(dedicated_imagefs=True), "nodefs.available", ReclaimPlan(containers=True)),
        (Disks(dedicated_imagefs=True), "nodefs.inodesFree", ReclaimPlan(containers=True)),
        (Disks(dedicated_imagefs=True), "imagefs.available", ReclaimPlan(containers=True, images=True)),
        (Disks(dedicated_imagefs=True), "containerfs.available", ReclaimPlan(containers=True, images=True)),
        (Disks(dedicated_imagefs=True, split=True), "imagefs.available", ReclaimPlan(True, True)),
        (Disks(dedicated_imagefs=True, split=True), "containerfs.available", ReclaimPlan(True)),
        (Disks(dedicated_imagefs=True, split=True), "nodefs.inodesFree", ReclaimPlan(True)),
        (Disks(), "memory.available", ReclaimPlan()),
        (Disks(), "pid.available", ReclaimPlan()),
    ],
)
def test_reclaim_plan_signal_frees_its_disk(disks: Disks, signal: str, plan: ReclaimPlan) -> None:
    assert reclaim_plan(threshold(signal, "1"), disks) == plan


def test_reclaim_plan_every_disk_signal_reclaims_something() -> None:
    for signal, resource in SIGNAL_RESOURCES.items():
        for disks in (Disks(), Disks(True), Disks(True, True)):
            plan = reclaim_plan(threshold(signal, "1"), disks)
            assert (plan != ReclaimPlan()) == (resource in ("ephemeral-storage", "inodes"))


# Observations


def test_observe_memory_with_cache_counts_active_file_as_available() -> None:
    found = observe(NodeMeasurements(root=cgroup("1Gi", "4Gi", active_file="2Gi")), cgroup("0").usage.time)  # type: ignore[union-attr]
    assert found["memory.available"].available == GI
    assert found["memory.availableWithCache"].available == 3 * GI
    assert found["memory.available"].capacity == found["memory.availableWithCache"].capacity == 4 * GI


def test_observe_old_sample_is_dropped() -> None:
    nodefs = disk("1Gi")
    node = NodeMeasurements(nodefs=nodefs)
    assert "nodefs.available" in observe(node, nodefs.time + MAX_SAMPLE_AGE_SECONDS)
    assert observe(node, nodefs.time + MAX_SAMPLE_AGE_SECONDS + 1) == {}
    # A clock that was set back does not make a sample old.
    assert "nodefs.available" in observe(node, nodefs.time - 1000)


def test_observe_unlimited_cgroup_and_missing_inodes_have_no_signal() -> None:
    pods = cgroup("1Gi")
    pods.limits = structs.replace(pods.limits, memory_limit=2**63 - 4096)
    nodefs = structs.replace(disk("1Gi"), inodes=None)
    found = observe(NodeMeasurements(pods=pods, nodefs=nodefs), nodefs.time)
    assert found.keys() == {"nodefs.available"}


@pytest.mark.parametrize(
    ("minors", "disks"),
    [
        ((0, 0, 0), Disks()),
        ((0, 1, 1), Disks(dedicated_imagefs=True)),
        ((0, 1, 0), Disks(dedicated_imagefs=True, split=True)),
        ((0, 0, 1), Disks(dedicated_imagefs=True, split=True)),
    ],
)
def test_disks_devices_are_compared(minors: tuple[int, int, int], disks: Disks) -> None:
    nodefs, imagefs, containerfs = (disk("1Gi", minor=minor) for minor in minors)
    node = NodeMeasurements(nodefs=nodefs, imagefs=imagefs, containerfs=containerfs)
    assert node.disks() == disks


@pytest.mark.parametrize("missing", ["nodefs", "imagefs", "containerfs"])
def test_disks_unmeasured_file_system_is_unknown(missing: str) -> None:
    node = NodeMeasurements(nodefs=disk("1Gi"), imagefs=disk("1Gi"), containerfs=disk("1Gi"))
    assert node.disks() is not None
    unmeasured: dict[str, Any] = {missing: None}
    assert replace(node, **unmeasured).disks() is None


def test_thresholds_met_boundary_is_below() -> None:
    assert thresholds_met([HARD], {"memory.available": seen("1Gi", "4Gi")}) == []
    assert thresholds_met([HARD], {"memory.available": Observation(GI - 1, 4 * GI, 0)}) == [HARD]


@pytest.mark.parametrize(
    ("signal", "usage", "expected"),
    [
        ("nodefs.available", 4 << 30, (5 << 30) + (4 << 30) * 9 // 10),
        ("nodefs.available", 0, None),
        ("nodefs.available", None, None),
        ("imagefs.available", 4 << 30, None),  # not measured
        ("memory.available", 4 << 30, None),
    ],
)
def test_expected_release_disk_with_usage_only(signal: str, usage: int | None, expected: int | None) -> None:
    observations = {"nodefs.available": seen("5Gi", "100Gi"), "memory.available": seen("5Gi", "100Gi")}
    release = expected_release(threshold(signal, "10Gi"), usage, observations, 7.0)
    assert (release and release.available) == expected


@pytest.mark.parametrize(
    ("available", "released"), [("5Gi", False), ("9Gi", True), ("8Gi", False), ("15Gi", True), (None, True)]
)
def test_is_released_files_deleted_or_enough_available(available: str | None, released: bool) -> None:
    own = threshold("nodefs.available", "6Gi", reclaim="6Gi")
    observations = {} if available is None else {"nodefs.available": seen(available, "100Gi")}
    release = Release("nodefs.available", 9 << 30, 7.0)
    assert is_released(release, own, observations) == released
