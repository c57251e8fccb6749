"""From which NUMA nodes a request for memory could be served, and from which it is.

Pure functions of the tables. `reusable` is memory that the pod's init containers had and that its later
containers may have instead: it counts only for exactly the nodes where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pykubelet.api.pod import Container, Pod
from pykubelet.resources.hints import AllocationError, Hint, Hints, breadth, node_sets
from pykubelet.resources.memory_reserved import is_memory
from pykubelet.resources.memory_tables import Block, Machine, total

Requests = dict[str, int]
"""Bytes by resource."""

Reusable = Mapping[frozenset[int], Mapping[str, int]]
"""Bytes by the NUMA nodes where they lie and by resource."""


def container_requests(container: Container) -> Requests:
    """Give the memory that a container asks for; raises AllocationError for parts of bytes."""
    requests = {name: amount for name, amount in container.resources.requests.items() if is_memory(name)}
    if not all(amount.is_whole for amount in requests.values()):
        raise AllocationError("[memorymanager] failed to represent quantity as int64")
    # Asking for none of something is not asking for it: the machine may not even have it.
    return {name: int(amount) for name, amount in requests.items() if amount.nanos > 0}


def pod_requests(pod: Pod) -> Requests:
    """Give the most memory that a pod's containers ask for at one time.

    Init containers run one by one, each next to the sidecars before it. Resources that no container but
    an init container asks for do not count.
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


def possible_nodes(machine: Machine, requests: Requests, reusable: Reusable) -> list[Hint]:
    """Give every set of NUMA nodes that has room; the same for all resources of the request.

    Preferred are those of as few nodes as would do if nobody else had any memory.
    """
    fewest = len(machine)
    found = []
    for nodes in node_sets(machine):
        if not all(total(machine, nodes, name, "allocatable") >= size for name, size in requests.items()):
            continue
        fewest = min(fewest, len(nodes))
        if joins_groups(machine, nodes) and _fits(machine, nodes, requests, reusable.get(nodes, {})):
            found.append(nodes)
    return [Hint(nodes, preferred=len(nodes) == fewest) for nodes in found]


def hints_for(machine: Machine, requests: Requests, reusable: Reusable) -> Hints:
    """Give the hints of a request. Where there is no room at all that is no hint, not an impossible one.

    Such a pod is then refused by the allocation, which can say why.
    """
    found = possible_nodes(machine, requests, reusable)
    return {name: list(found) for name in requests} if found else {}


def hints_again(blocks: Sequence[Block], requests: Requests) -> Hints:
    """Give the hints of a container that has memory already: that it wants what it has.

    When it has something else than it asks for there is nothing to prefer.
    """
    if {block.type: block.size for block in blocks} != requests:
        return {}
    return {block.type: [Hint(frozenset(block.numa_affinity), preferred=True)] for block in blocks}


def choose_nodes(machine: Machine, requests: Requests, reusable: Reusable, chosen: Hint) -> frozenset[int]:
    """Decide which NUMA nodes serve a request, given what the topology manager chose.

    Its choice may be too small for this request alone, being what all providers have in common: then it
    is extended. Raises AllocationError.
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
    # A single node of a group must not serve anybody alone, so it is extended to its group.
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
    """Whether nodes can serve together: each is unused, or was used together with exactly the others."""
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


def _best(hints: Iterable[Hint]) -> Hint:
    return min(hints, key=lambda hint: (not hint.preferred, breadth(hint.nodes or frozenset())))
