"""Static CPU manager policy: which containers get exclusive CPUs, and which ones. Pure functions.

A container gets exclusive CPUs if its pod is Guaranteed and it requests a whole number of CPUs. All others
run on the remaining CPUs, the shared pool. CPUs reserved for the system are part of that pool but never
exclusive; with strict-cpu-reservation they are not in the pool either. Init containers end before the others
start, so their CPUs are reused first for later containers; those of sidecars are not. Pods with pod-level
resources get no exclusive CPUs (that is upstream's alpha gate PodLevelResourceManagers).

CPUs close to each other work together best, and the fewer groups are broken up, the more stay complete for
others. So whole sockets and NUMA nodes are taken first, then whole cores, then single threads; among
candidates, the one with the fewest free CPUs. Ties go to the lower number: the same host in the same state
always yields the same CPUs, which are upstream's.

Options change this: `spread` (distribute-cpus-across-cores) takes threads of different cores, `by_cache`
(prefer-align-cpus-by-uncorecache) fills caches before cores, and `across_nodes` (distribute-cpus-across-numa)
takes equally from several NUMA nodes. A process on two NUMA nodes is as slow as the node with fewer CPUs, so
a request that does not fit into one node is split evenly among the fewest nodes that have equal parts; the
remainder is taken where the numbers of free CPUs per node then deviate least from each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from pykubelet.api import cpuset
from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.api.quantity import Quantity
from pykubelet.cm.cpu.state import REMEDY, CpuState
from pykubelet.cm.cpu.topology import CpuTopology, Level
from pykubelet.cm.qos import has_pod_level_resources, qos_class
from pykubelet.cm.topology.hints import AllocationError, Hints, PolicyError, TopologyHint, node_sets
from pykubelet.config.types import KubeletConfiguration


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """Options of the static policy (`cpuManagerPolicyOptions`)."""

    full_cores: bool = False
    """full-pcpus-only: reject requests that would share a core with others."""
    across_nodes: bool = False
    """distribute-cpus-across-numa."""
    by_socket: bool = False
    """align-by-socket: NUMA nodes of one socket count as aligned."""
    spread: bool = False
    """distribute-cpus-across-cores."""
    strict_reservation: bool = False
    """strict-cpu-reservation: pods do not use reserved CPUs at all."""
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
    """Return `count` of the available CPUs, as close together as possible. Raises AllocationError."""
    search = _Search(topology, available, count)
    search.take_full_groups(search.outer)
    search.take_full_groups(search.inner)
    if by_cache:
        search.take_caches()
    if not spread:
        search.take_full_groups("core")
    search.take_threads(spread=spread)
    return frozenset(search.taken)


def order_nodes(topology: CpuTopology, available: frozenset[int]) -> list[int]:
    """Return the NUMA nodes with available CPUs, those with the fewest first."""
    return _Search(topology, available, 0).order("node")


class _Search:
    """Search for CPUs: those still free, those taken, and the number still needed."""

    def __init__(self, topology: CpuTopology, available: frozenset[int], count: int) -> None:
        self.topology = topology
        self.free = set(available & topology.all)
        self.needed = max(0, count)
        self.taken: set[int] = set()
        # Usually a socket has one or several NUMA nodes; on some hosts a node has several sockets.
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

    def take_full_groups(self, level: Level) -> None:
        """Select whole sockets, nodes, caches or cores, as long as that many CPUs are needed."""
        members, free = self.topology.groups(level), self.topology.groups(level, self.free)
        for group in self.order(level):
            if free[group] == members[group] and self.needed >= len(members[group]):
                self.take(members[group])

    def take_caches(self) -> None:
        """Select whole caches, and the remainder from one cache if it has enough."""
        for cache in self.order("cache"):
            if self.needed >= self.topology.cpus_per_cache:
                self.take_full_groups("cache")
            if self.needed:
                self._take_from_cache(cache)

    def take_threads(self, *, spread: bool) -> None:
        """Select single CPUs: of partly used cores first, or if `spread`, in numeric order per socket."""
        level: Level = "socket" if spread else "core"
        groups = self.topology.groups(level, self.free)
        threads = [cpu for group in self.order(level) for cpu in sorted(groups[group])]
        self.take(frozenset(threads[: self.needed]))

    def order(self, level: Level) -> list[int]:
        """Return the groups with free CPUs, ordered by the free CPUs around them, then those in them."""
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
            # An odd number leaves one thread of the last core free.
            cpus.pop()
        if len(cpus) == self.needed:
            self.take(frozenset(cpus))


def take(topology: CpuTopology, available: frozenset[int], count: int, options: CpuOptions) -> frozenset[int]:
    """Return `count` of the available CPUs, selected as the options require. Raises AllocationError."""
    if not options.across_nodes:
        return take_packed(topology, available, count, spread=options.spread, by_cache=options.by_cache)
    unit = topology.cpus_per_core if options.full_cores else 1
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
    """A division of a request among NUMA nodes, and the imbalance that it would leave."""

    parts: list[tuple[int, int]]
    """NUMA nodes, each with the number of CPUs to take in one step; nodes may repeat."""
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
        # The first of the best: the order of nodes breaks ties.
        if (best := min(splits, key=lambda split: split.imbalance, default=None)) is not None:
            return best
    return None


def _split_among(nodes: tuple[int, ...], free: dict[int, int], count: int, unit: int) -> _Split | None:
    """Divide a request evenly among these nodes; None if they do not have their parts free."""
    share = count // len(nodes) // unit * unit
    usable = sum(free[node] // unit * unit for node in nodes)
    if usable < count or any(free[node] < share for node in nodes):
        return None
    left = {node: amount - share if node in nodes else amount for node, amount in free.items()}
    parts = [(node, share) for node in nodes]
    rest = count - share * len(nodes)
    if rest == 0:
        return _Split(parts, _deviation(left))
    candidates = [node for node in nodes if left[node] >= unit]
    splits = (
        _Split(parts + extra, _deviation(after))
        # Ties go to as many nodes as possible sharing the remainder.
        for size in range(len(candidates), 0, -1)
        for subset in combinations(candidates, size)
        for extra, after in _deal(subset, left, rest, unit)
    )
    return min(splits, key=lambda split: split.imbalance, default=None)


def _deal(
    nodes: tuple[int, ...], left: dict[int, int], rest: int, unit: int
) -> Iterator[tuple[list[tuple[int, int]], dict[int, int]]]:
    """Yield the remainder, taken from these nodes in turn by one unit; nothing if they have too few."""
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
    """Return the standard deviation, rounded like upstream's so that the same splits are ties."""
    mean = _thousandths(sum(left.values()) / len(left))
    return _thousandths(math.sqrt(sum((amount - mean) ** 2 for amount in left.values()) / len(left)))


def _divided_up(amount: int, parts: int) -> int:
    return -(-amount // parts)


def _thousandths(number: float) -> float:
    return math.floor(number * 1000 + 0.5) / 1000


SMT_ALIGNMENT = "SMTAlignmentError"
_ZERO = Quantity.from_units(0)
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_OPTIONS = {
    "full-pcpus-only": "full_cores",
    "distribute-cpus-across-numa": "across_nodes",
    "align-by-socket": "by_socket",
    "distribute-cpus-across-cores": "spread",
    "strict-cpu-reservation": "strict_reservation",
    "prefer-align-cpus-by-uncorecache": "by_cache",
}


def read_options(texts: Mapping[str, str]) -> CpuOptions:
    """Parse `cpuManagerPolicyOptions`; `config` has validated names, gates, values and conflicts."""
    return CpuOptions(**{_OPTIONS[name]: text in _TRUE for name, text in texts.items()})


@dataclass(frozen=True)
class StaticPolicy:
    """Static policy for a host and a configuration, neither of which changes while the kubelet runs."""

    topology: CpuTopology
    reserved: frozenset[int]
    options: CpuOptions = field(default_factory=CpuOptions)
    pod_level: bool = True
    """Feature gate PodLevelResources."""

    @property
    def allocatable(self) -> frozenset[int]:
        """CPUs that can be exclusive, allocated or not."""
        return self.topology.all - self.reserved

    def start(self, found: CpuState | None) -> CpuState:
        """Return the restored state, or an initial one. Raises PolicyError (without the path) if invalid."""
        pool = self.allocatable if self.options.strict_reservation else self.topology.all
        if found is None or found == CpuState():
            return CpuState(pool)
        if problem := self._problem(found, pool):
            raise PolicyError(f"{problem}: {REMEDY}")
        return found

    def exclusive_count(self, pod: Pod, container: Container) -> int:
        """Return the number of exclusive CPUs that a container needs; 0 for most containers."""
        if has_pod_level_resources(pod) or qos_class(pod, pod_level=self.pod_level) != "Guaranteed":
            return 0
        request = container.resources.requests.get("cpu", _ZERO)
        return int(request) if int(request) * 1000 == request.milli else 0

    def peak_exclusive_count(self, pod: Pod) -> int:
        """Return the maximum number of exclusive CPUs that the pod's containers need at the same time."""
        sidecars = peak = 0
        for container in pod.spec.init_containers:
            count = self.exclusive_count(pod, container)
            if is_sidecar(container):
                sidecars += count
            else:
                peak = max(peak, sidecars + count)
        return max(
            peak, sidecars + sum(self.exclusive_count(pod, container) for container in pod.spec.containers)
        )

    def allocate(
        self,
        state: CpuState,
        pod: Pod,
        container: Container,
        chosen: TopologyHint,
        offline: frozenset[int] = frozenset(),
    ) -> CpuState:
        """Return the state with the container's CPUs, from the chosen NUMA nodes first.

        Raises AllocationError.
        """
        count = self.exclusive_count(pod, container)
        if not count:
            return state
        if self.options.full_cores and count % self.topology.cpus_per_core:
            raise AllocationError(
                f"SMT Alignment Error: requested {count} cpus not multiple cpus per core "
                f"= {self.topology.cpus_per_core}",
                SMT_ALIGNMENT,
            )
        if state.cpus_of(pod.uid, container.name) is not None:
            return state
        free = self._available(state, offline) | reusable(state, pod, container)
        full_core_cpus = self._full_cores(free, count) if self.options.full_cores else free
        taken = self._choose(free, count, chosen)
        if self.options.full_cores and self.topology.cores_of(taken) != taken:
            # Single threads, such as siblings of reserved CPUs, were selected: use whole cores only.
            taken = self._choose(full_core_cpus, count, chosen)
        return state.with_assigned(pod.uid, container.name, taken)

    def hints(
        self, state: CpuState, pod: Pod, container: Container, offline: frozenset[int] = frozenset()
    ) -> Hints:
        """Return the topology hints for a container's CPUs."""
        count = self.exclusive_count(pod, container)
        if not count:
            return {}
        if (had := state.cpus_of(pod.uid, container.name)) is not None:
            return {"cpu": self._hints(had, frozenset(), count) if len(had) == count else []}
        again = reusable(state, pod, container)
        return {"cpu": self._hints(self._available(state, offline), again, count)}

    def pod_hints(self, state: CpuState, pod: Pod, offline: frozenset[int] = frozenset()) -> Hints:
        """Return the topology hints for the CPUs of all the pod's containers together."""
        count = self.peak_exclusive_count(pod)
        if not count:
            return {}
        had: frozenset[int] = frozenset()
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            if (cpus := state.cpus_of(pod.uid, container.name)) is not None:
                if len(cpus) != self.exclusive_count(pod, container):
                    return {"cpu": []}
                had |= cpus
        if len(had) == count:
            return {"cpu": self._hints(had, frozenset(), count)}
        return {"cpu": self._hints(self._available(state, offline), had, count)}

    def _available(self, state: CpuState, offline: frozenset[int]) -> frozenset[int]:
        return state.shared - self.reserved - offline

    def _near(self, nodes: frozenset[int]) -> frozenset[int]:
        if self.options.by_socket:
            sockets = self.topology.sockets_of(nodes)
            return frozenset(number for number, cpu in self.topology.cpus.items() if cpu.socket in sockets)
        return frozenset(number for number, cpu in self.topology.cpus.items() if cpu.node in nodes)

    def _choose(self, free: frozenset[int], count: int, chosen: TopologyHint) -> frozenset[int]:
        taken: frozenset[int] = frozenset()
        if chosen.nodes is not None:
            near = free & self._near(chosen.nodes)
            taken = take(self.topology, near, min(count, len(near)), self.options)
        return taken | take(self.topology, free - taken, count - len(taken), self.options)

    def _full_cores(self, free: frozenset[int], count: int) -> frozenset[int]:
        """Return the CPUs of completely free cores. Raises AllocationError if there are too few."""
        cores = self.topology.groups("core").values()
        full = frozenset(cpu for core in cores if core <= free for cpu in core)
        if count > len(full):
            raise AllocationError(
                "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = "
                f"{len(full)}, requested CPUs = {count}, CPUs per core = {self.topology.cpus_per_core}",
                SMT_ALIGNMENT,
            )
        return full

    def _hints(self, available: frozenset[int], needed: frozenset[int], count: int) -> list[TopologyHint]:
        """Return a hint for each node set with enough CPUs that includes the nodes of all `needed` CPUs."""
        of_node = self.topology.groups("node")
        must = frozenset(self.topology.groups("node", needed))
        usable = self.topology.groups("node", available | needed)
        fitting, fewest = [], len(self.topology.nodes)
        for nodes in node_sets(self.topology.nodes):
            if sum(len(of_node[node]) for node in nodes) >= count:
                fewest = min(fewest, len(nodes))
            if must <= nodes and sum(len(usable.get(node, ())) for node in nodes) >= count:
                fitting.append(nodes)
        return [TopologyHint(nodes, preferred=self._is_preferred(nodes, fewest)) for nodes in fitting]

    def _is_preferred(self, nodes: frozenset[int], fewest: int) -> bool:
        if len(nodes) == fewest:
            return True
        per_socket = len(self.topology.nodes) // len(self.topology.sockets)
        if not self.options.by_socket or not per_socket:
            return False
        return len(self.topology.sockets_of(nodes)) == -(-fewest // per_socket)

    def _problem(self, found: CpuState, pool: frozenset[int]) -> str | None:
        """Return the reason why a state does not match this host and configuration, or None."""
        cpus, shared = cpuset.format(self.reserved), cpuset.format(found.shared)
        if self.options.strict_reservation and self.reserved & found.shared:
            return f"reserved CPUs {cpus} are in the pool for pods ({shared}), against strict-cpu-reservation"
        if not self.options.strict_reservation and not self.reserved <= found.shared:
            return f"not all reserved CPUs {cpus} are in the shared pool ({shared})"
        taken = found.shared
        for uid, containers in found.assigned.items():
            mine: frozenset[int] = frozenset().union(*containers.values())
            if twice := mine & taken:
                return f"CPUs {cpuset.format(twice)} of the pod {uid} are also given to others"
            taken |= mine
        if taken != pool:
            return f"it is about CPUs {cpuset.format(taken)}, but pods may have {cpuset.format(pool)} here"
        return None


def reusable(state: CpuState, pod: Pod, container: Container) -> frozenset[int]:
    """Return the CPUs of init containers that will have ended when this container starts."""
    left: frozenset[int] = frozenset()
    for before in pod.spec.init_containers:
        if before.name == container.name:
            return left
        cpus = state.cpus_of(pod.uid, before.name) or frozenset()
        left = left - cpus if is_sidecar(before) else left | cpus
    for before in pod.spec.containers:
        if before.name == container.name:
            break
        left -= state.cpus_of(pod.uid, before.name) or frozenset()
    return left


def reserve(topology: CpuTopology, config: KubeletConfiguration, options: CpuOptions) -> frozenset[int]:
    """Return the CPUs that are never exclusive: the named ones, or as many as are reserved.

    Raises PolicyError if the host does not have them, or if nothing is reserved.
    """
    if named := cpuset.parse(config.reserved_system_cpus):
        if missing := named - topology.all:
            raise PolicyError(
                f"reservedSystemCPUs names CPUs {cpuset.format(missing)}, but this machine has "
                f"{cpuset.format(topology.all)} online: name others"
            )
        return named
    amounts = (
        Quantity.parse(part.get("cpu", "0")) for part in (config.kube_reserved, config.system_reserved)
    )
    count = -(-sum(amount.milli for amount in amounts) // 1000)
    if not count:
        raise PolicyError(
            "cpuManagerPolicy: static needs CPUs for the system, or none might be left for what has none of "
            "its own: set reservedSystemCPUs, or cpu in kubeReserved or systemReserved"
        )
    try:
        return take(topology, topology.all, count, options)
    except AllocationError as err:
        raise PolicyError(
            f"{count} CPUs are reserved, but this machine has {len(topology.all)}: "
            "lower cpu in kubeReserved and systemReserved"
        ) from err


def check_machine(topology: CpuTopology, options: CpuOptions) -> None:
    """Raise PolicyError if the host does not support an option."""
    if options.by_socket and len(topology.sockets) > len(topology.nodes):
        raise PolicyError(
            f"align-by-socket is not for this machine, with {len(topology.sockets)} sockets but only "
            f"{len(topology.nodes)} NUMA nodes: remove it from cpuManagerPolicyOptions"
        )
