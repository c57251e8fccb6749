"""NUMA nodes of the host: memory, huge pages, distances, and the memory reserved on each.

Read from a tree with the layout of /sys and /proc, so that tests can define any host. The memory manager
allocates the memory of each node; distances decide between sets of nodes that are otherwise equal.

Reserved memory is configured twice: per NUMA node (`reservedMemory`) for the memory manager, and in total
(`kubeReserved`, `systemReserved`, `evictionHard`) for the scheduler. The static policy requires both to be
equal, or pods would be scheduled for memory that no NUMA node has left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import HUGE_PAGES_PREFIX
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.config.types import MemoryReservation

_MEMORY = re.compile(r"MemTotal:\s*(\d+) kB")


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: bytes of memory, bytes of huge pages by resource, distances by node."""

    number: int
    memory: int
    huge_pages: Mapping[str, int] = field(default_factory=dict)
    distances: Mapping[int, int] = field(default_factory=dict)


def read_memory_nodes(root: Path = Path("/")) -> list[MemoryNode]:
    """Read the NUMA nodes of the host, lowest number first.

    A kernel without NUMA is one node with all memory. Raises OSError when /sys or /proc cannot be read.
    """
    directory = root / "sys/devices/system/node"
    numbers = sorted(
        int(path.name.removeprefix("node"))
        for path in directory.glob("node[0-9]*")
        if path.name.removeprefix("node").isdigit()
    )
    if not numbers:
        pages = _huge_pages(root / "sys/kernel/mm/hugepages")
        return [MemoryNode(0, _memory((root / "proc/meminfo").read_text()), pages)]
    return [_read(directory / f"node{number}", number, numbers) for number in numbers]


def _read(directory: Path, number: int, numbers: list[int]) -> MemoryNode:
    try:
        columns = (directory / "distance").read_text().split()
    except FileNotFoundError:
        columns = []
    # The kernel writes one column per existing node, and numbers may have gaps.
    distances = dict(zip(numbers, map(int, columns), strict=True)) if len(columns) == len(numbers) else {}
    memory = _memory((directory / "meminfo").read_text())
    return MemoryNode(number, memory, _huge_pages(directory / "hugepages"), distances)


def _memory(meminfo: str) -> int:
    found = _MEMORY.search(meminfo)
    return int(found[1]) * 1024 if found else 0


def _huge_pages(directory: Path) -> dict[str, int]:
    found = {}
    for path in directory.glob("hugepages-*kB"):
        size = int(path.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        pages = int((path / "nr_hugepages").read_text())
        found[f"{HUGE_PAGES_PREFIX}{Quantity.from_units(size, 'binary')}"] = size * pages
    return found


Reserved = Mapping[int, Mapping[str, int]]
"""Bytes that pods cannot use, by NUMA node and resource."""
_ZERO = Quantity.from_units(0)


def is_memory(resource: str) -> bool:
    """Return whether a resource is memory of NUMA nodes: plain memory or huge pages."""
    return resource == "memory" or resource.startswith(HUGE_PAGES_PREFIX)


def reserved_by_node(
    nodes: Sequence[MemoryNode], reservations: Sequence[MemoryReservation], total_reserved: Resources
) -> Reserved:
    """Return the reserved bytes of each NUMA node; `total_reserved` are the host's total reservations.

    Raises PolicyError when the two differ, or the host does not have that much.
    """
    reserved: dict[int, dict[str, int]] = {node.number: {} for node in nodes}
    totals: dict[str, int] = {}
    for reservation in reservations:
        number = reservation.numa_node
        if number not in reserved:
            raise PolicyError(
                f"reservedMemory names NUMA node {number}, which this machine does not have: "
                f"its nodes are {', '.join(map(str, reserved))}"
            )
        for resource, text in reservation.limits.items():
            amount = Quantity.parse(text)
            if not amount.is_integer:
                raise PolicyError(f"reservedMemory: {text} of {resource} is not a whole number of bytes")
            totals[resource] = totals.get(resource, 0) + amount.nanos
            reserved[number][resource] = int(amount)
    for resource in sorted({*totals, *filter(is_memory, total_reserved)}):
        _check_total(resource, totals.get(resource, 0), total_reserved.get(resource, _ZERO).nanos)
    if not totals.get("memory"):
        raise PolicyError(
            "memoryManagerPolicy: Static needs memory that is reserved for the system: set reservedMemory, "
            "with a sum that equals kubeReserved + systemReserved + evictionHard"
        )
    for node in nodes:
        _check_node(node, reserved[node.number])
    return reserved


def _check_total(resource: str, total: int, expected: int) -> None:
    if total != expected:
        raise PolicyError(
            f"reservedMemory: the total amount {Quantity(total, 'binary')} of {resource} over all NUMA nodes "
            f"is not equal to {Quantity(expected, 'binary')}, which kubeReserved, systemReserved, "
            "evictionHard keep from pods: make them the same"
        )


def _check_node(node: MemoryNode, reserved: Mapping[str, int]) -> None:
    has = dict(node.huge_pages) | {"memory": node.memory - sum(node.huge_pages.values())}
    for resource, amount in reserved.items():
        if amount > has.get(resource, 0):
            raise PolicyError(
                f"reservedMemory: {Quantity.from_units(amount, 'binary')} of {resource} is reserved "
                f"but NUMA node {node.number} has only "
                f"{Quantity.from_units(has.get(resource, 0), 'binary')}: reserve less there"
            )
