"""Policies about CPUs, memory, topology, swap and user namespaces, and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_rules import Gates, between, check, one_of, positive

CPU_OPTIONS = {
    "full-pcpus-only": "",
    "strict-cpu-reservation": "",
    "prefer-align-cpus-by-uncorecache": "",
    "distribute-cpus-across-numa": "CPUManagerPolicyBetaOptions",
    "align-by-socket": "CPUManagerPolicyAlphaOptions",
    "distribute-cpus-across-cores": "CPUManagerPolicyAlphaOptions",
}
"""Options of the static CPU policy, and the gate that each needs."""

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


def problems(config: KubeletConfiguration, gates: Gates) -> Iterator[Problem]:
    """Check all fields about how CPUs and memory are managed."""
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
        # The amount is malformed, which is reported where it stands.
        return True
