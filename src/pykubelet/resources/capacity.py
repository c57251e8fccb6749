"""What the machine has, and how much of it pods get.

Two numbers are often mixed up. What cgroups *enforce* on all pods together is the capacity without
the reservations for the system; what the scheduler may *allocate* is that without what is kept free
by hard eviction thresholds, so that pods are evicted before the kernel's limit kills them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_eviction import IGNORED_THRESHOLDS
from pykubelet.host.kernel import read_sysctl
from pykubelet.resources.huge_pages import read_huge_pages
from pykubelet.resources.qos import HUGE_PAGES_PREFIX

_NOTHING = Quantity.of(0)
_EVICTION_SIGNALS = {"memory.available": "memory", "nodefs.available": "ephemeral-storage"}


def read_capacity(proc: Path = Path("/proc")) -> Resources:
    """Give cpu, memory, huge pages and process ids (`pid`) of this machine.

    Raises OSError when /proc cannot be read.
    """
    capacity = {"cpu": Quantity.of(os.cpu_count() or 1), "memory": _memory((proc / "meminfo").read_text())}
    ids = [limit for name in ("kernel/pid_max", "kernel/threads-max") if (limit := read_sysctl(name, proc))]
    if ids:
        capacity["pid"] = Quantity.of(min(ids))
    return capacity | read_huge_pages()


def machine_amounts(config: KubeletConfiguration, root_dir: Path) -> Resources:
    """Read what this machine gives to its node; raises OSError."""
    capacity = read_capacity()
    # Process ids are limited, but nobody can ask for them.
    capacity.pop("pid", None)
    capacity |= pod_capacity(int(capacity["cpu"]), config)
    if config.local_storage_capacity_isolation:
        capacity |= storage_capacity(root_dir)
    return capacity


def storage_capacity(root_dir: Path) -> Resources:
    """Give the `ephemeral-storage` that pods share: the file system below the agent's root directory.

    Raises OSError when it cannot be asked.
    """
    found = os.statvfs(root_dir)
    return {"ephemeral-storage": Quantity.of(found.f_frsize * found.f_blocks, "binary")}


def pod_capacity(cores: int, config: KubeletConfiguration) -> Resources:
    """Give how many `pods` may run: `maxPods`, or fewer where `podsPerCore` says so."""
    most = config.max_pods
    if config.pods_per_core > 0:
        most = min(cores * config.pods_per_core, most)
    return {"pods": Quantity.of(most)}


def enforced(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Give what all pods together may use: the capacity without what is reserved.

    Where `enforceNodeAllocatable` does not name `pods`, that is all there is.
    """
    if "pods" not in config.enforce_node_allocatable:
        return dict(capacity)
    return unreserved(capacity, config)


def unreserved(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Give what is left for pods when the system has its share."""
    return _without(capacity, _reserved(config))


def allocatable(
    capacity: Resources, config: KubeletConfiguration, *, ignore_eviction: bool = False
) -> Resources:
    """Give what pods may ask for: also without what hard eviction keeps free.

    Huge pages are memory that was set aside, so plain memory is less by them. `ignore_eviction` is
    `--experimental-allocatable-ignore-eviction`.
    """
    kept = _kept(capacity, config, {} if ignore_eviction else config.eviction_hard)
    left = _without(capacity, kept)
    pages = sum(
        amount.nanos for resource, amount in capacity.items() if resource.startswith(HUGE_PAGES_PREFIX)
    )
    return left | _without({"memory": left["memory"]}, {"memory": pages}) if "memory" in left else left


def reserved_amounts(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Give what pods do not get of the machine's `capacity`: reserved for the system, or kept free.

    Resources of which nothing is kept are left out, as are those that the machine does not have.
    """
    kept = _kept(capacity, config, config.eviction_hard)
    return {
        resource: Quantity(kept[resource], amount.notation)
        for resource, amount in capacity.items()
        if kept.get(resource)
    }


def overcommitment(capacity: Resources, config: KubeletConfiguration) -> str | None:
    """Say what is wrong when more is reserved than the machine has; None when all is well."""
    kept = _kept(capacity, config, config.eviction_hard)
    for resource, nanos in kept.items():
        if resource in capacity and nanos > capacity[resource].nanos:
            return (
                f"{Quantity(nanos, capacity[resource].notation)} of {resource} is reserved but the machine "
                f"has only {capacity[resource]}: lower kubeReserved, systemReserved or evictionHard"
            )
    return None


def _kept(capacity: Resources, config: KubeletConfiguration, thresholds: Mapping[str, str]) -> dict[str, int]:
    kept = _reserved(config)
    for resource, amount in _kept_free(capacity, thresholds).items():
        kept[resource] = kept.get(resource, 0) + amount
    return kept


def _reserved(config: KubeletConfiguration) -> dict[str, int]:
    kept: dict[str, int] = {}
    for amounts in (config.kube_reserved, config.system_reserved):
        for resource, text in amounts.items():
            kept[resource] = kept.get(resource, 0) + Quantity.parse(text).nanos
    if cpus := cpuset.parse(config.reserved_system_cpus):
        # CPUs that are kept by name are all that is kept, whatever the two say in numbers.
        kept["cpu"] = Quantity.of(len(cpus)).nanos
    return kept


def _kept_free(capacity: Resources, thresholds: Mapping[str, str]) -> dict[str, int]:
    kept = {}
    for signal, resource in _EVICTION_SIGNALS.items():
        text = thresholds.get(signal, "0%")
        if text in IGNORED_THRESHOLDS:
            continue
        if text.endswith("%"):
            # In single precision like the reference, so that both give the same byte.
            share = _single(_single(float(text.removesuffix("%"))) / 100)
            kept[resource] = Quantity.of(int(int(capacity.get(resource, _NOTHING)) * share)).nanos
        else:
            kept[resource] = Quantity.parse(text).nanos
    return kept


def _without(capacity: Resources, kept: Mapping[str, int]) -> Resources:
    return {
        resource: Quantity(max(0, amount.nanos - kept.get(resource, 0)), amount.notation)
        for resource, amount in capacity.items()
    }


def _single(number: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)


def _memory(meminfo: str) -> Quantity:
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return Quantity.of(int(line.split()[1]) * 1024, "binary")
    return Quantity.of(0, "binary")
