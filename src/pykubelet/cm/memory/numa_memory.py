"""Memory tables of NUMA nodes: allocation, release, topology hints and node selection. Pure functions.

The structures are those of the state file (`state.py`). A container's memory comes from one node, or from a
group of nodes that then serves only containers of the same group: a node never serves both, because it would
be unknown which bytes of a group are on which of its nodes.

`reusable` is memory of the pod's init containers that its later containers may reuse: it counts only for
exactly the nodes where it is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.memory.numa_nodes import MemoryNode, Reserved, is_memory
from pykubelet.cm.topology.hints import AllocationError, Hints, PolicyError, TopologyHint, breadth, node_sets


class MemoryTable(msgspec.Struct, rename="camel"):
    """Bytes of one resource on one NUMA node.

    `allocatable` is `total` minus `system_reserved`, and for plain memory also minus the huge pages.
    """

    total: int
    system_reserved: int
    allocatable: int
    reserved: int
    free: int


class NodeMemory(msgspec.Struct, rename="camel"):
    """A NUMA node: its tables by resource, and the group of nodes (`cells`) that it serves, with itself.

    A container with memory of several resources counts as that many assignments.
    """

    number_of_assignments: int
    memory_map: dict[str, MemoryTable]
    cells: list[int]


class MemoryBlock(msgspec.Struct, rename="camel", frozen=True):
    """Bytes of one resource allocated to a container from a NUMA node, or from a group of nodes."""

    numa_affinity: tuple[int, ...]
    type: str
    size: int


Machine = dict[int, NodeMemory]
"""NUMA nodes by number."""
Assignments = dict[str, dict[str, list[MemoryBlock]]]
"""Allocated blocks by pod UID and container name."""


def untouched(nodes: Iterable[MemoryNode], reserved: Reserved) -> Machine:
    """Return the tables of a host without any allocation."""
    machine = {}
    for node in nodes:
        node_reserved = reserved.get(node.number, {})
        tables = {
            resource: _table(size, 0, node_reserved.get(resource, 0))
            for resource, size in node.huge_pages.items()
        }
        # Huge pages are set aside from the memory of the node.
        pages = sum(node.huge_pages.values())
        tables["memory"] = _table(node.memory, pages, node_reserved.get("memory", 0))
        machine[node.number] = NodeMemory(0, tables, [node.number])
    return machine


def with_allocated(machine: Machine, blocks: Iterable[MemoryBlock]) -> Machine:
    """Return the tables after allocating these blocks, from the lowest node of a group first.

    Raises PolicyError when a block is of a node or a resource that the host does not have.
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


def with_released(machine: Machine, blocks: Iterable[MemoryBlock]) -> Machine:
    """Return the tables after releasing these blocks; an unused node leaves its group."""
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


def same(left: Machine, right: Machine) -> bool:
    """Return whether two tables are equal, regardless of how usage is spread over the nodes of a group."""
    return _outline(left) == _outline(right)


def copied(machine: Machine) -> Machine:
    """Return a copy of the tables that can be changed independently."""
    return {
        number: NodeMemory(
            node.number_of_assignments,
            {resource: msgspec.structs.replace(table) for resource, table in node.memory_map.items()},
            list(node.cells),
        )
        for number, node in machine.items()
    }


def total(machine: Machine, numbers: Iterable[int], resource: str, column: str) -> int:
    """Return the sum of a column (`free`, `allocatable`, `reserved`) of a resource over NUMA nodes."""
    tables = (machine[number].memory_map.get(resource) for number in numbers)
    return sum(getattr(table, column) for table in tables if table is not None)


def _table(size: int, huge_pages: int, reserved: int) -> MemoryTable:
    left = size - huge_pages - reserved
    return MemoryTable(size, reserved, left, 0, left)


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


Requests = dict[str, int]
"""Bytes by resource."""
Reusable = Mapping[frozenset[int], Mapping[str, int]]
"""Bytes by set of NUMA nodes and by resource."""


def container_requests(container: Container) -> Requests:
    """Return a container's memory requests. Raises AllocationError for fractions of bytes."""
    requests = {name: amount for name, amount in container.resources.requests.items() if is_memory(name)}
    if not all(amount.is_integer for amount in requests.values()):
        raise AllocationError("[memorymanager] failed to represent quantity as int64")
    # A request of 0 is not a request: the host may not even have the resource.
    return {name: int(amount) for name, amount in requests.items() if amount.nanos > 0}


def pod_requests(pod: Pod) -> Requests:
    """Return the peak memory requests of a pod's containers.

    Init containers run one by one, each next to the sidecars before it. Resources that only init containers
    request do not count.
    """
    sidecars: Requests = {}
    peak: Requests = {}
    for container in pod.spec.init_containers:
        for name, size in container_requests(container).items():
            if container.restart_policy == "Always":
                sidecars[name] = sidecars.get(name, 0) + size
            else:
                peak[name] = max(peak.get(name, 0), sidecars.get(name, 0) + size)
    apps: Requests = {}
    for container in pod.spec.containers:
        for name, size in container_requests(container).items():
            apps[name] = apps.get(name, 0) + size
    return {name: max(size + sidecars.get(name, 0), peak.get(name, 0)) for name, size in apps.items()}


def possible_nodes(machine: Machine, requests: Requests, reusable: Reusable) -> list[TopologyHint]:
    """Return a hint for every set of NUMA nodes with enough memory for all resources of the request.

    Preferred are those with as few nodes as the request would need on an empty host.
    """
    fewest = len(machine)
    found = []
    for nodes in node_sets(machine):
        if not all(total(machine, nodes, name, "allocatable") >= size for name, size in requests.items()):
            continue
        fewest = min(fewest, len(nodes))
        if joins_groups(machine, nodes) and _fits(machine, nodes, requests, reusable.get(nodes, {})):
            found.append(nodes)
    return [TopologyHint(nodes, preferred=len(nodes) == fewest) for nodes in found]


def hints_for(machine: Machine, requests: Requests, reusable: Reusable) -> Hints:
    """Return the hints of a request. Without enough memory there is no hint, not an impossible one.

    The allocation then rejects the pod with the reason.
    """
    found = possible_nodes(machine, requests, reusable)
    return {name: list(found) for name in requests} if found else {}


def hints_again(blocks: Sequence[MemoryBlock], requests: Requests) -> Hints:
    """Return the hints of a container that has memory already: exactly the nodes that it has.

    Empty if its allocation differs from its requests.
    """
    if {block.type: block.size for block in blocks} != requests:
        return {}
    return {block.type: [TopologyHint(frozenset(block.numa_affinity), preferred=True)] for block in blocks}


def choose_nodes(
    machine: Machine, requests: Requests, reusable: Reusable, chosen: TopologyHint
) -> frozenset[int]:
    """Return the NUMA nodes that serve a request, based on the choice of the topology manager.

    That choice may be too small for this request, because it is the intersection of all providers' hints:
    then it is extended. Raises AllocationError.
    """
    nodes, preferred = chosen.nodes, chosen.preferred
    if nodes is None:
        found = possible_nodes(machine, requests, reusable) if requests else []
        if not found:
            raise AllocationError(
                "[memorymanager] failed to get the default NUMA affinity, "
                "no NUMA nodes with enough memory is available"
            )
        best = _best(found)
        if preferred and not best.preferred:
            raise AllocationError("[memorymanager] failed to find the default preferred hint")
        nodes, preferred = best.nodes or frozenset(), best.preferred
    # A single node of a group must not serve a container alone, so it is extended to its group.
    alone = len(nodes) == 1 and not joins_groups(machine, nodes)
    if alone or not _fits(machine, nodes, requests, {}):
        wider = [
            hint for hint in possible_nodes(machine, requests, reusable) if hint.nodes and nodes <= hint.nodes
        ]
        if not wider:
            raise AllocationError(
                "[memorymanager] failed to find NUMA nodes to extend the current topology hint"
            )
        best = _best(wider)
        if preferred and not best.preferred:
            raise AllocationError("[memorymanager] failed to find the extended preferred hint")
        nodes = best.nodes or frozenset()
    if not joins_groups(machine, nodes):
        raise AllocationError("[memorymanager] preferred hint violates NUMA node allocation")
    return nodes


def joins_groups(machine: Machine, nodes: frozenset[int]) -> bool:
    """Return whether nodes can serve as a group: each is unused, or used with exactly the others."""
    if len(nodes) == 1:
        return all(len(machine[number].cells) == 1 for number in nodes)
    return all(
        machine[number].number_of_assignments == 0 or frozenset(machine[number].cells) == nodes
        for number in nodes
    )


def _fits(machine: Machine, nodes: frozenset[int], requests: Requests, reusable: Mapping[str, int]) -> bool:
    return all(
        total(machine, nodes, name, "free") + reusable.get(name, 0) >= size for name, size in requests.items()
    )


def _best(hints: Iterable[TopologyHint]) -> TopologyHint:
    return min(hints, key=lambda hint: (not hint.preferred, breadth(hint.nodes or frozenset())))
