"""Topology hints: the interface of the CPU, memory and device manager, and the merging of their hints.

Each manager is a `HintProvider`: it returns the sets of NUMA nodes from which it could serve a container, the
topology manager merges the hints of all, and each then allocates as close to the result as possible.
Providers do not know each other; this module is all they share.

Each selection of one hint per resource yields a candidate, the intersection of the selected sets; the best
candidate wins, and one that all resources prefer is best. Candidates are totally ordered, so the order of
providers and of hints does not matter. That also avoids trying every combination, of which eight NUMA nodes
and four resources have four billion: only the distinct intermediate results are kept.

`intersections` computes the intersections of two collections of sets, as bit masks, in bounded time. Two
resources on a host of sixteen nodes have sixty thousand hints each, and trying each pair would block the
kubelet for an hour. For all sets together it is fast to count how many members of a collection contain a
given set; an intersection contains a set if both operands do, so these counts multiply, and inverting the
product shows which sets are exact intersections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import add, mul, sub
from typing import Literal, Protocol

from pykubelet.api.pod import Container, Pod


@dataclass(frozen=True)
class TopologyHint:
    """A set of NUMA nodes that can serve a request; `nodes` of None means any.

    A preferred hint has no more nodes than the request would need on an empty host.
    """

    nodes: frozenset[int] | None
    preferred: bool


Hints = dict[str, list[TopologyHint] | None]
"""Hints by resource. None: no preference; an empty list: no set of nodes can serve the request.

An empty dictionary means that the provider has no preference for any resource.
"""
ANYWHERE = TopologyHint(None, preferred=False)
"""Chosen hint if topology does not matter: with the policy `none`."""


class HintProvider(Protocol):
    """Manager of a resource that belongs to NUMA nodes."""

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Return the hints for a container; an existing allocation is hinted again."""

    def pod_hints(self, pod: Pod) -> Hints:
        """Return the hints for all the pod's containers together; for the scope `pod`."""

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None] | None:
        """Allocate a container's resources from the chosen nodes; no-op if it has them.

        Returns None when done, or an awaitable if a plugin must be called. Raises AllocationError.
        """


class AllocationError(Exception):
    """Raised when a container's resources cannot be allocated.

    `reason` is for the pod's status: None if upstream has no specific reason and reports an unexpected error.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class PolicyError(Exception):
    """Raised when the host, its configuration or a state file does not allow a manager's policy.

    The text is one line with the cause and the remedy. The kubelet does not start, because it would have to
    guess.
    """


def node_sets(nodes: Iterable[int]) -> Iterator[frozenset[int]]:
    """Yield every non-empty set of these NUMA nodes: small before large, low numbers first."""
    ordered = sorted(nodes)
    for size in range(1, len(ordered) + 1):
        yield from map(frozenset, combinations(ordered, size))


def breadth(nodes: frozenset[int]) -> tuple[int, int]:
    """Return the sort key of a set of nodes: fewer nodes first, then the lower highest number."""
    return len(nodes), sum(1 << node for node in nodes)


def intersections(left: Collection[int], right: Collection[int]) -> set[int]:
    """Return the intersections of each of `left` with each of `right`."""
    places = _places(left, right)
    if not places or len(left) * len(right) <= 3 * len(places) << len(places):
        return {mask & other_mask for mask in left for other_mask in right}
    if len(places) != places[-1] + 1:
        packed = intersections(
            {_packed(mask, places) for mask in left}, {_packed(mask, places) for mask in right}
        )
        return {_spread(mask, places) for mask in packed}
    counts = list(map(mul, _containing(left, len(places)), _containing(right, len(places))))
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(sub, counts[half], counts[begin + size : begin + 2 * size])
    return {number for number, count in enumerate(counts) if count}


def _containing(sets: Collection[int], bits: int) -> list[int]:
    """Return for each set of `bits` bits how many of these sets contain it."""
    counts = [0] * (1 << bits)
    for mask in sets:
        counts[mask] += 1
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(add, counts[half], counts[begin + size : begin + 2 * size])
    return counts


def _halves(counts: list[int]) -> list[int]:
    return [1 << bit for bit in range(len(counts).bit_length() - 1)]


def _places(left: Collection[int], right: Collection[int]) -> list[int]:
    """Return the positions of all bits that are set anywhere: node numbers may have gaps."""
    union = 0
    for mask in (*left, *right):
        union |= mask
    return [place for place in range(union.bit_length()) if union >> place & 1]


def _packed(number: int, places: list[int]) -> int:
    return sum(1 << index for index, place in enumerate(places) if number >> place & 1)


def _spread(number: int, places: list[int]) -> int:
    return sum(1 << place for index, place in enumerate(places) if number >> index & 1)


Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]
Distances = Mapping[int, Mapping[int, int]]
"""Distances between NUMA nodes as reported by the firmware; 10 is the node itself."""
_NO_PREFERENCE = TopologyHint(None, preferred=True)
_IMPOSSIBLE = TopologyHint(None, preferred=False)


@dataclass(frozen=True)
class NumaTopology:
    """NUMA nodes of the host; with distances if close nodes are preferred over low numbers."""

    nodes: frozenset[int]
    distances: Distances = field(default_factory=dict)


def merge(policy: Policy, machine: NumaTopology, providers: Iterable[Hints]) -> TopologyHint:
    """Return the merged hint for the resources of all providers."""
    if policy == "none":
        return ANYWHERE
    resources = _by_resource(providers)
    if policy != "single-numa-node":
        return _best(resources, machine)
    single = [[hint for hint in hints if _is_single(hint)] for hints in resources]
    best = _best(single, NumaTopology(machine.nodes))
    return TopologyHint(None, best.preferred) if best.nodes == machine.nodes else best


def admits(policy: Policy, merged: TopologyHint) -> bool:
    """Return whether the policy admits a pod with this merged hint."""
    return merged.preferred or policy in ("none", "best-effort")


def _by_resource(providers: Iterable[Hints]) -> list[list[TopologyHint]]:
    found = []
    for hints in providers:
        if not hints:
            found.append([_NO_PREFERENCE])
        for some in hints.values():
            found.append([_NO_PREFERENCE] if some is None else some or [_IMPOSSIBLE])
    return found


def _is_single(hint: TopologyHint) -> bool:
    return hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)


def _best(resources: Sequence[Sequence[TopologyHint]], machine: NumaTopology) -> TopologyHint:
    distances = machine.distances

    def order(nodes: frozenset[int]) -> tuple[int, int]:
        apart = sum(distances[node][other_node] for node in nodes for other_node in nodes) if distances else 0
        return apart, _bits(nodes)

    if agreed := _agreed(resources, machine.nodes):
        size = min(map(len, agreed))
        return TopologyHint(min((nodes for nodes in agreed if len(nodes) == size), key=order), preferred=True)
    common = _common(resources, machine.nodes)
    if not common:
        return TopologyHint(machine.nodes, preferred=False)
    # Without a common preference, the resource that needs the most nodes determines their number.
    right_size = max(map(_fewest, resources), default=0)
    sizes = set(map(len, common))
    size = max((size for size in sizes if size <= right_size), default=min(sizes))
    return TopologyHint(min((nodes for nodes in common if len(nodes) == size), key=order), preferred=False)


def _fewest(hints: Iterable[TopologyHint]) -> int:
    return min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)


def _agreed(resources: Sequence[Sequence[TopologyHint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Return the sets of nodes that every resource with a preference prefers."""
    preferences = [{hint.nodes for hint in hints if hint.preferred} for hints in resources]
    named = {node_set for preferred in preferences for node_set in preferred if node_set is not None}
    agreed = {
        node_set & nodes
        for node_set in named
        if all(node_set in preferred or None in preferred for preferred in preferences)
    }
    if all(None in preferred for preferred in preferences):
        agreed.add(nodes)
    return agreed - {frozenset()}


def _common(resources: Iterable[Iterable[TopologyHint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Return the non-empty intersections of all selections of one hint per resource."""
    all_bits = _bits(nodes)
    reached = {all_bits}
    for hints in resources:
        picks = {all_bits if hint.nodes is None else _bits(hint.nodes) & all_bits for hint in hints}
        reached = intersections(reached, picks)
    return {frozenset(node for node in nodes if common >> node & 1) for common in reached if common}


def _bits(nodes: frozenset[int]) -> int:
    return sum(1 << node for node in nodes)
