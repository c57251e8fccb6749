"""What is kept back for the system: amounts, CPUs, memory per NUMA node, and how it is enforced."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pykubelet.api import cpuset
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem, key_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_eviction import IGNORED_THRESHOLDS
from pykubelet.config.validate_rules import Gates, check, readable

RESERVABLE = ("cpu", "memory", "ephemeral-storage", "pid")
ENFORCEMENTS = {
    "pods": "",
    "system-reserved": "systemReservedCgroup",
    "system-reserved-compressible": "systemReservedCgroup",
    "kube-reserved": "kubeReservedCgroup",
    "kube-reserved-compressible": "kubeReservedCgroup",
    "none": "",
}
"""What can be enforced, and the field that must name the cgroup for it."""


def problems(config: KubeletConfiguration, _gates: Gates) -> Iterator[Problem]:
    """Check all fields about reservations."""
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
    wanted = config.enforce_node_allocatable
    cgroups = {
        "systemReservedCgroup": config.system_reserved_cgroup,
        "kubeReservedCgroup": config.kube_reserved_cgroup,
    }
    for index, name in enumerate(wanted):
        path = key_path("enforceNodeAllocatable", index)
        if name in wanted[:index]:
            yield Problem(path, f"{quoted(name)} is listed twice: list it once")
        elif name not in ENFORCEMENTS:
            yield Problem(path, f"must be one of {', '.join(ENFORCEMENTS)}, not {quoted(name)}")
        elif name == "none" and len(wanted) > 1:
            yield Problem(path, "none must stand alone: remove it or everything else")
        elif (cgroup := ENFORCEMENTS[name]) and not cgroups[cgroup]:
            yield Problem(path, f"{name} needs {cgroup} to be set")
        elif f"{name}-compressible" in wanted:
            yield Problem(path, f"{name} cannot be used together with {name}-compressible: keep one of them")
    if not config.cgroups_per_qos and any(name in ENFORCEMENTS and name != "none" for name in wanted):
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
    """The static memory policy hands out what is left, so both ways to say what is kept must agree."""
    threshold = config.eviction_hard.get("memory.available", "0%")
    if config.memory_manager_policy != "Static" or (
        # A share of memory that this machine may not have: only the node itself can tell.
        threshold.endswith("%") and threshold not in IGNORED_THRESHOLDS
    ):
        return
    kept_back = [
        config.kube_reserved.get("memory", "0"),
        config.system_reserved.get("memory", "0"),
        "0" if threshold in IGNORED_THRESHOLDS else threshold,
    ]
    per_node = [reservation.limits.get("memory", "0") for reservation in config.reserved_memory]
    try:
        wanted = sum(Quantity.parse(text).nanos for text in kept_back)
        given = sum(Quantity.parse(text).nanos for text in per_node)
    except ValueError:
        # A malformed amount is reported where it stands.
        return
    if wanted != given:
        yield Problem(
            "reservedMemory",
            "memory of all NUMA nodes must add up to kubeReserved + systemReserved + evictionHard, "
            f"which is {Quantity(wanted, 'binary')}, not {Quantity(given, 'binary')}",
        )
