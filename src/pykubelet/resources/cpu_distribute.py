"""Taking CPUs equally from several NUMA nodes, for the option `distribute-cpus-across-numa`.

A program that runs on two NUMA nodes is as slow as the one with fewer CPUs. So when a request does not
fit into one node, it is split evenly among the fewest nodes that can give equal parts; what cannot be
divided goes where it leaves the machine most balanced: where the numbers of CPUs left free on the nodes
deviate least from each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from pykubelet.resources.cpu_assign import CpuOptions, order_nodes, take_packed
from pykubelet.resources.cpu_topology import CpuTopology


def take(topology: CpuTopology, available: frozenset[int], count: int, options: CpuOptions) -> frozenset[int]:
    """Take this many of the available CPUs, the way the options want it; raises AllocationError."""
    if not options.across_nodes:
        return take_packed(topology, available, count, spread=options.spread, by_cache=options.by_cache)
    unit = topology.cpus_per_core if options.whole_cores else 1
    split = None
    if count > 0 and count % unit == 0:
        split = _best_split(topology, available, count, unit)
    if split is None:
        return take_packed(topology, available, count, spread=options.spread)
    taken: frozenset[int] = frozenset()
    for node, part in split.parts:
        free = topology.groups("node", available - taken)[node]
        taken |= take_packed(topology, free, part, spread=options.spread)
    return taken


@dataclass(frozen=True)
class _Split:
    """A way to divide a request, and how unbalanced it would leave the machine."""

    parts: list[tuple[int, int]]
    """NUMA nodes, each with the number of CPUs to take at once; nodes may repeat."""
    imbalance: float


def _best_split(topology: CpuTopology, available: frozenset[int], count: int, unit: int) -> _Split | None:
    free = {node: len(cpus) for node, cpus in topology.groups("node", available).items()}
    ordered = order_nodes(topology, available)
    if sum(free.values()) < count:
        return None
    units = count // unit
    units_per_node = _divided_up(_divided_up(len(topology.cpus), unit), len(topology.nodes))
    for size in range(_divided_up(units, units_per_node), min(units, len(free)) + 1):
        splits = (
            split
            for nodes in combinations(ordered, size)
            if (split := _split_among(nodes, free, count, unit)) is not None
        )
        # The first of the best: the order of nodes decides between equals.
        if (best := min(splits, key=lambda split: split.imbalance, default=None)) is not None:
            return best
    return None


def _split_among(nodes: tuple[int, ...], free: dict[int, int], count: int, unit: int) -> _Split | None:
    """Divide a request evenly among these nodes; None when they cannot give their parts."""
    share = count // len(nodes) // unit * unit
    whole_units = sum(free[node] // unit * unit for node in nodes)
    if whole_units < count or any(free[node] < share for node in nodes):
        return None
    left = {node: amount - share if node in nodes else amount for node, amount in free.items()}
    parts = [(node, share) for node in nodes]
    rest = count - share * len(nodes)
    if rest == 0:
        return _Split(parts, _deviation(left))
    givers = [node for node in nodes if left[node] >= unit]
    splits = (
        _Split(parts + extra, _deviation(after))
        # As many nodes as possible share the rest, among equals.
        for size in range(len(givers), 0, -1)
        for subset in combinations(givers, size)
        for extra, after in _deal(subset, left, rest, unit)
    )
    return min(splits, key=lambda split: split.imbalance, default=None)


def _deal(
    nodes: tuple[int, ...], left: dict[int, int], rest: int, unit: int
) -> Iterator[tuple[list[tuple[int, int]], dict[int, int]]]:
    """Take the rest from these nodes in turn, one unit at a time; nothing when they have not enough."""
    if sum(left[node] // unit * unit for node in nodes) < rest:
        return
    after, extra = dict(left), []
    while rest > 0:
        for node in nodes:
            if rest > 0 and after[node] >= unit:
                after[node] -= unit
                rest -= unit
                extra.append((node, unit))
    yield extra, after


def _deviation(left: dict[int, int]) -> float:
    """The standard deviation, rounded like the reference's so that the same splits are equally good."""
    mean = _thousandths(sum(left.values()) / len(left))
    return _thousandths(math.sqrt(sum((amount - mean) ** 2 for amount in left.values()) / len(left)))


def _divided_up(amount: int, parts: int) -> int:
    return -(-amount // parts)


def _thousandths(number: float) -> float:
    return math.floor(number * 1000 + 0.5) / 1000
