"""The node's CPUs: who gives some of them to containers for themselves, and keeps all others off.

What is given is decided by `cpu_policy`, remembered in `cpu_manager_state`, and brought to the containers
in two ways: a container is created with its set of CPUs, and whenever the shared pool changes, all that
run on it are updated. Until then a container that just got CPUs may still see others on them; what could not
be updated is tried again every `cpuManagerReconcilePeriod`.

With the policy `none` containers run wherever the kernel puts them, and nothing here does anything.

CPUs may go offline while the agent runs. They are not given out then, and containers are told only of
those that are left: the kernel would refuse the others. What a container was given stays its own, for
when they come back. After a restart without them the state does not fit the machine, which is said.

How many CPUs are given to containers for themselves, from where, and how often that failed.
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
    """The CPUs of one agent."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        """Without a registry nobody sees the numbers."""
        self._alignment = alignment or AlignmentMetrics()
        self.requests = Counter(
            "kubelet_cpu_manager_pinning_requests_total",
            "Containers that were to get CPUs for themselves.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_cpu_manager_pinning_errors_total",
            "Containers that could not get CPUs for themselves.",
            registry=registry,
        )
        self._shared = Gauge(
            "kubelet_cpu_manager_shared_pool_size_millicores",
            "CPUs that can still be given to containers for themselves, in millicores.",
            registry=registry,
        )
        self._exclusive = Gauge(
            "kubelet_cpu_manager_exclusive_cpu_allocation_count",
            "CPUs that containers have for themselves.",
            registry=registry,
        )
        self._per_node = Gauge(
            "kubelet_cpu_manager_allocation_per_numa",
            "CPUs that containers have for themselves, by NUMA node.",
            ["numa_node"],
            registry=registry,
        )

    def expect(self) -> None:
        """Show what a static policy counts, before it does."""
        self._alignment.expect("physical_cpu")
        self._alignment.expect("uncore_cache", failures=False)

    def given(self, policy: StaticPolicy, cpus: frozenset[int]) -> None:
        """Count a container that was to get CPUs and has them; `cpus` are those that are new to it."""
        self.requests.inc()
        if policy.options.whole_cores:
            self._alignment.aligned("physical_cpu")
        if len(policy.topology.groups("cache", cpus)) == 1:
            self._alignment.aligned("uncore_cache")

    def failed(self, policy: StaticPolicy) -> None:
        """Count a container that could not get its CPUs."""
        self.requests.inc()
        self.errors.inc()
        if policy.options.whole_cores:
            self._alignment.failed("physical_cpu")

    def show(self, policy: StaticPolicy, state: CpuState) -> None:
        """Tell of a new state."""
        self._shared.set(1000 * len(state.shared - policy.reserved))
        exclusive = state.exclusive
        self._exclusive.set(len(exclusive))
        given = policy.topology.groups("node", exclusive)
        for node in policy.topology.nodes:
            self._per_node.labels(str(node)).set(len(given.get(node, ())))


@dataclass(frozen=True)
class RunningContainer:
    """A container that runs, or is about to."""

    uid: str
    """The pod's."""
    name: str
    container_id: str


@dataclass(frozen=True)
class CpusetUpdate:
    """A set of CPUs (`0-3,5`) that the runtime is to be told for a container."""

    container_id: str
    cpus: str


class CpuManager:
    """The CPUs of one node: a provider of hints for the topology manager, and what the engine asks.

    All calls are quick and must come from one thread; those that change something write a small file.
    """

    def __init__(
        self,
        file: Path,
        policy: StaticPolicy | None,
        *,
        online: Callable[[], frozenset[int]] = read_online,
        metrics: CpuMetrics | None = None,
    ) -> None:
        """Take up what an earlier agent left in the file; without a policy nobody gets CPUs.

        Raises PolicyError when the file is damaged, another policy's, or does not fit the machine.
        """
        self._file = file
        self._policy = policy
        self._name: Literal["none", "static"] = "static" if policy else "none"
        self._online = online
        self._metrics = metrics or CpuMetrics()
        self._told: dict[str, str] = {}
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
            self._metrics.show(policy, self._state)
        if self._state != found:
            try:
                write_state(file, self._name, self._state)
            except OSError as err:
                raise PolicyError(
                    f"{file}: {err.strerror or err}: the CPU manager must be able to write its state there"
                ) from err

    @property
    def allocatable(self) -> frozenset[int]:
        """The CPUs that containers may get for themselves, given or not; for the pod-resources API."""
        return self._policy.allocatable if self._policy else frozenset()

    @property
    def is_static(self) -> bool:
        """Whether containers can get CPUs for themselves here."""
        return self._policy is not None

    @property
    def holders(self) -> AbstractSet[str]:
        """The uids of pods that have CPUs for themselves."""
        return self._state.assigned.keys()

    @property
    def shared(self) -> frozenset[int]:
        """The pool of all containers that have no CPUs for themselves; empty with the policy `none`."""
        return self._state.shared

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Say from which NUMA nodes a container's CPUs could come."""
        if self._policy is None:
            return {}
        return self._policy.hints(self._state, pod, container, self._offline())

    def pod_hints(self, pod: Pod) -> Hints:
        """Say from which NUMA nodes the CPUs of all containers of a pod could come."""
        if self._policy is None:
            return {}
        return self._policy.pod_hints(self._state, pod, self._offline())

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> None:
        """Give a container CPUs for itself, when it is to have some and has none; raises AllocationError."""
        if self._policy is None or not self._policy.wanted(pod, container):
            return
        try:
            state = self._policy.allocate(self._state, pod, container, chosen, self._offline())
        except AllocationError:
            self._metrics.failed(self._policy)
            raise
        if state is self._state:
            self._metrics.given(self._policy, frozenset())
            return
        self._take(state)
        cpus = self.exclusive_of(pod.uid, container.name)
        self._metrics.given(self._policy, cpus)
        log.info(
            "Gave CPUs to a container for itself",
            pod=pod.full_name,
            podUID=pod.uid,
            containerName=container.name,
            cpus=cpuset.format(cpus),
            shared=cpuset.format(state.shared),
        )

    def exclusive_of(self, uid: str, container: str) -> frozenset[int]:
        """Give the CPUs that a container has for itself; mostly none."""
        return self._state.of(uid, container) or frozenset()

    def has_exclusive(self, uid: str) -> bool:
        """Whether a container of this pod has CPUs for itself: then its quota would only slow it down."""
        return uid in self._state.assigned

    def cpuset_of(self, uid: str, container: str) -> str:
        """Give the set of CPUs that a container is to run on; empty: do not say any."""
        return cpuset.format(self._usable(uid, container, self._offline()))

    def forget(self, uid: str) -> None:
        """Take back all CPUs of a pod that has ended: none of its containers runs, none will again."""
        state = self._state
        for name in state.assigned.get(uid, {}):
            state = state.without(uid, name)
        if state is not self._state:
            self._take(state)
            log.info("Took back the CPUs of a pod", podUID=uid, shared=cpuset.format(state.shared))

    def keep_only(self, uids: AbstractSet[str]) -> None:
        """Take back the CPUs of all pods but these.

        To be called only when all sources of pods have been heard: a pod that is not known yet is not gone.
        """
        for uid in self.holders - uids:
            self.forget(uid)

    def reconcile(self, running: Iterable[RunningContainer]) -> list[CpusetUpdate]:
        """Say which containers have to be told other CPUs than they were last; `told` says that it is done.

        `running` is all containers that run. Where there is nothing to tell, the list is empty.
        """
        if self._policy is None:
            return []
        if self._unsaved:
            self._save()
        offline = self._offline()
        self._speak_of(offline)
        updates, told = [], {}
        for each in running:
            cpus = cpuset.format(self._usable(each.uid, each.name, offline))
            if each.container_id in self._told:
                told[each.container_id] = self._told[each.container_id]
            if cpus and told.get(each.container_id) != cpus:
                updates.append(CpusetUpdate(each.container_id, cpus))
        # What does not run any more need not be remembered.
        self._told = told
        return updates

    def told(self, update: CpusetUpdate) -> None:
        """Note that the runtime has taken an update, or has created a container with these CPUs."""
        self._told[update.container_id] = update.cpus

    def _offline(self) -> frozenset[int]:
        online = self._online() if self._policy else frozenset()
        # Where the kernel tells nothing, all are.
        return self._policy.topology.all - online if self._policy and online else frozenset()

    def _usable(self, uid: str, container: str, offline: frozenset[int]) -> frozenset[int]:
        own = self._state.of(uid, container) or frozenset()
        # When all of its own are offline, a container must run somewhere; and a set that has none left
        # is told as it is rather than not at all.
        return own - offline or self._state.shared - offline or own or self._state.shared

    def _speak_of(self, offline: frozenset[int]) -> None:
        lost = offline & self._state.exclusive
        if lost and lost != self._lost:
            log.error(None, "CPUs that containers have for themselves are offline", cpus=cpuset.format(lost))
        self._lost = lost

    def _take(self, state: CpuState) -> None:
        self._state = state
        if self._policy is not None:
            self._metrics.show(self._policy, state)
        self._save()

    def _save(self) -> None:
        """Write the state down; if that fails, containers keep their CPUs, and it is tried again."""
        try:
            write_state(self._file, self._name, self._state)
        except OSError as err:
            if not self._unsaved:
                log.error(err, "Cannot remember who has which CPUs", file=str(self._file))
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
    """Make the CPU manager that the configuration asks for; raises PolicyError.

    `pod_level` is the gate PodLevelResources; `system` is where the kernel tells of its CPUs.
    """
    file = root_dir / FILE_NAME
    if config.cpu_manager_policy != "static":
        return CpuManager(file, None, metrics=metrics)
    topology, options = read_topology(system), read_options(config.cpu_manager_policy_options)
    check_machine(topology, options)
    reserved = reserve(topology, config, options)
    log.info(
        "CPUs can be given to containers for themselves",
        all=cpuset.format(topology.all),
        reserved=cpuset.format(reserved),
        nodes=len(topology.nodes),
        sockets=len(topology.sockets),
        cpusPerCore=topology.cpus_per_core,
    )
    policy = StaticPolicy(topology, reserved, options, pod_level)
    return CpuManager(file, policy, online=lambda: read_online(system), metrics=metrics)
