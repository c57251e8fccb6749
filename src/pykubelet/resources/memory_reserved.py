"""How much memory of each NUMA node the system keeps, and whether that adds up.

It is said twice: per NUMA node (`reservedMemory`) for the memory manager, and in total (`kubeReserved`,
`systemReserved`, `evictionHard`) for the scheduler. The static policy needs both to be the same, or
pods would be promised memory that no node has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import MemoryReservation
from pykubelet.resources.hints import PolicyError
from pykubelet.resources.memory_nodes import MemoryNode
from pykubelet.resources.qos import HUGE_PAGES_PREFIX

Reserved = Mapping[int, Mapping[str, int]]
"""Bytes that pods do not get, by NUMA node and resource."""

_NOTHING = Quantity.of(0)


def is_memory(resource: str) -> bool:
    """Whether a resource is memory of NUMA nodes: plain or in huge pages."""
    return resource == "memory" or resource.startswith(HUGE_PAGES_PREFIX)


def reserved_by_node(
    nodes: Sequence[MemoryNode], reservations: Sequence[MemoryReservation], kept: Resources
) -> Reserved:
    """Give what is reserved of each NUMA node; `kept` is what the whole machine keeps from pods.

    Raises PolicyError when the two do not agree, or the machine does not have that much.
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
            if not amount.is_whole:
                raise PolicyError(f"reservedMemory: {text} of {resource} is not a whole number of bytes")
            totals[resource] = totals.get(resource, 0) + amount.nanos
            reserved[number][resource] = int(amount)
    for resource in sorted({*totals, *filter(is_memory, kept)}):
        _check_total(resource, totals.get(resource, 0), kept.get(resource, _NOTHING).nanos)
    if not totals.get("memory"):
        raise PolicyError(
            "memoryManagerPolicy: Static needs memory that is reserved for the system: set reservedMemory, "
            "with a sum that equals kubeReserved + systemReserved + evictionHard"
        )
    for node in nodes:
        _check_node(node, reserved[node.number])
    return reserved


def _check_total(resource: str, total: int, kept: int) -> None:
    if total != kept:
        raise PolicyError(
            f"reservedMemory: the total amount {Quantity(total, 'binary')} of {resource} over all NUMA nodes "
            f"is not equal to {Quantity(kept, 'binary')}, which kubeReserved, systemReserved, evictionHard "
            "keep from pods: make them the same"
        )


def _check_node(node: MemoryNode, reserved: Mapping[str, int]) -> None:
    has = dict(node.huge_pages) | {"memory": node.memory - sum(node.huge_pages.values())}
    for resource, amount in reserved.items():
        if amount > has.get(resource, 0):
            raise PolicyError(
                f"reservedMemory: {Quantity.of(amount, 'binary')} of {resource} is reserved but NUMA node "
                f"{node.number} has only {Quantity.of(has.get(resource, 0), 'binary')}: reserve less there"
            )
