"""What the machine has, and how much of it pods get.

Two numbers are often mixed up. What cgroups *enforce* on all pods together is the capacity without
the reservations for the system; what the scheduler may *allocate* is that without what is kept free
by hard eviction thresholds, so that pods are evicted before the kernel's limit kills them.

Sizes of huge pages, in the API's words and in the kernel's.

The API has a resource per size (`hugepages-2Mi`), the kernel's cgroup files have another spelling
(`hugetlb.2MB.max`), its folders a third (`hugepages-2048kB`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import HUGE_PAGES_PREFIX
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_resources import IGNORED_THRESHOLDS
from pykubelet.linux.kernel import read_sysctl

UNBOUNDED = 1 << 62
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_FOLDERS = Path("/sys/kernel/mm/hugepages")


def kernel_size(size: int) -> str | None:
    """Write a page size in bytes as cgroup files do: `2MB`; None for a size that no page has."""
    unit = 0
    while size > 0 and size % 1024 == 0 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}" if 0 < size < 1024 else None


def page_size(resource: str) -> int | None:
    """Give the bytes of a page of this resource; None when it is not about huge pages."""
    if not resource.startswith(HUGE_PAGES_PREFIX):
        return None
    try:
        return int(Quantity.parse(resource.removeprefix(HUGE_PAGES_PREFIX)))
    except ValueError:
        return None


def page_limits(amounts: Resources, sizes: tuple[str, ...]) -> dict[str, int]:
    """Give bytes for every size that the machine has: what is not asked for is not to be used."""
    limits = dict.fromkeys(sizes, 0)
    for resource, amount in amounts.items():
        size = page_size(resource)
        name = kernel_size(size) if size is not None else None
        if name in limits:
            limits[name] += int(amount)
    return limits


def read_page_sizes(folders: Path = _FOLDERS) -> tuple[str, ...]:
    """Give the sizes that this machine has, as cgroup files write them, smallest first."""
    return tuple(name for size, _ in _read(folders) if (name := kernel_size(size)) is not None)


def read_huge_pages(folders: Path = _FOLDERS) -> Resources:
    """Give the bytes that are set aside for huge pages of each size."""
    return {
        f"{HUGE_PAGES_PREFIX}{Quantity.of(size, 'binary')}": Quantity.of(size * pages, "binary")
        for size, pages in _read(folders)
    }


def _read(folders: Path) -> list[tuple[int, int]]:
    found = []
    for folder in folders.glob("hugepages-*kB"):
        try:
            kilobytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
            found.append((kilobytes * 1024, int((folder / "nr_hugepages").read_text())))
        except (OSError, ValueError):
            continue
    return sorted(found)


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
