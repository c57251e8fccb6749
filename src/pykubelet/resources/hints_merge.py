"""Which NUMA nodes suit everybody: the hints of all providers, merged into one.

Each way to pick one hint per resource gives a candidate, the nodes that all the picked ones have in
common; the best candidate wins. Candidates are ordered completely, so neither the order of providers nor
that of their hints matters. That also spares trying every combination, of which eight NUMA nodes
and four resources have four billion: only the distinct intermediate results are carried along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pykubelet.resources.hints import ANYWHERE, Hint, Hints, breadth

Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]

Distances = Mapping[int, Mapping[int, int]]
"""How far NUMA nodes are from each other, as the firmware counts: 10 is the node itself."""

_NO_PREFERENCE = Hint(None, preferred=True)
_IMPOSSIBLE = Hint(None, preferred=False)
_ALL_NODES = -1
"""As bits: the common nodes as long as no hint named any."""


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
    # What takes the most nodes decides how many are right when nothing is preferred.
    right_size = max((_fewest(hints) for hints in resources), default=0)
    distances = machine.distances

    def rank(hint: Hint) -> tuple[int, int, int, int, int]:
        nodes = hint.nodes or frozenset()
        size, bits = breadth(nodes)
        apart = sum(distances[one][other] for one in nodes for other in nodes) if distances else 0
        if hint.preferred:
            return 0, 0, size, apart, bits
        if size > right_size:
            return 1, 1, size, apart, bits
        return 1, 0, -size, apart, bits

    candidates = [hint for hint in _candidates(resources, machine.nodes) if hint.nodes]
    return min(candidates, key=rank, default=Hint(machine.nodes, preferred=False))


def _fewest(hints: Iterable[Hint]) -> int:
    return min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)


def _candidates(resources: Iterable[Iterable[Hint]], nodes: frozenset[int]) -> set[Hint]:
    """Give what any choice of one hint per resource leads to.

    A candidate is preferred when all its hints are, and all that name nodes name the same ones.
    """
    reached = {(_ALL_NODES, True)}
    for hints in resources:
        picks = {(_ALL_NODES if hint.nodes is None else _bits(hint.nodes), hint.preferred) for hint in hints}
        reached = {
            (common & bits, preferred and wanted and (_ALL_NODES in (common, bits) or common == bits))
            for common, preferred in reached
            for bits, wanted in picks
        }
    return {
        Hint(frozenset(node for node in nodes if common >> node & 1), preferred)
        for common, preferred in reached
    }


def _bits(nodes: frozenset[int]) -> int:
    return sum(1 << node for node in nodes)
