"""Eviction thresholds: parsing, defaults of containerfs, contradictions."""

import pytest

from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_resources import (
    CONTAINERFS_AVAILABLE,
    CONTAINERFS_INODES_FREE,
    SIGNALS,
)
from pykubelet.eviction import signals
from pykubelet.eviction.signals import (
    Disks,
    Threshold,
    configuration_warnings,
    parse_thresholds,
    with_containerfs,
)
from tests.support.eviction import GI, MI, threshold, value


def config(**fields: object) -> KubeletConfiguration:
    return KubeletConfiguration(**{"enforce_node_allocatable": [], **fields})  # type: ignore[arg-type]


def test_parse_thresholds_hard_and_soft_have_grace_and_reclaim() -> None:
    found = parse_thresholds(
        config(
            eviction_hard={"memory.available": "150Mi", "nodefs.available": "10%"},
            eviction_soft={"memory.available": "300Mi"},
            eviction_soft_grace_period={"memory.available": "30s"},
            eviction_minimum_reclaim={"memory.available": "1Gi", "nodefs.available": "5%"},
        )
    )
    assert found == [
        threshold("memory.available", "150Mi", reclaim="1Gi"),
        threshold("nodefs.available", "10%", reclaim="5%"),
        threshold("memory.available", "300Mi", grace=30.0, reclaim="1Gi"),
    ]
    assert [one.is_hard for one in found] == [True, True, False]


def test_parse_thresholds_enforced_allocatable_copies_hard_memory() -> None:
    found = parse_thresholds(
        config(
            enforce_node_allocatable=["pods"],
            eviction_hard={
                "memory.available": "1Gi",
                "memory.availableWithCache": "2Gi",
                "pid.available": "9",
            },
            eviction_soft={"memory.available": "3Gi"},
            eviction_soft_grace_period={"memory.available": "1m"},
        )
    )
    assert [one.signal for one in found] == [
        "memory.available",
        "memory.availableWithCache",
        "pid.available",
        "memory.available",
        "allocatableMemory.available",
        "allocatableMemory.availableWithCache",
    ]
    assert found[4].value == value("1Gi")


@pytest.mark.parametrize("text", ["0%", "100%"])
def test_parse_thresholds_disabling_percentage_is_omitted(text: str) -> None:
    assert parse_thresholds(config(eviction_hard={"memory.available": text})) == []


def test_threshold_amount_percentage_is_single_precision_share() -> None:
    # As upstream: 10% in single precision of 100 GiB is 160 bytes more than a tenth.
    assert threshold("nodefs.available", "10%").amount(100 * GI) == 10737418400
    with_reclaim = threshold("nodefs.available", "1Gi", reclaim="512Mi")
    assert with_reclaim.amount(100 * GI) == GI
    assert with_reclaim.amount(100 * GI, with_reclaim=True) == GI + 512 * MI


@pytest.mark.parametrize(
    ("disks", "twin"),
    [
        (Disks(), "nodefs"),
        (Disks(dedicated_imagefs=True), "imagefs"),
        (Disks(dedicated_imagefs=True, split=True), "nodefs"),
    ],
)
def test_with_containerfs_any_disks_copies_shared_file_system(disks: Disks, twin: str) -> None:
    configured = [
        threshold("nodefs.available", "1Gi"),
        threshold("nodefs.inodesFree", "10"),
        threshold("imagefs.available", "2Gi", grace=5),
        threshold("imagefs.inodesFree", "20"),
        threshold("containerfs.available", "9Gi"),
    ]
    found = with_containerfs(configured, disks)
    copies = {one.signal: one for one in found if one.signal.startswith("containerfs.")}
    originals = {one.signal: one for one in configured}
    assert copies.keys() == {CONTAINERFS_AVAILABLE, CONTAINERFS_INODES_FREE}
    for signal, copy in copies.items():
        original = originals[signal.replace("containerfs", twin)]
        assert (copy.value, copy.grace_period) == (original.value, original.grace_period)
    assert len(found) == 6


def test_configuration_warnings_contradictions_have_one_line_each() -> None:
    warnings = configuration_warnings(
        [
            threshold("memory.available", "1Gi"),
            threshold("memory.available", "500Mi", grace=30),
            threshold("nodefs.available", "10%"),
            threshold("nodefs.available", "1Gi", grace=30),
            threshold("containerfs.available", "1Gi"),
        ]
    )
    assert [warning.partition(":")[0] for warning in warnings] == [
        "the threshold of containerfs.available is ignored",
        "evictionSoft[memory.available] never acts, because evictionHard[memory.available] is met first",
    ]


def test_signal_tables_every_signal_has_resource_and_condition() -> None:
    for signal in signals.SIGNAL_RESOURCES:
        assert Threshold(signal, value("1")).condition in ("MemoryPressure", "DiskPressure", "PIDPressure")


def test_signal_resources_are_those_of_all_valid_signals() -> None:
    assert set(signals.SIGNAL_RESOURCES) == set(SIGNALS)
    assert set(signals.SIGNAL_RESOURCES.values()) == set(signals.CONDITIONS)
