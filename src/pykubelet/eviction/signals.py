"""Eviction signals and thresholds.

A signal is an amount that the node must not run out of. A threshold is met while less than its value is
available; a hard threshold acts immediately, a soft one when it has been met for its grace period.

`nodefs` is the file system of the kubelet's root directory, `imagefs` that of images and `containerfs` that
of writable layers. They may be the same file system (`Disks`); thresholds of containerfs are always those of
the file system that it shares, as upstream.

The signals that end in `WithCache` do not exist upstream. They are opt-in by their name: page cache that the
kernel can reclaim counts as available, whereas `memory.available` counts active page cache as used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_resources import (
    ALLOCATABLE_MEMORY_AVAILABLE,
    ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE,
    CONTAINERFS_AVAILABLE,
    CONTAINERFS_INODES_FREE,
    IMAGEFS_AVAILABLE,
    IMAGEFS_INODES_FREE,
    MEMORY_AVAILABLE,
    MEMORY_AVAILABLE_WITH_CACHE,
    NODEFS_AVAILABLE,
    NODEFS_INODES_FREE,
    PID_AVAILABLE,
    ThresholdValue,
    parse_grace_period,
    parse_minimum_reclaim,
    parse_threshold,
)
from pykubelet.logs import get_logger

log = get_logger(__name__)
MEMORY, EPHEMERAL_STORAGE, INODES, PIDS = "memory", "ephemeral-storage", "inodes", "pids"
NodeConditionType = Literal["MemoryPressure", "DiskPressure", "PIDPressure"]
SIGNAL_RESOURCES: Mapping[str, str] = {
    MEMORY_AVAILABLE: MEMORY,
    ALLOCATABLE_MEMORY_AVAILABLE: MEMORY,
    MEMORY_AVAILABLE_WITH_CACHE: MEMORY,
    ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE: MEMORY,
    NODEFS_AVAILABLE: EPHEMERAL_STORAGE,
    NODEFS_INODES_FREE: INODES,
    IMAGEFS_AVAILABLE: EPHEMERAL_STORAGE,
    IMAGEFS_INODES_FREE: INODES,
    CONTAINERFS_AVAILABLE: EPHEMERAL_STORAGE,
    CONTAINERFS_INODES_FREE: INODES,
    PID_AVAILABLE: PIDS,
}
"""Resource that is short when a signal's threshold is met, as messages and annotations name it."""
CONDITIONS: Mapping[str, NodeConditionType] = {
    MEMORY: "MemoryPressure",
    EPHEMERAL_STORAGE: "DiskPressure",
    INODES: "DiskPressure",
    PIDS: "PIDPressure",
}
"""Node condition by resource."""
_ALLOCATABLE_COPIES = {
    MEMORY_AVAILABLE: ALLOCATABLE_MEMORY_AVAILABLE,
    MEMORY_AVAILABLE_WITH_CACHE: ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE,
}


def is_disk_signal(signal: str) -> bool:
    """Return whether a signal is about a file system."""
    return SIGNAL_RESOURCES[signal] in (EPHEMERAL_STORAGE, INODES)


def is_allocatable_signal(signal: str) -> bool:
    """Return whether a signal is about the memory of the cgroup of all pods."""
    return signal in _ALLOCATABLE_COPIES.values()


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold of one signal."""

    signal: str
    value: ThresholdValue
    grace_period: float = 0.0
    """Seconds for which a soft threshold must be met; 0 for a hard one."""
    min_reclaim: ThresholdValue | None = None

    @property
    def is_hard(self) -> bool:
        """Whether it acts immediately, and evicted pods get no grace period of their own."""
        return self.grace_period == 0

    @property
    def resource(self) -> str:
        """Resource that is short when it is met."""
        return SIGNAL_RESOURCES[self.signal]

    @property
    def condition(self) -> NodeConditionType:
        """Node condition that is True when it is met."""
        return CONDITIONS[self.resource]

    def amount(self, capacity: int, *, with_reclaim: bool = False) -> int:
        """Return the amount below which it is met; `with_reclaim` adds the minimum reclaim."""
        amount = int(self.value.amount(capacity))
        if with_reclaim and self.min_reclaim is not None:
            amount += int(self.min_reclaim.amount(capacity))
        return amount


@dataclass(frozen=True, slots=True)
class Disks:
    """Which file systems are different from each other."""

    dedicated_imagefs: bool = False
    """Whether images, or images and writable layers, are not on nodefs."""
    split: bool = False
    """Whether images and writable layers are on different file systems; then the layers are on nodefs."""

    @property
    def containerfs_twin(self) -> Literal["nodefs", "imagefs"]:
        """File system that containerfs is the same as."""
        return "imagefs" if self.dedicated_imagefs and not self.split else "nodefs"


def parse_thresholds(config: KubeletConfiguration) -> list[Threshold]:
    """Return the configured thresholds, hard ones first. Raises ValueError for settings that are invalid."""
    reclaims = {
        signal: parse_minimum_reclaim(text) for signal, text in config.eviction_minimum_reclaim.items()
    }
    graces = {
        signal: parse_grace_period(text).seconds for signal, text in config.eviction_soft_grace_period.items()
    }
    found = []
    for signal, text in config.eviction_hard.items():
        if (value := parse_threshold(text)) is not None:
            found.append(Threshold(signal, value, min_reclaim=reclaims.get(signal)))
    for signal, text in config.eviction_soft.items():
        if (value := parse_threshold(text)) is not None:
            found.append(Threshold(signal, value, graces[signal], reclaims.get(signal)))
    if "pods" in config.enforce_node_allocatable:
        found += [
            replace(threshold, signal=copy)
            for threshold in found
            if threshold.is_hard and (copy := _ALLOCATABLE_COPIES.get(threshold.signal))
        ]
    return found


def with_containerfs(thresholds: Iterable[Threshold], disks: Disks) -> list[Threshold]:
    """Return the thresholds with those of containerfs replaced by those of the file system that it shares."""
    kept = [threshold for threshold in thresholds if not threshold.signal.startswith("containerfs.")]
    twin = disks.containerfs_twin
    return kept + [
        replace(threshold, signal=threshold.signal.replace(twin, "containerfs"))
        for threshold in kept
        if threshold.signal.startswith(f"{twin}.")
    ]


def configuration_warnings(thresholds: Sequence[Threshold]) -> list[str]:
    """Return one line for each setting that is valid but contradicts another, with the remedy."""
    warnings = []
    for threshold in thresholds:
        if threshold.signal.startswith("containerfs."):
            warnings.append(
                f"the threshold of {threshold.signal} is ignored: "
                "set that of the file system which it shares, nodefs or imagefs"
            )
    hard = {threshold.signal: threshold for threshold in thresholds if threshold.is_hard}
    for soft in thresholds:
        against = hard.get(soft.signal)
        if soft.is_hard or against is None:
            continue
        for capacity in _comparable(soft, against):
            if soft.amount(capacity) <= against.amount(capacity):
                warnings.append(
                    f"evictionSoft[{soft.signal}] never acts, because evictionHard[{soft.signal}] is "
                    "met first: set a higher soft threshold"
                )
    return warnings


def _comparable(left: Threshold, right: Threshold) -> tuple[int, ...]:
    """Return a capacity at which two thresholds can be compared; empty if that depends on the node."""
    has_quantity = [threshold.value.quantity is not None for threshold in (left, right)]
    return (1 << 50,) if has_quantity[0] == has_quantity[1] else ()
