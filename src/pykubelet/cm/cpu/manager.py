"""CPU manager: allocates exclusive CPUs to containers and keeps all other containers off them.

The topology manager calls it at admission, pod workers when containers start and in periodic reconciliation.
The allocation is decided by `cpu/policy.py`, stored in `cpu_manager_state`, and applied in two ways: a
container is created with its cpuset, and when the shared pool changes, all running containers on it are
updated. Until then other containers may still run on newly allocated CPUs; failed updates are retried every
`cpuManagerReconcilePeriod`.

With the policy `none` containers run on any CPU, and this module does nothing.

CPUs may go offline while the kubelet runs. They are not allocated then, and cpusets contain only online CPUs,
because the kernel would reject the others. A container keeps its allocation for when they are online again.
After a restart without them, the state does not match the host, which is a PolicyError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from pykubelet.api import cpuset
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cpu.policy import StaticPolicy, check_machine, read_options, reserve
from pykubelet.cm.cpu.state import FILE_NAME, CpuState, read_state, write_state
from pykubelet.cm.cpu.topology import SYSTEM, read_online, read_topology
from pykubelet.cm.topology.hints import AllocationError, Hints, PolicyError, TopologyHint
from pykubelet.cm.topology.manager import AlignmentMetrics
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger

log = get_logger(__name__)


class CpuMetrics:
    """Metrics of the CPU manager."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        """Initialize; without a registry the metrics are not exported."""
        self._alignment = alignment or AlignmentMetrics()
        self.requests = Counter(
            "kubelet_cpu_manager_pinning_requests_total",
            "Containers that requested exclusive CPUs.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_cpu_manager_pinning_errors_total",
            "Containers whose request for exclusive CPUs failed.",
            registry=registry,
        )
        self._shared = Gauge(
            "kubelet_cpu_manager_shared_pool_size_millicores",
            "Size of the shared CPU pool in millicores.",
            registry=registry,
        )
        self._exclusive = Gauge(
            "kubelet_cpu_manager_exclusive_cpu_allocation_count",
            "Exclusively allocated CPUs.",
            registry=registry,
        )
        self._per_node = Gauge(
            "kubelet_cpu_manager_allocation_per_numa",
            "Exclusively allocated CPUs, by NUMA node.",
            ["numa_node"],
            registry=registry,
        )

    def expect(self) -> None:
        """Export the counters of the static policy before anything is counted."""
        self._alignment.expect("physical_cpu")
        self._alignment.expect("uncore_cache", failures=False)

    def allocated(self, policy: StaticPolicy, cpus: frozenset[int]) -> None:
        """Count a container that has its exclusive CPUs; `cpus` are the newly allocated ones."""
        self.requests.inc()
        if policy.options.full_cores:
            self._alignment.aligned("physical_cpu")
        if len(policy.topology.groups("cache", cpus)) == 1:
            self._alignment.aligned("uncore_cache")

    def failed(self, policy: StaticPolicy) -> None:
        """Count a container whose exclusive CPUs could not be allocated."""
        self.requests.inc()
        self.errors.inc()
        if policy.options.full_cores:
            self._alignment.failed("physical_cpu")

    def update(self, policy: StaticPolicy, state: CpuState) -> None:
        """Update the gauges from a new state."""
        self._shared.set(1000 * len(state.shared - policy.reserved))
        exclusive = state.exclusive
        self._exclusive.set(len(exclusive))
        by_node = policy.topology.groups("node", exclusive)
        for node in policy.topology.nodes:
            self._per_node.labels(str(node)).set(len(by_node.get(node, ())))


@dataclass(frozen=True)
class RunningContainer:
    """A container that runs or is about to start."""

    uid: str
    """UID of the pod."""
    name: str
    container_id: str


@dataclass(frozen=True)
class CpusetUpdate:
    """A cpuset (`0-3,5`) that the runtime must set for a container."""

    container_id: str
    cpus: str


class CpuManager:
    """CPU manager of a node: a hint provider for the topology manager, and the cpusets of containers.

    All methods are fast and must be called from one thread; those that change the state write a small file.
    """

    def __init__(
        self,
        file: Path,
        policy: StaticPolicy | None,
        *,
        online: Callable[[], frozenset[int]] = read_online,
        metrics: CpuMetrics | None = None,
    ) -> None:
        """Restore the state from the file; without a policy no container gets exclusive CPUs.

        Raises PolicyError when the file is damaged, belongs to another policy, does not match the host, or
        cannot be written.
        """
        self._file = file
        self._policy = policy
        self._name: Literal["none", "static"] = "static" if policy else "none"
        self._online = online
        self._metrics = metrics or CpuMetrics()
        self._applied: dict[str, str] = {}
        self._unsaved = False
        self._lost: frozenset[int] = frozenset()
        found = read_state(file, self._name)
        self._state = found or CpuState()
        if policy is not None:
            try:
                self._state = policy.start(found)
            except PolicyError as err:
                raise PolicyError(f"{file}: {err}") from err
            self._metrics.expect()
            self._metrics.update(policy, self._state)
        if self._state != found:
            try:
                write_state(file, self._name, self._state)
            except OSError as err:
                raise PolicyError(
                    f"{file}: {err.strerror or err}: the CPU manager must be able to write its state there"
                ) from err

    @property
    def allocatable(self) -> frozenset[int]:
        """CPUs that can be exclusive, allocated or not; for the pod-resources API."""
        return self._policy.allocatable if self._policy else frozenset()

    @property
    def is_static(self) -> bool:
        """Whether containers can get exclusive CPUs."""
        return self._policy is not None

    @property
    def holders(self) -> AbstractSet[str]:
        """UIDs of pods with exclusive CPUs."""
        return self._state.assigned.keys()

    @property
    def shared(self) -> frozenset[int]:
        """Shared pool of all containers without exclusive CPUs; empty with the policy `none`."""
        return self._state.shared

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Return the topology hints for a container's CPUs."""
        if self._policy is None:
            return {}
        return self._policy.hints(self._state, pod, container, self._offline())

    def pod_hints(self, pod: Pod) -> Hints:
        """Return the topology hints for the CPUs of all containers of a pod."""
        if self._policy is None:
            return {}
        return self._policy.pod_hints(self._state, pod, self._offline())

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> None:
        """Allocate the container's exclusive CPUs, if it needs some and has none. Raises AllocationError."""
        if self._policy is None or not self._policy.exclusive_count(pod, container):
            return
        try:
            state = self._policy.allocate(self._state, pod, container, chosen, self._offline())
        except AllocationError:
            self._metrics.failed(self._policy)
            raise
        if state is self._state:
            self._metrics.allocated(self._policy, frozenset())
            return
        self._set_state(state)
        cpus = self.exclusive_of(pod.uid, container.name)
        self._metrics.allocated(self._policy, cpus)
        log.info(
            "Allocated exclusive CPUs",
            pod=pod.full_name,
            podUID=pod.uid,
            containerName=container.name,
            cpus=cpuset.format(cpus),
            shared=cpuset.format(state.shared),
        )

    def exclusive_of(self, uid: str, container: str) -> frozenset[int]:
        """Return a container's exclusive CPUs; empty for most containers."""
        return self._state.cpus_of(uid, container) or frozenset()

    def has_exclusive(self, uid: str) -> bool:
        """Return whether a container of the pod has exclusive CPUs: a CPU quota would only throttle it."""
        return uid in self._state.assigned

    def cpuset_of(self, uid: str, container: str) -> str:
        """Return the cpuset that a container must run on; empty if none is to be set."""
        return cpuset.format(self._usable(uid, container, self._offline()))

    def forget(self, uid: str) -> None:
        """Release all CPUs of a terminated pod: none of its containers runs or will run again."""
        state = self._state
        for name in state.assigned.get(uid, {}):
            state = state.without(uid, name)
        if state is not self._state:
            self._set_state(state)
            log.info("Released exclusive CPUs", podUID=uid, shared=cpuset.format(state.shared))

    def retain(self, uids: AbstractSet[str]) -> None:
        """Release the CPUs of all pods except these.

        To be called only when all pod sources are synced: a pod that is not known yet is not gone.
        """
        for uid in self.holders - uids:
            self.forget(uid)

    def reconcile(self, running: Iterable[RunningContainer]) -> list[CpusetUpdate]:
        """Return the cpuset updates that running containers need; `record_applied` records an applied one.

        `running` must contain all running containers. Empty if all have their cpuset.
        """
        if self._policy is None:
            return []
        if self._unsaved:
            self._save()
        offline = self._offline()
        self._log_offline(offline)
        updates, applied = [], {}
        for container in running:
            cpus = cpuset.format(self._usable(container.uid, container.name, offline))
            if container.container_id in self._applied:
                applied[container.container_id] = self._applied[container.container_id]
            if cpus and applied.get(container.container_id) != cpus:
                updates.append(CpusetUpdate(container.container_id, cpus))
        # Drop the records of containers that no longer run.
        self._applied = applied
        return updates

    def record_applied(self, update: CpusetUpdate) -> None:
        """Record that the runtime has applied an update, or created a container with these CPUs."""
        self._applied[update.container_id] = update.cpus

    def _offline(self) -> frozenset[int]:
        online = self._online() if self._policy else frozenset()
        # All CPUs are online if the kernel does not list them.
        return self._policy.topology.all - online if self._policy and online else frozenset()

    def _usable(self, uid: str, container: str, offline: frozenset[int]) -> frozenset[int]:
        own = self._state.cpus_of(uid, container) or frozenset()
        # A container whose exclusive CPUs are all offline runs on the shared pool; if that is offline too,
        # the unfiltered set is used rather than no set.
        return own - offline or self._state.shared - offline or own or self._state.shared

    def _log_offline(self, offline: frozenset[int]) -> None:
        lost = offline & self._state.exclusive
        if lost and lost != self._lost:
            log.error(None, "Exclusive CPUs are offline", cpus=cpuset.format(lost))
        self._lost = lost

    def _set_state(self, state: CpuState) -> None:
        self._state = state
        if self._policy is not None:
            self._metrics.update(self._policy, state)
        self._save()

    def _save(self) -> None:
        """Write the state; after a failure containers keep their CPUs, and `reconcile` retries the write."""
        try:
            write_state(self._file, self._name, self._state)
        except OSError as err:
            if not self._unsaved:
                log.error(err, "Failed to write CPU manager state", path=str(self._file))
            self._unsaved = True
        else:
            self._unsaved = False


def open_cpu_manager(
    config: KubeletConfiguration,
    root_dir: Path,
    *,
    pod_level: bool = True,
    metrics: CpuMetrics | None = None,
    system: Path = SYSTEM,
) -> CpuManager:
    """Create the configured CPU manager. Raises PolicyError.

    `pod_level` is the feature gate PodLevelResources; `system` is /sys/devices/system.
    """
    file = root_dir / FILE_NAME
    if config.cpu_manager_policy != "static":
        return CpuManager(file, None, metrics=metrics)
    topology, options = read_topology(system), read_options(config.cpu_manager_policy_options)
    check_machine(topology, options)
    reserved = reserve(topology, config, options)
    log.info(
        "Enabled static CPU manager policy",
        all=cpuset.format(topology.all),
        reserved=cpuset.format(reserved),
        nodes=len(topology.nodes),
        sockets=len(topology.sockets),
        cpusPerCore=topology.cpus_per_core,
    )
    policy = StaticPolicy(topology, reserved, options, pod_level)
    return CpuManager(file, policy, online=lambda: read_online(system), metrics=metrics)
