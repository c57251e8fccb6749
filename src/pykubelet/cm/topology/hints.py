"""What those who give out CPUs, memory and devices have to agree on: which NUMA nodes to take them from.

Each of them is a `HintProvider`: it says from which sets of NUMA nodes it could serve a container, the
topology manager finds the set that suits all, and each then allocates as near to it as it can. Nobody
knows the others; this file is all they share.

Which NUMA nodes suit everybody: the hints of all providers, merged into one.

Each way to pick one hint per resource gives a candidate, the nodes that all the picked ones have in
common; the best candidate wins. What everybody prefers is best. Candidates are ordered completely, so neither
the order of providers nor that of their hints matters. That also spares trying every combination, of which
eight NUMA nodes and four resources have four billion: only the distinct intermediate results are carried
along, and `hints_meet` finds them.

What sets of NUMA nodes have in common, for many sets: a pure function with a bounded price.

Sets are bits of a number. Two resources on a machine of sixteen nodes have sixty thousand hints each, and
trying each pair would hold up the agent for an hour. How many sets contain a given one is quickly counted
for all of them at once; what is common to a pair contains a set if both do, so these counts multiply, and
from the product it can be told which sets are met exactly.
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
    """A set of NUMA nodes that would do; `nodes` of None: any would.

    A preferred one needs no more nodes than the request would need on an empty machine.
    """

    nodes: frozenset[int] | None
    preferred: bool


Hints = dict[str, list[TopologyHint] | None]
"""Hints by resource. None: no preference; an empty list: no set of nodes can serve the request.

An empty dictionary means that the provider has no preference about anything.
"""
ANYWHERE = TopologyHint(None, preferred=False)
"""The chosen hint where topology does not matter: with the policy `none`."""


class HintProvider(Protocol):
    """One who gives out something that belongs to NUMA nodes."""

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Say where a container could be served; what it already has, it gets again."""

    def pod_hints(self, pod: Pod) -> Hints:
        """Say where all the pod's containers could be served together; for the scope `pod`."""

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None] | None:
        """Give a container what it asks for, from the chosen nodes; does nothing for one that has it.

        At once, or as something to wait for: who has to ask a plugin cannot answer at once. Raises
        AllocationError.
        """


class AllocationError(Exception):
    """What a container asks for cannot be given.

    `reason` is the pod's: None where the reference has no name for it, which it then calls unexpected.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class PolicyError(Exception):
    """This machine, its configuration or a state file does not allow a manager's policy.

    One line with the cause and the remedy: an agent that went on would be guessing.
    """


def node_sets(nodes: Iterable[int]) -> Iterator[frozenset[int]]:
    """Give every set of these NUMA nodes but the empty one: small before large, low numbers first."""
    ordered = sorted(nodes)
    for size in range(1, len(ordered) + 1):
        yield from map(frozenset, combinations(ordered, size))


def breadth(nodes: frozenset[int]) -> tuple[int, int]:
    """Order sets of nodes: fewer nodes are narrower, then those with the lower highest number."""
    return len(nodes), sum(1 << node for node in nodes)


def meets(some: Collection[int], others: Collection[int]) -> set[int]:
    """Give what each of `some` has in common with each of `others`."""
    places = _places(some, others)
    if not places or len(some) * len(others) <= 3 * len(places) << len(places):
        return {one & other for one in some for other in others}
    if len(places) != places[-1] + 1:
        packed = meets({_packed(one, places) for one in some}, {_packed(one, places) for one in others})
        return {_spread(one, places) for one in packed}
    counts = list(map(mul, _containing(some, len(places)), _containing(others, len(places))))
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(sub, counts[half], counts[begin + size : begin + 2 * size])
    return {number for number, count in enumerate(counts) if count}


def _containing(sets: Collection[int], bits: int) -> list[int]:
    """Count for each set of so many bits how many of these sets contain it."""
    counts = [0] * (1 << bits)
    for one in sets:
        counts[one] += 1
    for size in _halves(counts):
        for begin in range(0, len(counts), 2 * size):
            half = slice(begin, begin + size)
            counts[half] = map(add, counts[half], counts[begin + size : begin + 2 * size])
    return counts


def _halves(counts: list[int]) -> list[int]:
    return [1 << bit for bit in range(len(counts).bit_length() - 1)]


def _places(some: Collection[int], others: Collection[int]) -> list[int]:
    """Give the bits that are anywhere set: numbers of nodes may have gaps."""
    union = 0
    for one in (*some, *others):
        union |= one
    return [place for place in range(union.bit_length()) if union >> place & 1]


def _packed(number: int, places: list[int]) -> int:
    return sum(1 << index for index, place in enumerate(places) if number >> place & 1)


def _spread(number: int, places: list[int]) -> int:
    return sum(1 << place for index, place in enumerate(places) if number >> index & 1)


Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]
Distances = Mapping[int, Mapping[int, int]]
"""How far NUMA nodes are from each other, as the firmware counts: 10 is the node itself."""
_NO_PREFERENCE = TopologyHint(None, preferred=True)
_IMPOSSIBLE = TopologyHint(None, preferred=False)


@dataclass(frozen=True)
class NumaTopology:
    """The machine's NUMA nodes; with distances where close ones shall be preferred over low numbers."""

    nodes: frozenset[int]
    distances: Distances = field(default_factory=dict)


def merge(policy: Policy, machine: NumaTopology, providers: Iterable[Hints]) -> TopologyHint:
    """Find the NUMA nodes for what all providers are asked for together."""
    if policy == "none":
        return ANYWHERE
    resources = _by_resource(providers)
    if policy != "single-numa-node":
        return _best(resources, machine)
    single = [[hint for hint in hints if _is_single(hint)] for hints in resources]
    best = _best(single, NumaTopology(machine.nodes))
    return TopologyHint(None, best.preferred) if best.nodes == machine.nodes else best


def admits(policy: Policy, merged: TopologyHint) -> bool:
    """Whether a pod whose hints were merged to this may run."""
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
        apart = sum(distances[one][other] for one in nodes for other in nodes) if distances else 0
        return apart, _bits(nodes)

    if agreed := _agreed(resources, machine.nodes):
        size = min(map(len, agreed))
        return TopologyHint(min((nodes for nodes in agreed if len(nodes) == size), key=order), preferred=True)
    common = _common(resources, machine.nodes)
    if not common:
        return TopologyHint(machine.nodes, preferred=False)
    # What takes the most nodes decides how many are right when nothing is preferred.
    right_size = max(map(_fewest, resources), default=0)
    sizes = set(map(len, common))
    size = max((size for size in sizes if size <= right_size), default=min(sizes))
    return TopologyHint(min((nodes for nodes in common if len(nodes) == size), key=order), preferred=False)


def _fewest(hints: Iterable[TopologyHint]) -> int:
    return min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)


def _agreed(resources: Sequence[Sequence[TopologyHint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Give the sets of nodes that every resource prefers, of those that prefer some at all."""
    wishes = [{hint.nodes for hint in hints if hint.preferred} for hints in resources]
    named = {wish for some in wishes for wish in some if wish is not None}
    agreed = {wish & nodes for wish in named if all(wish in some or None in some for some in wishes)}
    if all(None in some for some in wishes):
        agreed.add(nodes)
    return agreed - {frozenset()}


def _common(resources: Iterable[Iterable[TopologyHint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Give the nodes that any choice of one hint per resource has in common, where there are some."""
    everything = _bits(nodes)
    reached = {everything}
    for hints in resources:
        picks = {everything if hint.nodes is None else _bits(hint.nodes) & everything for hint in hints}
        reached = meets(reached, picks)
    return {frozenset(node for node in nodes if common >> node & 1) for common in reached if common}


def _bits(nodes: frozenset[int]) -> int:
    return sum(1 << node for node in nodes)
