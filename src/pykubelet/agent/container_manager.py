"""Builds and starts the container manager: CPU, memory, topology and device managers, resource claims.

The managers are built before the pod engine, which admits pods and starts containers through them:
`build_resource_allocator`, `NodeDevices`, `build_dra_manager`. They are started when the engine exists:
`start_resource_allocator`, `NodeDevices.start`, `start_dra_manager`. The device manager is the first hint
provider, as upstream: it cannot choose its NUMA nodes freely, the others can. It serves plugins before the
first pod is admitted and outlives the engine. A standalone node has no resource claims, which are objects of
the API server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

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
from pykubelet.kuberuntime.runtime_features import RuntimeFeatures
from pykubelet.logs import get_logger
from pykubelet.node.status import DeviceCapacity
from pykubelet.objects.fetch import retry_until_observed
from pykubelet.pluginmanager.registration import PluginHandler
from pykubelet.podsync.resource_allocator import DeviceHealth, DeviceProvider, ResourceAllocator
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.pod_records import ActivePods
from pykubelet.podworkers.workers import PodWorkerState
from pykubelet.util.tasks import TaskScope

if TYPE_CHECKING:
    from pykubelet.api.resource_claim import ResourceClaim
    from pykubelet.cm.dra.manager import Active, DraManager

log = get_logger(__name__)


def build_resource_allocator(
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
            plugin_provider=devices,
            metrics=TopologyMetrics(registry, alignment),
        )
    except PolicyError as err:
        raise StartupError(str(err)) from err
    except OSError as err:
        raise StartupError(f"the machine does not tell of its NUMA nodes: {err}") from err
    return ResourceAllocator(cpus, memory, topology, devices)


def start_resource_allocator(
    allocator: ResourceAllocator,
    settings: AgentSettings,
    cri: RuntimeConnection,
    engine: PodEngine,
    tasks: TaskScope,
) -> None:
    """Start to apply changes of the shared CPU pool to running containers."""

    def is_terminating(uid: str) -> bool:
        worker = engine.workers.get(uid)
        if worker is None:
            return not engine.records.is_desired(uid)
        return worker.state is not PodWorkerState.SYNCING

    def running() -> Iterator[RunningContainer]:
        for worker, observed in engine.observed_pods():
            for container in observed.running:
                yield RunningContainer(worker.uid, container.name, container.id)

    allocator.start(is_terminating)
    period = settings.config.cpu_manager_reconcile_period.seconds
    tasks.start(allocator.run(cri.runtime.update_container_resources, running, period), name="cpus")


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
POD_RESOURCES_DIR = "pod-resources"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class NodeDevices:
    """The device manager of one node, and its connections to pods and the node status."""

    def __init__(
        self, root: Path, plugin_dir: Path, gates: FeatureGates, registry: CollectorRegistry
    ) -> None:
        """Initialize with the root directory and the directory of kubelet.sock for device plugins."""
        numbers = [node.number for node in read_memory_nodes()]
        self.manager = DeviceManager(plugin_dir, numbers, self, DeviceMetrics(registry), self._changed)
        self._root = root
        self._reports_health = gates.enabled("ResourceHealthStatus")
        self._lists_active = gates.enabled("KubeletPodResourcesListUseActivePods")
        self._pods: ActivePods | None = None
        self._listeners: list[Callable[[frozenset[str]], None]] = []

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

    def start(self, engine: PodEngine, cluster: Cluster | None) -> None:
        """Start to follow the engine's pods, and to report changes to pod workers and the node status.

        The engine is built with the `provider`, so it cannot be an argument of the constructor; before the
        start no pod is known, and changes are not reported.
        """
        self._pods = ActivePods(engine.records, engine.workers, lambda: engine.pleg.pods)
        if cluster is not None:
            self._listeners.append(lambda uids: cluster.request_node_status())
        if self._reports_health:
            self._listeners.append(engine.workers.wake_all)

    async def serve_pod_resources(
        self,
        stack: AsyncExitStack,
        registry: CollectorRegistry,
        allocator: ResourceAllocator,
        claims: DraManager | None,
    ) -> None:
        """Serve the pod-resources API until the stack exits, after the start. Raises StartupError."""
        serving = serving_pod_resources(
            self._root / POD_RESOURCES_DIR, self.facts(allocator, claims), PodResourcesMetrics(registry)
        )
        try:
            await stack.enter_async_context(serving)
        except OSError as err:
            raise StartupError(f"the pod-resources API cannot be served: {err.strerror or err}") from err

    def facts(self, allocator: ResourceAllocator, claims: DraManager | None) -> PodResourcesProvider:
        """Return the resources of containers, after the start."""
        assert self._pods is not None
        return PodResourcesProvider(
            self.manager, self._pods, allocator, claims, lists_active=self._lists_active
        )

    def provider(self, claims: DraManager | None) -> DeviceProvider:
        """Return the interface of the devices for the pod engine, including those of resource claims."""
        devices = ContainerDevices(self.manager, claims)
        if not self._reports_health:
            return DeviceProvider(grants=devices.grants)
        return DeviceProvider(grants=devices.grants, health=devices.health)

    def capacity(self) -> DeviceCapacity:
        """Return the devices in the node's status."""
        return DeviceCapacity(*self.manager.amounts())

    @property
    def handlers(self) -> Mapping[str, PluginHandler]:
        """Handlers of device plugins that register in the plugin registration directory."""
        return {PLUGIN_TYPE: self.manager.handler}

    # PodFacts, for the device manager

    def active(self) -> Collection[str] | None:
        """Return the uids of the pods that may own devices; None while that is not known."""
        return self._pods.uids() if self._pods is not None else None

    def running_before(self, uid: str) -> Collection[str]:
        """Return a pod's containers that an earlier kubelet process started; empty after its admission."""
        return self._pods.running_before(uid) if self._pods is not None else ()

    def _changed(self, uids: frozenset[str]) -> None:
        for listener in self._listeners:
            listener(uids)


class ContainerDevices:
    """Devices of containers, of device plugins and of resource claims."""

    def __init__(self, manager: DeviceManager, claims: DraManager | None) -> None:
        self._manager = manager
        self._claims = claims

    async def grants(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Return the device run options of a container that is about to start. Raises AllocationError."""
        grants = await self._manager.grants(pod, container)
        if self._claims is None:
            return grants
        try:
            return grants.and_cdi(self._claims.cdi_devices(pod, container))
        except ClaimError as err:
            raise AllocationError(str(err)) from err

    def health(self, pod: Pod) -> DeviceHealth:
        """Return the health of the devices of a pod's containers."""
        found = {}
        for container in pod.spec.containers:
            statuses = (
                _resource_statuses(self._manager.health(pod.uid, container.name))
                if container.resources.limits
                else []
            )
            if self._claims is not None:
                statuses += self._claims.health(pod, container)
            if statuses:
                found[container.name] = statuses
        return found


class PodResourcesProvider:
    """Resources of containers, for the pod-resources API (`ResourceFacts`)."""

    def __init__(
        self,
        devices: DeviceManager,
        pods: ActivePods,
        allocator: ResourceAllocator,
        claims: DraManager | None,
        *,
        lists_active: bool,
    ) -> None:
        """Initialize; without `lists_active` List contains terminated pods, too."""
        self._devices = devices
        self._pods = pods
        self._lists_active = lists_active
        self._cpus = allocator.cpus
        self._memory = allocator.memory
        self._claims = claims

    def active_pods(self) -> Iterable[Pod]:
        """Return the pods that run or may still run."""
        self._devices.reclaim()
        return self._pods.pods()

    def listed_pods(self) -> Iterable[Pod]:
        """Return the pods in the response to List."""
        active = self.active_pods()
        return active if self._lists_active else self._pods.known_pods()

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod of this node by its name."""
        return self._pods.named(namespace, name)

    def devices(self, uid: str, container: str) -> Devices:
        """Return the devices of a container."""
        return self._devices.held(uid, container)

    def cpus(self, uid: str, container: str) -> Iterable[int]:
        """Return the exclusive CPUs of a container."""
        return self._cpus.exclusive_of(uid, container)

    def memory(self, uid: str, container: str) -> Iterable[MemoryUse]:
        """Return the memory blocks of a container."""
        return map(_memory_use, self._memory.blocks(uid, container))

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Return the resource claims of a container."""
        return self._claims.claims(pod, container) if self._claims is not None else ()

    def allocatable_devices(self) -> Devices:
        """Return all allocatable devices."""
        return self._devices.usable()

    def allocatable_cpus(self) -> Iterable[int]:
        """Return all CPUs that can be allocated exclusively."""
        return self._cpus.allocatable

    def allocatable_memory(self) -> Iterable[MemoryUse]:
        """Return all allocatable memory blocks."""
        return map(_memory_use, self._memory.allocatable())


def _memory_use(block: MemoryBlock) -> MemoryUse:
    return MemoryUse(block.type, block.size, frozenset(block.numa_affinity))


def _resource_statuses(health: Mapping[str, Mapping[str, bool]]) -> list[ResourceStatus]:
    return [
        ResourceStatus(
            name=resource,
            resources=[
                ResourceHealth(resource_id=device_id, health=HEALTHY if healthy else UNHEALTHY)
                for device_id, healthy in devices.items()
            ],
        )
        for resource, devices in health.items()
    ]


def build_dra_manager(
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
    slices = ResourceSliceCleaner(api, settings.node_name, tasks, cluster.informer.synced)
    drivers.add_listener(slices.driver_changed)
    slices.start()

    async def fetch(namespace: str, name: str) -> ResourceClaim:
        return await retry_until_observed(lambda: api.get(RESOURCE_CLAIMS, name, namespace))

    extended = gates.enabled("DRAExtendedResource")
    try:
        return DraManager(
            root,
            fetch,
            drivers,
            extended=extended,
            pod_groups=settings.gates.enabled("DRAWorkloadResourceClaims"),
            metrics=metrics,
            health=health,
        )
    except PolicyError as err:
        raise StartupError(str(err)) from err


def start_dra_manager(
    claims: DraManager, features: RuntimeFeatures, engine: PodEngine, active: Active, tasks: TaskScope
) -> None:
    """Start to unprepare claims of removed pods, and to wake pods when their drivers change."""
    claims.drivers.add_pod_listener(engine.workers.wake)
    claims.add_health_listener(engine.workers.wake_all)
    warned = set[str]()

    def warn(driver: str, usable: bool) -> None:
        if usable and driver not in warned and not features.has_cdi():
            runtime = features.version
            warned.add(driver)
            log.warning(
                "Container runtime has no CDI support, devices of claims do not reach containers: update it",
                driver=driver,
                runtime=f"{runtime.runtime_name} {runtime.runtime_version}",
            )

    claims.drivers.add_listener(warn)
    tasks.start(claims.run(active), name="claims")


def dra_plugin_handlers(claims: DraManager | None) -> Mapping[str, PluginHandler]:
    """Return the handlers of plugins that register as DRA drivers."""
    return {"DRAPlugin": claims.drivers} if claims is not None else {}
