"""Which NUMA nodes suit everybody: the hints of all providers, merged into one.

Each way to pick one hint per resource gives a candidate, the nodes that all the picked ones have in
common; the best candidate wins. What everybody prefers is best. Candidates are ordered completely, so neither
the order of providers nor that of their hints matters. That also spares trying every combination, of which
eight NUMA nodes and four resources have four billion: only the distinct intermediate results are carried
along, and `hints_meet` finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pykubelet.resources.hints import ANYWHERE, Hint, Hints
from pykubelet.resources.hints_meet import meets

Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]

Distances = Mapping[int, Mapping[int, int]]
"""How far NUMA nodes are from each other, as the firmware counts: 10 is the node itself."""

_NO_PREFERENCE = Hint(None, preferred=True)
_IMPOSSIBLE = Hint(None, preferred=False)


@dataclass(frozen=True)
class Numa:
    """The machine's NUMA nodes; with distances where close ones shall be preferred over low numbers."""

    nodes: frozenset[int]
    distances: Distances = field(default_factory=dict)


def merge(policy: Policy, machine: Numa, providers: Iterable[Hints]) -> Hint:
    """Find the NUMA nodes for what all providers are asked for together."""
    if policy == "none":
        return ANYWHERE
    resources = _by_resource(providers)
    if policy != "single-numa-node":
        return _best(resources, machine)
    single = [[hint for hint in hints if _is_single(hint)] for hints in resources]
    best = _best(single, Numa(machine.nodes))
    return Hint(None, best.preferred) if best.nodes == machine.nodes else best


def admits(policy: Policy, merged: Hint) -> bool:
    """Whether a pod whose hints were merged to this may run."""
    return merged.preferred or policy in ("none", "best-effort")


def _by_resource(providers: Iterable[Hints]) -> list[list[Hint]]:
    found = []
    for hints in providers:
        if not hints:
            found.append([_NO_PREFERENCE])
        for some in hints.values():
            found.append([_NO_PREFERENCE] if some is None else some or [_IMPOSSIBLE])
    return found


def _is_single(hint: Hint) -> bool:
    return hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)


def _best(resources: Sequence[Sequence[Hint]], machine: Numa) -> Hint:
    distances = machine.distances

    def order(nodes: frozenset[int]) -> tuple[int, int]:
        apart = sum(distances[one][other] for one in nodes for other in nodes) if distances else 0
        return apart, _bits(nodes)

    if agreed := _agreed(resources, machine.nodes):
        size = min(map(len, agreed))
        return Hint(min((nodes for nodes in agreed if len(nodes) == size), key=order), preferred=True)
    common = _common(resources, machine.nodes)
    if not common:
        return Hint(machine.nodes, preferred=False)
    # What takes the most nodes decides how many are right when nothing is preferred.
    right_size = max(map(_fewest, resources), default=0)
    sizes = set(map(len, common))
    size = max((size for size in sizes if size <= right_size), default=min(sizes))
    return Hint(min((nodes for nodes in common if len(nodes) == size), key=order), preferred=False)


def _fewest(hints: Iterable[Hint]) -> int:
    return min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)


def _agreed(resources: Sequence[Sequence[Hint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Give the sets of nodes that every resource prefers, of those that prefer some at all."""
    wishes = [{hint.nodes for hint in hints if hint.preferred} for hints in resources]
    named = {wish for some in wishes for wish in some if wish is not None}
    agreed = {wish & nodes for wish in named if all(wish in some or None in some for some in wishes)}
    if all(None in some for some in wishes):
        agreed.add(nodes)
    return agreed - {frozenset()}


def _common(resources: Iterable[Iterable[Hint]], nodes: frozenset[int]) -> set[frozenset[int]]:
    """Give the nodes that any choice of one hint per resource has in common, where there are some."""
    everything = _bits(nodes)
    reached = {everything}
    for hints in resources:
        picks = {everything if hint.nodes is None else _bits(hint.nodes) & everything for hint in hints}
        reached = meets(reached, picks)
    return {frozenset(node for node in nodes if common >> node & 1) for common in reached if common}


def _bits(nodes: frozenset[int]) -> int:
    return sum(1 << node for node in nodes)
