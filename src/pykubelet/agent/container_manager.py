"""Builds and starts the container manager: CPU, memory, topology and device managers, resource claims.

The managers are built before the pod engine, which admits pods and starts containers through them:
`make_allotment`, `NodeDevices`, `make_claims`. They are started when the engine exists: `start_allotment`,
`NodeDevices.know`, `start_claims`. The device manager is the first hint provider, as upstream: it cannot
choose its NUMA nodes freely, the others can. It serves plugins before the first pod is admitted and outlives
the engine. A standalone node has no resource claims, which are objects of the API server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings, Cluster
from pykubelet.agent.host_setup import StartupError
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceHealth, ResourceStatus
from pykubelet.cm.capacity import read_capacity, reserved_amounts
from pykubelet.cm.cpu.manager import CpuManager, CpuMetrics, RunningContainer, open_cpu_manager
from pykubelet.cm.devices.manager import DeviceManager
from pykubelet.cm.devices.plugins import DeviceMetrics
from pykubelet.cm.devices.run_options import DeviceRunOptions
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.cm.memory.manager import STATE_FILE, MemoryManager, MemoryMetrics
from pykubelet.cm.memory.numa_memory import MemoryBlock
from pykubelet.cm.memory.numa_nodes import MemoryNode, read_memory_nodes
from pykubelet.cm.podresources.server import (
    ClaimUse,
    Devices,
    MemoryUse,
    PodResourcesMetrics,
    serving_pod_resources,
)
from pykubelet.cm.topology.hints import AllocationError, Policy, PolicyError
from pykubelet.cm.topology.manager import AlignmentMetrics, Scope, TopologyManager, TopologyMetrics
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.options import supports_cdi
from pykubelet.logs import get_logger
from pykubelet.node.status import DeviceCapacity
from pykubelet.objects.fetch import until_seen
from pykubelet.pluginmanager.registration import PluginHandler
from pykubelet.podsync.resource_allocator import DeviceHealth, DeviceProvider, ResourceAllocator
from pykubelet.podworkers.active_pods import ActivePods
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.worker import PodWorkerState
from pykubelet.util.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.api.resource_claim import ResourceClaim
    from pykubelet.cm.devices.manager import DeviceManager
    from pykubelet.cm.dra.manager import Active, DraManager

log = get_logger(__name__)


def make_allotment(
    settings: AgentSettings, registry: CollectorRegistry, devices: DeviceManager | None = None
) -> ResourceAllocator:
    """Return the allocator of CPUs, memory and devices. Raises StartupError.

    The device manager must be serving before the first pod is admitted.
    """
    config = settings.config
    alignment = AlignmentMetrics(registry)
    try:
        nodes = read_memory_nodes()
        cpus = _cpus(settings, registry, alignment)
        memory = _memory(settings, registry, nodes)
        topology = TopologyManager(
            cast(Policy, config.topology_manager_policy),
            cast(Scope, config.topology_manager_scope),
            config.topology_manager_policy_options,
            nodes,
            (cpus, memory),
            asking=devices,
            metrics=TopologyMetrics(registry, alignment),
        )
    except PolicyError as err:
        raise StartupError(str(err)) from err
    except OSError as err:
        raise StartupError(f"the machine does not tell of its NUMA nodes: {err}") from err
    return ResourceAllocator(cpus, memory, topology, devices)


def start_allotment(
    allotment: ResourceAllocator,
    settings: AgentSettings,
    cri: RuntimeConnection,
    engine: PodEngine,
    tasks: TaskScope,
) -> None:
    """Start to apply changes of the shared CPU pool to running containers."""

    def is_leaving(uid: str) -> bool:
        worker = engine.workers.get(uid)
        if worker is None:
            return not engine.is_desired(uid) and engine.store.get(uid) is None
        return worker.state is not PodWorkerState.SYNCING

    def running() -> Iterator[RunningContainer]:
        for worker in engine.workers.all():
            observed = engine.life.observed(worker.uid)
            for container in observed.running if observed is not None else ():
                yield RunningContainer(worker.uid, container.name, container.id)

    allotment.listen_to(is_leaving)
    period = settings.config.cpu_manager_reconcile_period.seconds
    tasks.start(allotment.run(cri.runtime.update_container_resources, running, period), name="cpus")


def _cpus(settings: AgentSettings, registry: CollectorRegistry, alignment: AlignmentMetrics) -> CpuManager:
    return open_cpu_manager(
        settings.config,
        Path(settings.flags.root_dir),
        pod_level=settings.gates.enabled("PodLevelResources"),
        metrics=CpuMetrics(registry, alignment),
    )


def _memory(settings: AgentSettings, registry: CollectorRegistry, nodes: list[MemoryNode]) -> MemoryManager:
    config = settings.config
    file = Path(settings.flags.root_dir) / STATE_FILE
    try:
        return MemoryManager(
            cast(Literal["None", "Static"], config.memory_manager_policy),
            file,
            nodes,
            config.reserved_memory,
            reserved_amounts(read_capacity(), config),
            pod_level=settings.gates.enabled("PodLevelResources"),
            metrics=MemoryMetrics(registry),
        )
    except OSError as err:
        raise StartupError(
            f"{file}: {err.strerror or err}: the memory manager must be able to keep its state there"
        ) from err


PLUGIN_TYPE = "DevicePlugin"
ASKING_FOLDER = "pod-resources"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class Claims(Protocol):
    """Devices that containers get through resource claims."""

    def cdi_devices(self, pod: Pod, container: Container) -> tuple[str, ...]:
        """Return the CDI names of a container's devices. Raises ClaimError."""
        ...

    def health(self, pod: Pod, container: Container) -> list[ResourceStatus]:
        """Return the health of the devices of a container's claims."""
        ...

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Return the claims of a container, for the pod-resources API."""
        ...


class NodeDevices:
    """The devices of one node."""

    def __init__(
        self, root: Path, plugin_dir: Path, gates: FeatureGates, registry: CollectorRegistry
    ) -> None:
        """Initialize with the root directory and the directory of kubelet.sock for device plugins."""
        numbers = [node.number for node in read_memory_nodes()]
        self.manager = DeviceManager(plugin_dir, numbers, self, DeviceMetrics(registry), self._changed)
        self.claims: Claims | None = None
        self._root = root
        self._shows_health = gates.enabled("ResourceHealthStatus")
        self._pods: ActivePods | None = None
        self._wake: Callable[[Iterable[str]], None] = lambda uids: None
        self._tell_node: Callable[[], None] = lambda: None

    async def serve(self, stack: AsyncExitStack) -> None:
        """Serve device plugins until the stack exits. Raises StartupError."""
        try:
            await stack.enter_async_context(self.manager.serving())
        except PolicyError as err:
            raise StartupError(str(err)) from err
        except (OSError, ExceptionGroup) as err:
            # A failure inside a task scope is wrapped in an exception group.
            cause = err.exceptions[0] if isinstance(err, ExceptionGroup) else err
            if not isinstance(cause, OSError):
                raise
            raise StartupError(f"device plugins cannot be served: {cause.strerror or cause}") from err

    async def answer(
        self, stack: AsyncExitStack, registry: CollectorRegistry, shares: ContainerCpusets
    ) -> None:
        """Serve the pod-resources API until the stack exits. Raises StartupError."""
        assert self._pods is not None
        facts = PodResourcesProvider(self, self._pods, shares)
        serving = serving_pod_resources(self._root / ASKING_FOLDER, facts, PodResourcesMetrics(registry))
        try:
            await stack.enter_async_context(serving)
        except OSError as err:
            raise StartupError(f"the pod-resources API cannot be served: {err.strerror or err}") from err

    def know(self, engine: PodEngine, cluster: Cluster | None) -> None:
        """Connect to the pod engine, and to the cluster whose node status reports the devices."""
        self._wake = engine.workers.wake_all
        if cluster is not None:
            cluster.devices, self._tell_node = self._amounts, cluster.reporter.wake
        self._pods = ActivePods(
            store=engine.store,
            workers=engine.workers,
            statuses=engine.statuses,
            in_runtime=lambda: engine.pleg.pods,
            wanted=engine.wanted,
            all_reported=lambda: engine.all_sources_reported,
        )

    @property
    def handlers(self) -> Mapping[str, PluginHandler]:
        """Handlers of device plugins that register in the plugin registration directory."""
        return {PLUGIN_TYPE: self.manager.handler}

    @property
    def side(self) -> DeviceProvider:
        """Interface of the devices for the pod engine."""
        return DeviceProvider(grants=self._grants, health=self._health)

    # PodFacts, for the device manager

    def active(self) -> Collection[str] | None:
        """Return the uids of the pods that may own devices; None while that is not known."""
        return self._pods.uids() if self._pods is not None else None

    def running_before(self, uid: str) -> Collection[str]:
        """Return a pod's containers that an earlier kubelet process started; empty after its admission."""
        return self._pods.running_before(uid) if self._pods is not None else ()

    # Behind it

    def _amounts(self) -> DeviceCapacity:
        return DeviceCapacity(*self.manager.amounts())

    def _changed(self, uids: frozenset[str]) -> None:
        self._tell_node()
        if uids and self._shows_health:
            self._wake(uids)

    async def _grants(self, pod: Pod, container: Container) -> DeviceRunOptions:
        grants = await self.manager.grants(pod, container)
        if self.claims is None:
            return grants
        try:
            return grants.and_cdi(self.claims.cdi_devices(pod, container))
        except ClaimError as err:
            raise AllocationError(str(err)) from err

    def _health(self, pod: Pod) -> DeviceHealth:
        if not self._shows_health:
            return {}
        found = {}
        for container in pod.spec.containers:
            told = _shown(self.manager.health(pod.uid, container.name)) if container.resources.limits else []
            if self.claims is not None:
                told += self.claims.health(pod, container)
            if told:
                found[container.name] = told
        return found


class ContainerCpusets(Protocol):
    """CPU and memory managers, as the pod-resources API reads them."""

    cpus: CpuManager
    memory: MemoryManager


class PodResourcesProvider:
    """Resources of containers, for the pod-resources API (`ResourceFacts`)."""

    def __init__(self, devices: NodeDevices, pods: ActivePods, shares: ContainerCpusets) -> None:
        self._devices = devices
        self._pods = pods
        self._shares = shares

    def active_pods(self) -> Iterable[Pod]:
        """Return the pods that run or may still run."""
        self._devices.manager.reclaim()
        return self._pods.pods()

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod of this node by its name."""
        return self._pods.named(namespace, name)

    def devices(self, uid: str, container: str) -> Devices:
        """Return the devices of a container."""
        return self._devices.manager.held(uid, container)

    def cpus(self, uid: str, container: str) -> Iterable[int]:
        """Return the exclusive CPUs of a container."""
        return self._shares.cpus.exclusive_of(uid, container)

    def memory(self, uid: str, container: str) -> Iterable[MemoryUse]:
        """Return the memory blocks of a container."""
        return map(_use, self._shares.memory.blocks(uid, container))

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Return the resource claims of a container."""
        claims = self._devices.claims
        return claims.claims(pod, container) if claims is not None else ()

    def allocatable_devices(self) -> Devices:
        """Return all allocatable devices."""
        return self._devices.manager.usable()

    def allocatable_cpus(self) -> Iterable[int]:
        """Return all CPUs that can be allocated exclusively."""
        return self._shares.cpus.allocatable

    def allocatable_memory(self) -> Iterable[MemoryUse]:
        """Return all allocatable memory blocks."""
        return map(_use, self._shares.memory.allocatable())


def _use(block: MemoryBlock) -> MemoryUse:
    return MemoryUse(block.type, block.size, frozenset(block.numa_affinity))


def _shown(health: Mapping[str, Mapping[str, bool]]) -> list[ResourceStatus]:
    return [
        ResourceStatus(
            name=resource,
            resources=[
                ResourceHealth(resource_id=one, health=HEALTHY if healthy else UNHEALTHY)
                for one, healthy in devices.items()
            ],
        )
        for resource, devices in health.items()
    ]


def make_claims(
    settings: AgentSettings, registry: CollectorRegistry, cluster: Cluster | None, tasks: TaskScope
) -> DraManager | None:
    """Return the DRA manager; None on a node without claims. Raises StartupError."""
    gates = settings.gates
    if cluster is None or not gates.enabled("DynamicResourceAllocation"):
        return None
    # Imported here: a standalone node does not need them in memory.
    from pykubelet.cm.dra.health import DeviceHealthCache
    from pykubelet.cm.dra.manager import RESOURCE_CLAIMS, DraManager
    from pykubelet.cm.dra.metrics import DraMetrics
    from pykubelet.cm.dra.plugins import DraPluginRegistry
    from pykubelet.cm.dra.slices import ResourceSliceCleaner

    root, api, metrics = Path(settings.flags.root_dir), cluster.clients.objects, DraMetrics(registry)
    health = None
    if gates.enabled("ResourceHealthStatus"):
        health = DeviceHealthCache(root, tasks, messages=gates.enabled("ResourceHealthStatusMessage"))
    drivers = DraPluginRegistry(tasks, metrics, health)
    slices = ResourceSliceCleaner(api, settings.node_name, tasks, cluster.reporter.informer.synced)
    drivers.listen(slices.driver_changed)
    slices.start()

    async def fetch(namespace: str, name: str) -> ResourceClaim:
        return await until_seen(lambda: api.get(RESOURCE_CLAIMS, name, namespace))

    extended = gates.enabled("DRAExtendedResource")
    try:
        return DraManager(root, fetch, drivers, extended=extended, metrics=metrics, health=health)
    except PolicyError as err:
        raise StartupError(str(err)) from err


def start_claims(
    claims: DraManager, cri: RuntimeConnection, engine: PodEngine, active: Active, tasks: TaskScope
) -> None:
    """Start to unprepare claims of removed pods, and to wake pods when their drivers change."""
    claims.listen(engine.workers.wake, engine.workers.wake_all)
    runtime, warned = cri.version, set[str]()

    def warn(driver: str, usable: bool) -> None:
        if usable and driver not in warned:
            warned.add(driver)
            log.warning(
                "Container runtime has no CDI support, devices of claims do not reach containers: update it",
                driver=driver,
                runtime=f"{runtime.runtime_name} {runtime.runtime_version}",
            )

    if not supports_cdi(runtime.runtime_name, runtime.runtime_version):
        claims.drivers.listen(warn)
    tasks.start(claims.run(active), name="claims")


def claim_plugins(claims: DraManager | None) -> Mapping[str, PluginHandler]:
    """Return the handlers of plugins that register as DRA drivers."""
    return {"DRAPlugin": claims.drivers} if claims is not None else {}
