"""The static policy: which containers get CPUs for themselves, and which ones. Pure functions of the state.

A container gets CPUs of its own when its pod is Guaranteed and it asks for a whole number of them. All
others run on what is left, the shared pool. CPUs reserved for the system are part of that pool but never
given to one container; with strict-cpu-reservation they are not in the pool either.

Init containers end before the others start, so what they had is given first to those that come after
them; sidecars stay, so theirs is not. Pods with resources as a whole get no CPUs of their own (that is the
reference's alpha gate PodLevelResourceManagers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pykubelet.api import cpuset
from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.resources.cpu_assign import CpuOptions
from pykubelet.resources.cpu_distribute import take
from pykubelet.resources.cpu_state import REMEDY, CpuState
from pykubelet.resources.cpu_topology import CpuTopology
from pykubelet.resources.hints import AllocationError, Hint, Hints, PolicyError, node_sets
from pykubelet.resources.qos import has_pod_level_resources, qos_class

SMT_ALIGNMENT = "SMTAlignmentError"

_NOTHING = Quantity.of(0)
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_OPTIONS = {
    "full-pcpus-only": "whole_cores",
    "distribute-cpus-across-numa": "across_nodes",
    "align-by-socket": "by_socket",
    "distribute-cpus-across-cores": "spread",
    "strict-cpu-reservation": "strict_reservation",
    "prefer-align-cpus-by-uncorecache": "by_cache",
}


def read_options(texts: Mapping[str, str]) -> CpuOptions:
    """Read `cpuManagerPolicyOptions`, which `config` has checked: names, gates, values and conflicts."""
    return CpuOptions(**{_OPTIONS[name]: text in _TRUE for name, text in texts.items()})


@dataclass(frozen=True)
class StaticPolicy:
    """What the policy knows of the machine and the configuration; neither changes while the agent runs."""

    topology: CpuTopology
    reserved: frozenset[int]
    options: CpuOptions = field(default_factory=CpuOptions)
    pod_level: bool = True
    """The gate PodLevelResources."""

    @property
    def allocatable(self) -> frozenset[int]:
        """The CPUs that containers may get for themselves, when nobody has any."""
        return self.topology.all - self.reserved

    def start(self, found: CpuState | None) -> CpuState:
        """Check what an earlier agent left behind, or begin anew; raises PolicyError (without the file)."""
        pool = self.allocatable if self.options.strict_reservation else self.topology.all
        if found is None or found == CpuState():
            return CpuState(pool)
        if problem := self._problem(found, pool):
            raise PolicyError(f"{problem}: {REMEDY}")
        return found

    def wanted(self, pod: Pod, container: Container) -> int:
        """Give how many CPUs a container is to have for itself; mostly none."""
        if has_pod_level_resources(pod) or qos_class(pod, pod_level=self.pod_level) != "Guaranteed":
            return 0
        request = container.resources.requests.get("cpu", _NOTHING)
        return int(request) if int(request) * 1000 == request.milli else 0

    def wanted_by_pod(self, pod: Pod) -> int:
        """Give how many CPUs the pod's containers need at the same time, at most."""
        sidecars = most = 0
        for container in pod.spec.init_containers:
            count = self.wanted(pod, container)
            if is_sidecar(container):
                sidecars += count
            else:
                most = max(most, sidecars + count)
        return max(most, sidecars + sum(self.wanted(pod, container) for container in pod.spec.containers))

    def allocate(
        self,
        state: CpuState,
        pod: Pod,
        container: Container,
        chosen: Hint,
        offline: frozenset[int] = frozenset(),
    ) -> CpuState:
        """Give a container its CPUs, from the chosen NUMA nodes first; raises AllocationError."""
        count = self.wanted(pod, container)
        if not count:
            return state
        if self.options.whole_cores and count % self.topology.cpus_per_core:
            raise AllocationError(
                f"SMT Alignment Error: requested {count} cpus not multiple cpus per core "
                f"= {self.topology.cpus_per_core}",
                SMT_ALIGNMENT,
            )
        if state.of(pod.uid, container.name) is not None:
            return state
        free = self._available(state, offline) | reusable(state, pod, container)
        whole = self._whole_cores(free, count) if self.options.whole_cores else free
        taken = self._choose(free, count, chosen)
        if self.options.whole_cores and self.topology.cores_of(taken) != taken:
            # Single threads, such as those next to reserved ones, were in the way.
            taken = self._choose(whole, count, chosen)
        return state.with_assigned(pod.uid, container.name, taken)

    def hints(
        self, state: CpuState, pod: Pod, container: Container, offline: frozenset[int] = frozenset()
    ) -> Hints:
        """Say from which NUMA nodes a container's CPUs could come."""
        count = self.wanted(pod, container)
        if not count:
            return {}
        if (had := state.of(pod.uid, container.name)) is not None:
            return {"cpu": self._hints(had, frozenset(), count) if len(had) == count else []}
        again = reusable(state, pod, container)
        return {"cpu": self._hints(self._available(state, offline), again, count)}

    def pod_hints(self, state: CpuState, pod: Pod, offline: frozenset[int] = frozenset()) -> Hints:
        """Say from which NUMA nodes the CPUs of all the pod's containers could come together."""
        count = self.wanted_by_pod(pod)
        if not count:
            return {}
        had: frozenset[int] = frozenset()
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            if (cpus := state.of(pod.uid, container.name)) is not None:
                if len(cpus) != self.wanted(pod, container):
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

    def _choose(self, free: frozenset[int], count: int, chosen: Hint) -> frozenset[int]:
        taken: frozenset[int] = frozenset()
        if chosen.nodes is not None:
            near = free & self._near(chosen.nodes)
            taken = take(self.topology, near, min(count, len(near)), self.options)
        return taken | take(self.topology, free - taken, count - len(taken), self.options)

    def _whole_cores(self, free: frozenset[int], count: int) -> frozenset[int]:
        """Give the CPUs of cores that are free as a whole; raises AllocationError when there are too few."""
        cores = self.topology.groups("core").values()
        whole = frozenset(cpu for core in cores if core <= free for cpu in core)
        if count > len(whole):
            raise AllocationError(
                "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = "
                f"{len(whole)}, requested CPUs = {count}, CPUs per core = {self.topology.cpus_per_core}",
                SMT_ALIGNMENT,
            )
        return whole

    def _hints(self, available: frozenset[int], needed: frozenset[int], count: int) -> list[Hint]:
        """Give all sets of nodes that have enough; those with CPUs that are `needed` must be in each."""
        of_node = self.topology.groups("node")
        must = frozenset(self.topology.groups("node", needed))
        usable = self.topology.groups("node", available | needed)
        fitting, fewest = [], len(self.topology.nodes)
        for nodes in node_sets(self.topology.nodes):
            if sum(len(of_node[node]) for node in nodes) >= count:
                fewest = min(fewest, len(nodes))
            if must <= nodes and sum(len(usable.get(node, ())) for node in nodes) >= count:
                fitting.append(nodes)
        return [Hint(nodes, preferred=self._is_preferred(nodes, fewest)) for nodes in fitting]

    def _is_preferred(self, nodes: frozenset[int], fewest: int) -> bool:
        if len(nodes) == fewest:
            return True
        per_socket = len(self.topology.nodes) // len(self.topology.sockets)
        if not self.options.by_socket or not per_socket:
            return False
        return len(self.topology.sockets_of(nodes)) == -(-fewest // per_socket)

    def _problem(self, found: CpuState, pool: frozenset[int]) -> str | None:
        """Say what in a state does not fit this machine and configuration."""
        kept, shared = cpuset.format(self.reserved), cpuset.format(found.shared)
        if self.options.strict_reservation and self.reserved & found.shared:
            return f"reserved CPUs {kept} are in the pool for pods ({shared}), against strict-cpu-reservation"
        if not self.options.strict_reservation and not self.reserved <= found.shared:
            return f"not all reserved CPUs {kept} are in the shared pool ({shared})"
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
    """Give the CPUs of init containers that will have ended when this container starts."""
    left: frozenset[int] = frozenset()
    for before in pod.spec.init_containers:
        if before.name == container.name:
            return left
        cpus = state.of(pod.uid, before.name) or frozenset()
        left = left - cpus if is_sidecar(before) else left | cpus
    for before in pod.spec.containers:
        if before.name == container.name:
            break
        left -= state.of(pod.uid, before.name) or frozenset()
    return left


def reserve(topology: CpuTopology, config: KubeletConfiguration, options: CpuOptions) -> frozenset[int]:
    """Choose the CPUs that no container gets for itself: the named ones, or as many as are reserved.

    Raises PolicyError when the machine does not have them, or when nothing is reserved.
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
    """Raise PolicyError when an option is not one for this machine."""
    if options.by_socket and len(topology.sockets) > len(topology.nodes):
        raise PolicyError(
            f"align-by-socket is not for this machine, with {len(topology.sockets)} sockets but only "
            f"{len(topology.nodes)} NUMA nodes: remove it from cpuManagerPolicyOptions"
        )
