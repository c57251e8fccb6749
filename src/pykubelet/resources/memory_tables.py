"""How much memory of each NUMA node is given out: the tables, and the two ways to change them.

The shapes are those of the state file (`memory_state.py`). A container's memory comes from one node, or
from a group of nodes that then gives only to containers of the same group: a node never serves both.
Otherwise nobody could say which of a group's bytes lie on which of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pykubelet.resources.hints import PolicyError
from pykubelet.resources.memory_nodes import MemoryNode
from pykubelet.resources.memory_reserved import Reserved


class MemoryTable(msgspec.Struct, rename="camel"):
    """Bytes of one resource on one NUMA node: allocatable is total without what the system keeps."""

    total: int
    system_reserved: int
    allocatable: int
    reserved: int
    free: int


class NodeMemory(msgspec.Struct, rename="camel"):
    """A NUMA node: its tables by resource, and the group (`cells`) that it gives to, with itself.

    A container that has memory of several resources counts as as many assignments.
    """

    number_of_assignments: int
    memory_map: dict[str, MemoryTable]
    cells: list[int]


class Block(msgspec.Struct, rename="camel", frozen=True):
    """Bytes of one resource that a container has from a NUMA node, or from a group of them."""

    numa_affinity: tuple[int, ...]
    type: str
    size: int


Machine = dict[int, NodeMemory]
"""The NUMA nodes by number."""

Assignments = dict[str, dict[str, list[Block]]]
"""What containers have, by pod's uid and container's name."""


def untouched(nodes: Iterable[MemoryNode], reserved: Reserved) -> Machine:
    """Give the tables of a machine on which no container has any memory."""
    machine = {}
    for node in nodes:
        kept = reserved.get(node.number, {})
        tables = {
            resource: _table(size, 0, kept.get(resource, 0)) for resource, size in node.huge_pages.items()
        }
        # Huge pages are memory that was set aside: nobody else can have it.
        pages = sum(node.huge_pages.values())
        tables["memory"] = _table(node.memory, pages, kept.get("memory", 0))
        machine[node.number] = NodeMemory(0, tables, [node.number])
    return machine


def taken(machine: Machine, blocks: Iterable[Block]) -> Machine:
    """Give the tables after containers got these blocks, from the lowest node of a group first.

    Raises PolicyError when a block is of a node or a resource that the machine does not have.
    """
    changed = copied(machine)
    for block in blocks:
        left = block.size
        for number in block.numa_affinity:
            node = changed.get(number)
            table = node.memory_map.get(block.type) if node is not None else None
            if node is None or table is None:
                raise PolicyError(f"a container has {block.type} of NUMA node {number}, which there is not")
            node.number_of_assignments += 1
            node.cells = list(block.numa_affinity)
            part = min(left, table.free)
            table.free, table.reserved, left = table.free - part, table.reserved + part, left - part
    return changed


def given_back(machine: Machine, blocks: Iterable[Block]) -> Machine:
    """Give the tables after containers lost these blocks; a node that nobody uses leaves its group."""
    changed = copied(machine)
    for block in blocks:
        left = block.size
        for number in block.numa_affinity:
            node, table = changed[number], changed[number].memory_map[block.type]
            node.number_of_assignments -= 1
            if node.number_of_assignments == 0:
                node.cells = [number]
            part = min(left, table.reserved)
            table.free, table.reserved, left = table.free + part, table.reserved - part, left - part
    return changed


def same(one: Machine, other: Machine) -> bool:
    """Whether two tables say the same; how a group's use is spread over its nodes does not matter."""
    return _outline(one) == _outline(other)


def copied(machine: Machine) -> Machine:
    """Give tables that can be changed without changing these."""
    return {
        number: NodeMemory(
            node.number_of_assignments,
            {resource: msgspec.structs.replace(table) for resource, table in node.memory_map.items()},
            list(node.cells),
        )
        for number, node in machine.items()
    }


def total(machine: Machine, numbers: Iterable[int], resource: str, column: str) -> int:
    """Add up a column (`free`, `allocatable`, `reserved`) of a resource over NUMA nodes."""
    tables = (machine[number].memory_map.get(resource) for number in numbers)
    return sum(getattr(table, column) for table in tables if table is not None)


def _table(size: int, elsewhere: int, kept: int) -> MemoryTable:
    left = size - elsewhere - kept
    return MemoryTable(size, kept, left, 0, left)


def _outline(machine: Machine) -> Mapping[int, object]:
    return {number: _node_outline(machine, node) for number, node in machine.items()}


def _node_outline(machine: Machine, node: NodeMemory) -> Sequence[object]:
    known = [cell for cell in node.cells if cell in machine]
    tables = {
        resource: (
            (table.total, table.system_reserved, table.allocatable),
            (total(machine, known, resource, "free"), total(machine, known, resource, "reserved")),
        )
        for resource, table in node.memory_map.items()
    }
    return node.number_of_assignments, sorted(node.cells), tables
