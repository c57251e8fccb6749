"""Validation of the fields on resources: CPU, memory and topology managers, eviction and reservations."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pykubelet.api import cpuset
from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_rules import Gates, between, check, one_of, positive, readable
from pykubelet.util.text import quoted

CPU_OPTIONS = {
    "full-pcpus-only": "",
    "strict-cpu-reservation": "",
    "prefer-align-cpus-by-uncorecache": "",
    "distribute-cpus-across-numa": "CPUManagerPolicyBetaOptions",
    "align-by-socket": "CPUManagerPolicyAlphaOptions",
    "distribute-cpus-across-cores": "CPUManagerPolicyAlphaOptions",
}
"""Options of the static CPU manager policy, and the feature gate that each needs."""
CPU_OPTION_CONFLICTS = (
    ("full-pcpus-only", "distribute-cpus-across-cores"),
    ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
)
DEFAULT_QUOTA_PERIOD = Duration.parse("100ms")
QUOTA_PERIOD_GATE = "CustomCPUCFSQuotaPeriod"
FEWEST_NUMA_NODES = 8
IDS_PER_POD_UNIT = 65536
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")
_RULES = (
    one_of("cgroup_driver", "cgroupfs", "systemd"),
    one_of("cpu_manager_policy", "none", "static"),
    one_of("memory_manager_policy", "None", "Static"),
    one_of("topology_manager_policy", "none", "best-effort", "restricted", "single-numa-node"),
    one_of("topology_manager_scope", "container", "pod"),
    one_of("memory_reservation_policy", "None", "TieredReservation"),
    one_of("memory_swap.swap_behavior", "", "NoSwap", "LimitedSwap"),
    between("cpu_cfs_quota_period", Duration.parse("1ms"), Duration.parse("1s")),
    between("oom_score_adj", -1000, 1000),
    positive("cpu_manager_reconcile_period"),
)


def manager_problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the fields on the resource managers, swap and user namespaces."""
    yield from check(_RULES, config)
    yield from _cpu_options(config, gates)
    yield from _topology_options(config.topology_manager_policy_options)
    if config.cpu_manager_policy == "static" and not _reserves_cpu(config):
        yield Problem(
            "cpuManagerPolicy", "static needs reservedSystemCPUs, or cpu in kubeReserved or systemReserved"
        )
    if not 0 < config.memory_throttling_factor <= 1:
        yield Problem(
            "memoryThrottlingFactor", f"must be above 0 and at most 1, not {config.memory_throttling_factor}"
        )
    if config.memory_reservation_policy == "TieredReservation" and not gates("MemoryQoS"):
        yield Problem("memoryReservationPolicy", "TieredReservation needs the feature gate MemoryQoS")
    ids = config.user_namespaces.ids_per_pod if config.user_namespaces else None
    if ids is not None and (not IDS_PER_POD_UNIT <= ids < 2**32 or ids % IDS_PER_POD_UNIT):
        yield Problem(
            "userNamespaces.idsPerPod", f"must be a multiple of {IDS_PER_POD_UNIT} below 2^32, not {ids}"
        )
    if config.cpu_cfs_quota_period != DEFAULT_QUOTA_PERIOD and not gates(QUOTA_PERIOD_GATE):
        yield Problem("cpuCFSQuotaPeriod", f"other than 100ms needs the feature gate {QUOTA_PERIOD_GATE}")


def _cpu_options(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    options = config.cpu_manager_policy_options
    if options and config.cpu_manager_policy == "none":
        yield Problem("cpuManagerPolicyOptions", "needs cpuManagerPolicy: static")
    for name, text in options.items():
        path = key_path("cpuManagerPolicyOptions", name)
        if name not in CPU_OPTIONS:
            yield Problem(path, f"there is no such option: use one of {', '.join(CPU_OPTIONS)}")
        elif (gate := CPU_OPTIONS[name]) and not gates(gate):
            yield Problem(path, f"needs the feature gate {gate}")
        elif text not in _TRUE + _FALSE:
            yield Problem(path, f'must be "true" or "false", not {quoted(text)}')
    active = {name for name, text in options.items() if text in _TRUE}
    for first, second in CPU_OPTION_CONFLICTS:
        if {first, second} <= active:
            yield Problem(
                key_path("cpuManagerPolicyOptions", first), f"cannot be used together with {second}"
            )
    if "align-by-socket" in active and config.topology_manager_policy == "single-numa-node":
        yield Problem(
            "cpuManagerPolicyOptions[align-by-socket]",
            "cannot be used together with topologyManagerPolicy: single-numa-node",
        )


def _topology_options(options: dict[str, str]) -> Iterator[Problem]:
    for name, text in options.items():
        path = key_path("topologyManagerPolicyOptions", name)
        match name:
            case "prefer-closest-numa-nodes":
                if text not in _TRUE + _FALSE:
                    yield Problem(path, f'must be "true" or "false", not {quoted(text)}')
            case "max-allowable-numa-nodes":
                if not re.fullmatch(r"\+?[0-9]{1,9}", text, re.ASCII) or int(text) < FEWEST_NUMA_NODES:
                    yield Problem(
                        path, f"must be a number of {FEWEST_NUMA_NODES} or more, not {quoted(text)}"
                    )
            case _:
                yield Problem(
                    path, "there is no such option: use prefer-closest-numa-nodes or max-allowable-numa-nodes"
                )


def _reserves_cpu(config: KubeletConfiguration) -> bool:
    if config.reserved_system_cpus:
        return True
    try:
        return any(
            Quantity.parse(reserved.get("cpu", "0")).nanos > 0
            for reserved in (config.kube_reserved, config.system_reserved)
        )
    except ValueError:
        # A malformed amount is reported with its own field.
        return True


MEMORY_AVAILABLE = "memory.available"
ALLOCATABLE_MEMORY_AVAILABLE = "allocatableMemory.available"
MEMORY_AVAILABLE_WITH_CACHE = "memory.availableWithCache"
ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE = "allocatableMemory.availableWithCache"
NODEFS_AVAILABLE = "nodefs.available"
NODEFS_INODES_FREE = "nodefs.inodesFree"
IMAGEFS_AVAILABLE = "imagefs.available"
IMAGEFS_INODES_FREE = "imagefs.inodesFree"
CONTAINERFS_AVAILABLE = "containerfs.available"
CONTAINERFS_INODES_FREE = "containerfs.inodesFree"
PID_AVAILABLE = "pid.available"
WITH_CACHE_SIGNALS = (MEMORY_AVAILABLE_WITH_CACHE, ALLOCATABLE_MEMORY_AVAILABLE_WITH_CACHE)
"""Signals that the upstream kubelet lacks: page cache that the kernel can reclaim counts as available."""
SIGNALS = (
    MEMORY_AVAILABLE,
    NODEFS_AVAILABLE,
    NODEFS_INODES_FREE,
    IMAGEFS_AVAILABLE,
    IMAGEFS_INODES_FREE,
    CONTAINERFS_AVAILABLE,
    CONTAINERFS_INODES_FREE,
    PID_AVAILABLE,
    ALLOCATABLE_MEMORY_AVAILABLE,
    *WITH_CACHE_SIGNALS,
)
"""Names of all eviction signals; `eviction/signals.py` has the resource of each."""
IGNORED_THRESHOLDS = ("0%", "100%")
"""Thresholds that disable a signal."""


@dataclass(frozen=True, slots=True)
class ThresholdValue:
    """An amount of a resource: a quantity, or a share of the capacity."""

    quantity: Quantity | None = None
    share: float = 0.0
    """Share between 0 and 1 in single precision as upstream, so that both compute the same amount."""

    def amount(self, capacity: int) -> Quantity:
        """Return the amount for a capacity in bytes or counts."""
        if self.quantity is not None:
            return self.quantity
        return Quantity.from_units(int(capacity * self.share), "binary")


_PERCENTAGE = re.compile(r"[+-]?(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})%", re.ASCII)


def eviction_problems(config: KubeletConfiguration, _gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the eviction fields."""
    yield from check([between("eviction_pressure_transition_period", Duration(0))], config)
    yield from _signals("evictionHard", config.eviction_hard, parse_threshold)
    yield from _signals("evictionSoft", config.eviction_soft, parse_threshold)
    yield from _signals("evictionSoftGracePeriod", config.eviction_soft_grace_period, parse_grace_period)
    yield from _signals("evictionMinimumReclaim", config.eviction_minimum_reclaim, parse_minimum_reclaim)
    for signal, threshold in config.eviction_soft.items():
        has_grace_period = signal in config.eviction_soft_grace_period
        if signal in SIGNALS and threshold not in IGNORED_THRESHOLDS and not has_grace_period:
            message = f"needs a grace period: set evictionSoftGracePeriod[{signal}]"
            yield Problem(key_path("evictionSoft", signal), message)


def _signals(field: str, entries: dict[str, str], read: Callable[[str], object]) -> Iterator[Problem]:
    for signal, text in entries.items():
        path = key_path(field, signal)
        if signal not in SIGNALS:
            yield Problem(path, f"there is no such signal: use one of {', '.join(SIGNALS)}")
            continue
        try:
            read(text)
        except ValueError as err:
            yield Problem(path, str(err))


def parse_threshold(text: str) -> ThresholdValue | None:
    """Parse an eviction threshold; None for one that disables its signal. Raises ValueError."""
    if text.endswith("%"):
        percentage = _percentage(text)
        if not 0 <= percentage <= 100:
            raise ValueError(f"must be between 0% and 100%, not {quoted(text)}")
        return None if text in IGNORED_THRESHOLDS else ThresholdValue(share=_share(percentage))
    quantity = Quantity.parse(text)
    if quantity.nanos <= 0:
        raise ValueError(f"must be more than zero, not {quoted(text)}")
    return ThresholdValue(quantity)


def parse_minimum_reclaim(text: str) -> ThresholdValue:
    """Parse a minimum reclaim. Raises ValueError."""
    if text.endswith("%"):
        percentage = _percentage(text)
        if percentage <= 0:
            raise ValueError(f"must be more than 0%, not {quoted(text)}")
        return ThresholdValue(share=_share(percentage))
    quantity = Quantity.parse(text)
    if quantity.nanos < 0:
        raise ValueError(f"must not be negative, as {quoted(text)} is")
    return ThresholdValue(quantity)


def parse_grace_period(text: str) -> Duration:
    """Parse the grace period of a soft threshold. Raises ValueError."""
    duration = Duration.parse(text)
    if duration < 0:
        raise ValueError(f"must not be negative, as {quoted(text)} is")
    return duration


def _share(percentage: float) -> float:
    return _single(_single(percentage) / 100)


def _single(number: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)


def _percentage(text: str) -> float:
    if not _PERCENTAGE.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a percentage: write a number and %, such as 10%")
    return float(text.removesuffix("%"))


RESERVABLE = ("cpu", "memory", "ephemeral-storage", "pid")
ENFORCEMENTS = {
    "pods": "",
    "system-reserved": "systemReservedCgroup",
    "system-reserved-compressible": "systemReservedCgroup",
    "kube-reserved": "kubeReservedCgroup",
    "kube-reserved-compressible": "kubeReservedCgroup",
    "none": "",
}
"""Values of enforceNodeAllocatable, and the field of the cgroup that each needs."""


def reserved_problems(config: KubeletConfiguration, _gates: Gates) -> Iterator[Problem]:
    """Yield the problems of the fields on reserved resources."""
    yield from check([readable("reserved_system_cpus", cpuset.parse)], config)
    yield from _amounts("kubeReserved", config.kube_reserved)
    yield from _amounts("systemReserved", config.system_reserved)
    yield from _shares(config.qos_reserved)
    yield from _enforcement(config)
    yield from _memory(config)
    yield from _memory_total(config)
    if config.reserved_system_cpus and (config.system_reserved_cgroup or config.kube_reserved_cgroup):
        yield Problem(
            "reservedSystemCPUs", "cannot be used together with systemReservedCgroup or kubeReservedCgroup"
        )
    if config.system_cgroups and not config.cgroup_root:
        yield Problem("systemCgroups", "needs cgroupRoot to be set too")
    if config.system_cgroups == "/":
        yield Problem("systemCgroups", "must be a cgroup below the root, such as /system")


def _amounts(field: str, amounts: dict[str, str]) -> Iterator[Problem]:
    for resource, text in amounts.items():
        path = key_path(field, resource)
        if resource not in RESERVABLE:
            yield Problem(path, f"cannot be reserved: only {', '.join(RESERVABLE)} can")
            continue
        try:
            if Quantity.parse(text).nanos < 0:
                yield Problem(path, f"must not be negative, as {quoted(text)} is")
        except ValueError as err:
            yield Problem(path, str(err))


def _shares(shares: dict[str, str]) -> Iterator[Problem]:
    for resource, text in shares.items():
        path = key_path("qosReserved", resource)
        if resource != "memory":
            yield Problem(path, "cannot be reserved per QoS class: only memory can")
        elif not re.fullmatch(r"\+?[0-9]{1,3}%", text, re.ASCII) or int(text.rstrip("%")) > 100:
            yield Problem(path, f"must be a whole percentage from 0% to 100%, not {quoted(text)}")


def _enforcement(config: KubeletConfiguration) -> Iterator[Problem]:
    enforced = config.enforce_node_allocatable
    cgroups = {
        "systemReservedCgroup": config.system_reserved_cgroup,
        "kubeReservedCgroup": config.kube_reserved_cgroup,
    }
    for index, name in enumerate(enforced):
        path = key_path("enforceNodeAllocatable", index)
        if name in enforced[:index]:
            yield Problem(path, f"{quoted(name)} is listed twice: list it once")
        elif name not in ENFORCEMENTS:
            yield Problem(path, f"must be one of {', '.join(ENFORCEMENTS)}, not {quoted(name)}")
        elif name == "none" and len(enforced) > 1:
            yield Problem(path, "none must stand alone: remove it or everything else")
        elif (cgroup := ENFORCEMENTS[name]) and not cgroups[cgroup]:
            yield Problem(path, f"{name} needs {cgroup} to be set")
        elif f"{name}-compressible" in enforced:
            yield Problem(path, f"{name} cannot be used together with {name}-compressible: keep one of them")
    if not config.cgroups_per_qos and any(name in ENFORCEMENTS and name != "none" for name in enforced):
        yield Problem("enforceNodeAllocatable", 'needs cgroupsPerQOS: set that to true, or this to ["none"]')


def _memory(config: KubeletConfiguration) -> Iterator[Problem]:
    seen: set[tuple[int, str]] = set()
    for index, reservation in enumerate(config.reserved_memory):
        node, entry = reservation.numa_node, key_path("reservedMemory", index)
        if node < 0:
            yield Problem(f"{entry}.numaNode", f"must be 0 or more, not {node}")
        for resource, text in reservation.limits.items():
            path = key_path(f"{entry}.limits", resource)
            if resource != "memory" and not resource.startswith("hugepages-"):
                yield Problem(path, "cannot be reserved: only memory and hugepages-<size> can")
            elif (node, resource) in seen:
                yield Problem(path, f"is reserved twice for NUMA node {node}: keep one of them")
            seen.add((node, resource))
            try:
                if Quantity.parse(text).nanos <= 0:
                    yield Problem(path, f"must be more than zero, not {quoted(text)}")
            except ValueError as err:
                yield Problem(path, str(err))


def _memory_total(config: KubeletConfiguration) -> Iterator[Problem]:
    """Yield a problem if reservedMemory and the other reservations differ, with the static memory policy."""
    threshold = config.eviction_hard.get("memory.available", "0%")
    if config.memory_manager_policy != "Static" or (
        # A percentage depends on the memory of the node, which may be another host.
        threshold.endswith("%") and threshold not in IGNORED_THRESHOLDS
    ):
        return
    reservations = [
        config.kube_reserved.get("memory", "0"),
        config.system_reserved.get("memory", "0"),
        "0" if threshold in IGNORED_THRESHOLDS else threshold,
    ]
    per_node = [reservation.limits.get("memory", "0") for reservation in config.reserved_memory]
    try:
        expected = sum(Quantity.parse(text).nanos for text in reservations)
        reserved = sum(Quantity.parse(text).nanos for text in per_node)
    except ValueError:
        # A malformed amount is reported with its own field.
        return
    if expected != reserved:
        yield Problem(
            "reservedMemory",
            "memory of all NUMA nodes must add up to kubeReserved + systemReserved + evictionHard, "
            f"which is {Quantity(expected, 'binary')}, not {Quantity(reserved, 'binary')}",
        )
