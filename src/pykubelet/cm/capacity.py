"""Node capacity, reservations and allocatable resources, and the spellings of huge page sizes.

Reads /proc, /sys and the configuration; keeps no state. Two amounts are easily confused: cgroups *enforce* on
all pods together the capacity minus the reservations for the system; the scheduler may *allocate* that minus
the hard eviction thresholds, so that pods are evicted before the kernel kills them at the cgroup limit.

A huge page size has three spellings: a resource of the API (`hugepages-2Mi`), a part of cgroup file names
(`hugetlb.2MB.max`), and a directory of the kernel (`hugepages-2048kB`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import HUGE_PAGES_PREFIX
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_resources import (
    MEMORY_AVAILABLE,
    NODEFS_AVAILABLE,
    parse_threshold,
)
from pykubelet.linux.kernel import read_sysctl

UNBOUNDED = 1 << 62
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_HUGE_PAGES_DIR = Path("/sys/kernel/mm/hugepages")


def kernel_size(size: int) -> str | None:
    """Return a page size in bytes as spelled in cgroup file names (`2MB`), or None for an impossible size."""
    unit = 0
    while size > 0 and size % 1024 == 0 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}" if 0 < size < 1024 else None


def page_size(resource: str) -> int | None:
    """Return the page size in bytes of a huge page resource, or None for any other resource."""
    if not resource.startswith(HUGE_PAGES_PREFIX):
        return None
    try:
        return int(Quantity.parse(resource.removeprefix(HUGE_PAGES_PREFIX)))
    except ValueError:
        return None


def page_limits(amounts: Resources, sizes: tuple[str, ...]) -> dict[str, int]:
    """Return a limit in bytes for every page size of the host; 0 for sizes that are not requested."""
    limits = dict.fromkeys(sizes, 0)
    for resource, amount in amounts.items():
        size = page_size(resource)
        name = kernel_size(size) if size is not None else None
        if name in limits:
            limits[name] += int(amount)
    return limits


def read_page_sizes(directory: Path = _HUGE_PAGES_DIR) -> tuple[str, ...]:
    """Return the huge page sizes of the host as spelled in cgroup file names, smallest first."""
    return tuple(name for size, _ in _read(directory) if (name := kernel_size(size)) is not None)


def read_huge_pages(directory: Path = _HUGE_PAGES_DIR) -> Resources:
    """Return the bytes set aside for huge pages, by resource."""
    return {
        f"{HUGE_PAGES_PREFIX}{Quantity.from_units(size, 'binary')}": Quantity.from_units(
            size * pages, "binary"
        )
        for size, pages in _read(directory)
    }


def _read(directory: Path) -> list[tuple[int, int]]:
    found = []
    for page_dir in directory.glob("hugepages-*kB"):
        try:
            kilobytes = int(page_dir.name.removeprefix("hugepages-").removesuffix("kB"))
            found.append((kilobytes * 1024, int((page_dir / "nr_hugepages").read_text())))
        except (OSError, ValueError):
            continue
    return sorted(found)


_ZERO = Quantity.from_units(0)
_EVICTION_SIGNALS = {MEMORY_AVAILABLE: "memory", NODEFS_AVAILABLE: "ephemeral-storage"}


def read_capacity(proc: Path = Path("/proc")) -> Resources:
    """Return the CPUs, memory, huge pages and process IDs (`pid`) of the host.

    Raises OSError when /proc cannot be read.
    """
    capacity = {
        "cpu": Quantity.from_units(os.cpu_count() or 1),
        "memory": _memory((proc / "meminfo").read_text()),
    }
    ids = [limit for name in ("kernel/pid_max", "kernel/threads-max") if (limit := read_sysctl(name, proc))]
    if ids:
        capacity["pid"] = Quantity.from_units(min(ids))
    return capacity | read_huge_pages()


def node_capacity(config: KubeletConfiguration, root_dir: Path) -> Resources:
    """Return the node's capacity for its status, without process IDs. Raises OSError."""
    capacity = read_capacity()
    # Process IDs are limited, but pods cannot request them.
    capacity.pop("pid", None)
    capacity |= pod_capacity(int(capacity["cpu"]), config)
    if config.local_storage_capacity_isolation:
        capacity |= storage_capacity(root_dir)
    return capacity


def storage_capacity(root_dir: Path) -> Resources:
    """Return the `ephemeral-storage` of pods: the file system of the kubelet's root directory.

    Raises OSError when statvfs fails.
    """
    found = os.statvfs(root_dir)
    return {"ephemeral-storage": Quantity.from_units(found.f_frsize * found.f_blocks, "binary")}


def pod_capacity(cores: int, config: KubeletConfiguration) -> Resources:
    """Return the number of `pods` that may run: `maxPods`, or less if `podsPerCore` limits it."""
    limit = config.max_pods
    if config.pods_per_core > 0:
        limit = min(cores * config.pods_per_core, limit)
    return {"pods": Quantity.from_units(limit)}


def enforced(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Return the amounts that all pods together may use: the capacity minus the reservations.

    The whole capacity if `enforceNodeAllocatable` does not contain `pods`.
    """
    if "pods" not in config.enforce_node_allocatable:
        return dict(capacity)
    return unreserved(capacity, config)


def unreserved(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Return the capacity minus the reservations for the system."""
    return _without(capacity, _reserved(config))


def allocatable(
    capacity: Resources, config: KubeletConfiguration, *, ignore_eviction: bool = False
) -> Resources:
    """Return the allocatable amounts: the capacity minus reservations and hard eviction thresholds.

    Memory is also reduced by all huge pages, which are set aside from it. `ignore_eviction` is
    `--experimental-allocatable-ignore-eviction`.
    """
    reserved = _unavailable(capacity, config, {} if ignore_eviction else config.eviction_hard)
    left = _without(capacity, reserved)
    pages = sum(
        amount.nanos for resource, amount in capacity.items() if resource.startswith(HUGE_PAGES_PREFIX)
    )
    return left | _without({"memory": left["memory"]}, {"memory": pages}) if "memory" in left else left


def reserved_amounts(capacity: Resources, config: KubeletConfiguration) -> Resources:
    """Return the amounts of `capacity` that are reserved or kept free by hard eviction thresholds.

    Resources without a reservation, and resources that the node does not have, are omitted.
    """
    reserved = _unavailable(capacity, config, config.eviction_hard)
    return {
        resource: Quantity(reserved[resource], amount.notation)
        for resource, amount in capacity.items()
        if reserved.get(resource)
    }


def overcommitment(capacity: Resources, config: KubeletConfiguration) -> str | None:
    """Return an error message if more is reserved than the capacity, else None."""
    reserved = _unavailable(capacity, config, config.eviction_hard)
    for resource, nanos in reserved.items():
        if resource in capacity and nanos > capacity[resource].nanos:
            return (
                f"{Quantity(nanos, capacity[resource].notation)} of {resource} is reserved but the machine "
                f"has only {capacity[resource]}: lower kubeReserved, systemReserved or evictionHard"
            )
    return None


def _unavailable(
    capacity: Resources, config: KubeletConfiguration, thresholds: Mapping[str, str]
) -> dict[str, int]:
    reserved = _reserved(config)
    for resource, amount in _eviction_reserve(capacity, thresholds).items():
        reserved[resource] = reserved.get(resource, 0) + amount
    return reserved


def _reserved(config: KubeletConfiguration) -> dict[str, int]:
    reserved: dict[str, int] = {}
    for amounts in (config.kube_reserved, config.system_reserved):
        for resource, text in amounts.items():
            reserved[resource] = reserved.get(resource, 0) + Quantity.parse(text).nanos
    if cpus := cpuset.parse(config.reserved_system_cpus):
        # CPUs reserved by number replace the amounts of kubeReserved and systemReserved.
        reserved["cpu"] = Quantity.from_units(len(cpus)).nanos
    return reserved


def _eviction_reserve(capacity: Resources, thresholds: Mapping[str, str]) -> dict[str, int]:
    reserved = {}
    for signal, resource in _EVICTION_SIGNALS.items():
        threshold = parse_threshold(thresholds.get(signal, "0%"))
        if threshold is not None:
            reserved[resource] = threshold.amount(int(capacity.get(resource, _ZERO))).nanos
    return reserved


def _without(capacity: Resources, reserved: Mapping[str, int]) -> Resources:
    return {
        resource: Quantity(max(0, amount.nanos - reserved.get(resource, 0)), amount.notation)
        for resource, amount in capacity.items()
    }


def _memory(meminfo: str) -> Quantity:
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return Quantity.from_units(int(line.split()[1]) * 1024, "binary")
    return Quantity.from_units(0, "binary")
