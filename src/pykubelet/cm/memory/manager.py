"""Memory manager: allocates memory of NUMA nodes to the containers of Guaranteed pods.

With the policy `Static` such a container gets all its memory, including huge pages, from one NUMA node, or
from the smallest group of nodes with enough; `memory_nodes` returns them for its `cpuset.mems`. Allocations
are stored in `memory_manager_state`, so that a kubelet restart changes nothing. With `None` nothing is
allocated, but the file records the policy: changing it under running containers is an error.

The memory of an init container is reused by the containers that run after it, and released when they start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.memory.numa_memory import (
    Machine,
    MemoryBlock,
    Requests,
    choose_nodes,
    container_requests,
    hints_again,
    hints_for,
    pod_requests,
    same,
    untouched,
    with_allocated,
    with_released,
)
from pykubelet.cm.memory.numa_nodes import MemoryNode, reserved_by_node
from pykubelet.cm.memory.state import MemoryState, corrupted, read_state, write_state
from pykubelet.cm.qos import has_pod_level_resources, qos_class
from pykubelet.cm.topology.hints import AllocationError, Hints, PolicyError, TopologyHint
from pykubelet.config.types import MemoryReservation
from pykubelet.logs import get_logger

log = get_logger(__name__)


class MemoryMetrics:
    """Metrics of the memory manager, which are not exported without a registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.requests = Counter(
            "kubelet_memory_manager_pinning_requests_total",
            "Containers that requested memory of certain NUMA nodes.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_memory_manager_pinning_errors_total",
            "Containers whose request for memory of certain NUMA nodes failed.",
            registry=registry,
        )


STATE_FILE = "memory_manager_state"


class MemoryManager:
    """Memory manager of a node; a `HintProvider`."""

    def __init__(
        self,
        policy: Literal["None", "Static"],
        state_file: Path,
        nodes: Sequence[MemoryNode] = (),
        reservations: Sequence[MemoryReservation] = (),
        reserved: Resources | None = None,
        *,
        pod_level: bool = True,
        metrics: MemoryMetrics | None = None,
    ) -> None:
        """Restore the state file, or create it.

        `reservations` is `reservedMemory`; `reserved` are the host's total reservations. `pod_level` is
        whether pod-level resources count: feature gate `PodLevelResources`. Raises PolicyError, and OSError
        when the file cannot be written.
        """
        self.policy = policy
        self._file = state_file
        self._pod_level = pod_level
        self._metrics = metrics or MemoryMetrics()
        self._unsaved = False
        machine: Machine = {}
        if policy == "Static":
            machine = untouched(nodes, reserved_by_node(nodes, reservations, reserved or {}))
        self._state = _restored(state_file, policy, machine)
        write_state(state_file, self._state)

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Return the topology hints for a container's memory."""
        if not self._manages(pod) or self._is_over(pod, container):
            return {}
        try:
            requests = container_requests(container)
        except AllocationError:
            return {}
        blocks = self._find(pod.uid, container.name)
        if blocks is not None:
            return hints_again(blocks, requests)
        return hints_for(self._state.machine_state, requests, self._reusable(pod, container))

    def pod_hints(self, pod: Pod) -> Hints:
        """Return the topology hints for the memory of all the pod's containers."""
        if not self._manages(pod):
            return {}
        try:
            requests = pod_requests(pod)
        except AllocationError:
            return {}
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            if (blocks := self._find(pod.uid, container.name)) is not None:
                return hints_again(blocks, requests)
        return hints_for(self._state.machine_state, requests, {})

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> None:
        """Allocate a container's memory, near the chosen nodes; no-op if it has memory.

        Raises AllocationError.
        """
        if not self._manages(pod) or self._is_over(pod, container):
            return
        self._metrics.requests.inc()
        if self._find(pod.uid, container.name) is not None:
            return
        try:
            self._allocate(pod, container, chosen)
        except AllocationError:
            self._metrics.errors.inc()
            raise

    def _allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> None:
        requests = container_requests(container)
        reusable = self._reusable(pod, container)
        nodes = choose_nodes(self._state.machine_state, requests, reusable, chosen)
        blocks = [MemoryBlock(tuple(sorted(nodes)), name, size) for name, size in sorted(requests.items())]
        reused = reusable.get(nodes, {})
        self._set_machine(
            with_allocated(
                self._state.machine_state,
                (replace(block, size=max(0, block.size - reused.get(block.type, 0))) for block in blocks),
            )
        )
        for block in blocks:
            self._take_over(pod, container, block)
        self._state.entries.setdefault(pod.uid, {})[container.name] = blocks
        log.v(2).info(
            "Allocated memory", pod=pod.full_name, containerName=container.name, nodes=sorted(nodes)
        )
        self._save()

    def container_starts(self, pod: Pod, container: Container) -> None:
        """Release the memory of init containers before this one: they have ended."""
        self._remove(
            [
                (pod.uid, init.name)
                for init in _before(pod, container)
                if self._find(pod.uid, init.name) is not None
            ]
        )

    @property
    def holders(self) -> AbstractSet[str]:
        """UIDs of pods with allocated memory."""
        return self._state.entries.keys()

    def forget(self, uid: str) -> None:
        """Release the memory of a terminated pod: none of its containers runs or will run again."""
        self._remove([(uid, name) for name in self._state.entries.get(uid, {})])

    def retain(self, uids: AbstractSet[str]) -> None:
        """Release the memory of all pods except these.

        To be called only when all pod sources are synced: a pod that is not known yet is not gone.
        """
        for uid in self.holders - uids:
            self.forget(uid)

    def catch_up(self) -> None:
        """Retry a failed write: the next kubelet process would allocate the unrecorded memory again."""
        if self._unsaved:
            self._save()

    def memory_nodes(self, uid: str, container: str) -> frozenset[int]:
        """Return the NUMA nodes for a container's memory; empty for any."""
        return frozenset(node for block in self.blocks(uid, container) for node in block.numa_affinity)

    def blocks(self, uid: str, container: str) -> tuple[MemoryBlock, ...]:
        """Return the memory allocated to a container."""
        return tuple(self._find(uid, container) or ())

    def allocatable(self) -> tuple[MemoryBlock, ...]:
        """Return the allocatable memory of each NUMA node."""
        return tuple(
            MemoryBlock((number,), resource, table.allocatable)
            for number, node in sorted(self._state.machine_state.items())
            for resource, table in sorted(node.memory_map.items())
            if table.allocatable
        )

    def _manages(self, pod: Pod) -> bool:
        return (
            self.policy == "Static"
            and qos_class(pod, pod_level=self._pod_level) == "Guaranteed"
            and not has_pod_level_resources(pod)
        )

    def _is_over(self, pod: Pod, container: Container) -> bool:
        """Return whether this is an init container whose memory was released to those that run now.

        Without this check it would be allocated memory again after each kubelet restart.
        """
        return (
            any(init.name == container.name for init in pod.spec.init_containers)
            and container.restart_policy != "Always"
            and self._find(pod.uid, container.name) is None
            and any(self._find(pod.uid, later.name) is not None for later in pod.spec.containers)
        )

    def _reusable(self, pod: Pod, container: Container) -> dict[frozenset[int], Requests]:
        """Return the memory of earlier init containers, which have ended when this container runs."""
        found: dict[frozenset[int], Requests] = {}
        for init in _before(pod, container):
            for block in self._find(pod.uid, init.name) or ():
                amounts = found.setdefault(frozenset(block.numa_affinity), {})
                amounts[block.type] = amounts.get(block.type, 0) + block.size
        return found

    def _take_over(self, pod: Pod, container: Container, block: MemoryBlock) -> None:
        """Subtract reused memory from its previous owners, so that each byte is allocated once."""
        left = block.size
        for init in _before(pod, container):
            had = self._find(pod.uid, init.name) or []
            for index, old in enumerate(had):
                if (old.type, old.numa_affinity) == (block.type, block.numa_affinity):
                    part = min(left, old.size)
                    had[index] = replace(old, size=old.size - part)
                    left -= part

    def _find(self, uid: str, container: str) -> list[MemoryBlock] | None:
        return self._state.entries.get(uid, {}).get(container)

    def _remove(self, containers: Collection[tuple[str, str]]) -> None:
        for uid, name in containers:
            blocks = self._state.entries[uid].pop(name)
            if not self._state.entries[uid]:
                del self._state.entries[uid]
            self._set_machine(with_released(self._state.machine_state, blocks))
            log.v(2).info("Released memory", podUID=uid, containerName=name)
        if containers:
            self._save()

    def _set_machine(self, machine: Machine) -> None:
        self._state = replace(self._state, machine_state=machine)

    def _save(self) -> None:
        try:
            write_state(self._file, self._state)
        except OSError as err:
            # The state in memory stays correct, and the next write contains all of it.
            if not self._unsaved:
                log.error(err, "Failed to write memory manager state", path=str(self._file))
            self._unsaved = True
        else:
            self._unsaved = False


def _before(pod: Pod, container: Container) -> Iterator[Container]:
    """Yield the init containers that have ended when this container runs."""
    for init in pod.spec.init_containers:
        if init.name == container.name:
            return
        if init.restart_policy != "Always":
            yield init


def _restored(path: Path, policy: str, machine: Machine) -> MemoryState:
    state = read_state(path, policy)
    if state is None or policy != "Static":
        return state or MemoryState(policy, machine, {})
    if not state.machine_state:
        if state.entries:
            raise corrupted(path, "containers have memory but there are no NUMA nodes")
        return MemoryState(policy, machine, {})
    blocks = [
        block for containers in state.entries.values() for some in containers.values() for block in some
    ]
    try:
        expected = with_allocated(machine, blocks)
    except PolicyError as err:
        raise corrupted(path, str(err)) from err
    if not same(state.machine_state, expected):
        raise corrupted(
            path,
            "its memory per NUMA node is not that of this machine "
            "(was memory added or removed, or reservedMemory changed?)",
        )
    return state
