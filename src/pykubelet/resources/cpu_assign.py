"""Which CPUs to take for a container that gets some for itself: a pure function.

The nearer CPUs are to each other, the better they work together, and the fewer pieces are broken, the
more is left whole for others. So whole sockets and NUMA nodes are taken first, then whole cores, then
single threads; and of several that would do, always from what has the least left free. Ties go to the
lower number: the same machine in the same state always gives the same CPUs, the ones that the reference
gives.

Options bend this: `spread` (distribute-cpus-across-cores) takes threads of different cores, `by_cache`
(prefer-align-cpus-by-uncorecache) fills caches before cores, and `across_nodes`
(distribute-cpus-across-numa) takes equally from several NUMA nodes, see `cpu_distribute`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykubelet.resources.cpu_topology import CpuTopology, Level
from pykubelet.resources.hints import AllocationError


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """The options of the static policy (`cpuManagerPolicyOptions`), by what they do."""

    whole_cores: bool = False
    """full-pcpus-only: refuse what would share a core with others."""
    across_nodes: bool = False
    """distribute-cpus-across-numa."""
    by_socket: bool = False
    """align-by-socket: NUMA nodes of one socket count as near enough."""
    spread: bool = False
    """distribute-cpus-across-cores."""
    strict_reservation: bool = False
    """strict-cpu-reservation: reserved CPUs are not for pods at all."""
    by_cache: bool = False
    """prefer-align-cpus-by-uncorecache."""


def take_packed(
    topology: CpuTopology,
    available: frozenset[int],
    count: int,
    *,
    spread: bool = False,
    by_cache: bool = False,
) -> frozenset[int]:
    """Take this many of the available CPUs, as close together as can be; raises AllocationError."""
    search = _Search(topology, available, count)
    search.take_whole(search.outer)
    search.take_whole(search.inner)
    if by_cache:
        search.take_caches()
    if not spread:
        search.take_whole("core")
    search.take_threads(spread=spread)
    return frozenset(search.taken)


def order_nodes(topology: CpuTopology, available: frozenset[int]) -> list[int]:
    """Give the NUMA nodes that have CPUs available: those with the fewest first."""
    return _Search(topology, available, 0).order("node")


class _Search:
    """What is still free and needed while CPUs are being taken."""

    def __init__(self, topology: CpuTopology, available: frozenset[int], count: int) -> None:
        self.topology = topology
        self.free = set(available & topology.all)
        self.needed = max(0, count)
        self.taken: set[int] = set()
        # Usually a socket has one or several NUMA nodes; on some machines it is the other way round.
        nodes_contain_sockets = len(topology.sockets) >= len(topology.nodes)
        self.outer: Level = "node" if nodes_contain_sockets else "socket"
        self.inner: Level = "socket" if nodes_contain_sockets else "node"
        if self.needed > len(self.free):
            raise AllocationError(
                f"not enough cpus available to satisfy request: requested={count}, available={len(available)}"
            )

    def take(self, cpus: frozenset[int]) -> None:
        self.taken |= cpus
        self.free -= cpus
        self.needed -= len(cpus)

    def take_whole(self, level: Level) -> None:
        """Take all of a socket, node, cache or core, as long as that much is needed."""
        whole, free = self.topology.groups(level), self.topology.groups(level, self.free)
        for group in self.order(level):
            if free[group] == whole[group] and self.needed >= len(whole[group]):
                self.take(whole[group])

    def take_caches(self) -> None:
        """Take whole caches, and the rest from one cache if one has it."""
        for cache in self.order("cache"):
            if self.needed >= self.topology.cpus_per_cache:
                self.take_whole("cache")
            if self.needed:
                self._take_from_cache(cache)

    def take_threads(self, *, spread: bool) -> None:
        """Take single CPUs: those of broken cores first, or one core after the other when they are spread."""
        level: Level = "socket" if spread else "core"
        groups = self.topology.groups(level, self.free)
        threads = [cpu for group in self.order(level) for cpu in sorted(groups[group])]
        self.take(frozenset(threads[: self.needed]))

    def order(self, level: Level) -> list[int]:
        """Give all groups of a level that have free CPUs: by what is free around them, then in them."""
        match level:
            case self.outer:
                return self._fewest_first(level, self.free)
            case "cache":
                around: Level = "node"
            case "core":
                around = self.inner
            case _:
                around = self.outer
        inside = self.topology.groups(around, self.free)
        found = (group for part in self.order(around) for group in self._fewest_first(level, inside[part]))
        return list(dict.fromkeys(found))

    def _fewest_first(self, level: Level, cpus: frozenset[int] | set[int]) -> list[int]:
        free = self.topology.groups(level, self.free)
        return sorted(self.topology.groups(level, cpus), key=lambda group: (len(free[group]), group))

    def _take_from_cache(self, cache: int) -> None:
        free = self.topology.groups("cache", self.free).get(cache, frozenset())
        cores = self.topology.groups("core", free)
        threads = self.topology.cpus_per_core
        chosen = sorted(cores)[: -(-self.needed // threads)]
        cpus = sorted(cpu for core in chosen for cpu in cores[core])
        if threads > 1 and self.needed % 2 and len(cpus) > self.needed:
            # An odd number leaves one thread of the last core to others.
            cpus.pop()
        if len(cpus) == self.needed:
            self.take(frozenset(cpus))
