"""The node's devices, put together: who gives them, what pods and the node's status get of it, who may ask.

`NodeDevices` is there before the engine, which admits pods and makes containers through it, and serves
plugins from then on. `know` when the engine is there to be asked and woken. Resource claims give
devices as well: `claims` is where they come in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceHealth, ResourceStatus
from pykubelet.cluster import Cluster
from pykubelet.config.gates import FeatureGates
from pykubelet.host.plugin_registration import PluginHandler
from pykubelet.node.amounts import DeviceAmounts
from pykubelet.preparing import StartError
from pykubelet.resources.cpu_manager import CpuManager
from pykubelet.resources.device_manager import DeviceManager
from pykubelet.resources.device_metrics import DeviceMetrics
from pykubelet.resources.dra_claims import ClaimError
from pykubelet.resources.grants import DeviceGrants
from pykubelet.resources.hints import AllocationError, PolicyError
from pykubelet.resources.memory_manager import MemoryManager
from pykubelet.resources.memory_nodes import read_memory_nodes
from pykubelet.resources.memory_tables import Block
from pykubelet.resources.pod_resources import (
    ClaimUse,
    Devices,
    MemoryUse,
    PodResourcesMetrics,
    serving_pod_resources,
)
from pykubelet.sync.active_pods import ActivePods
from pykubelet.sync.device_side import DeviceHealth, DeviceSide
from pykubelet.sync.engine import PodEngine

PLUGIN_TYPE = "DevicePlugin"
ASKING_FOLDER = "pod-resources"

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class Claims(Protocol):
    """Those who give devices by resource claims, as far as it matters here."""

    def cdi_devices(self, pod: Pod, container: Container) -> tuple[str, ...]:
        """Give the CDI names of a container's devices; raises ClaimError."""
        ...

    def health(self, pod: Pod, container: Container) -> list[ResourceStatus]:
        """Say how the devices of a container's claims are."""
        ...

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Give the claims of a container, for the pod-resources API."""
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
        """Be there for plugins until the stack is left; raises StartError."""
        try:
            await stack.enter_async_context(self.manager.serving())
        except PolicyError as err:
            raise StartError(str(err)) from err
        except (OSError, ExceptionGroup) as err:
            # What fails inside a scope of tasks comes as a group of one.
            cause = err.exceptions[0] if isinstance(err, ExceptionGroup) else err
            if not isinstance(cause, OSError):
                raise
            raise StartError(f"device plugins cannot be served: {cause.strerror or cause}") from err

    async def answer(self, stack: AsyncExitStack, registry: CollectorRegistry, shares: Shares) -> None:
        """Answer the pod-resources API until the stack is left; raises StartError."""
        assert self._pods is not None
        facts = GivenOut(self, self._pods, shares)
        serving = serving_pod_resources(self._root / ASKING_FOLDER, facts, PodResourcesMetrics(registry))
        try:
            await stack.enter_async_context(serving)
        except OSError as err:
            raise StartError(f"the pod-resources API cannot be served: {err.strerror or err}") from err

    def know(self, engine: PodEngine, cluster: Cluster | None) -> None:
        """Take who knows the pods, and the cluster that is told which devices the node has."""
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
        """Who takes plugins that register in the folder of all plugins."""
        return {PLUGIN_TYPE: self.manager.handler}

    @property
    def side(self) -> DeviceSide:
        """What the engine asks."""
        return DeviceSide(grants=self._grants, health=self._health)

    # PodFacts, for the manager

    def active(self) -> Collection[str] | None:
        """Give the uids of the pods that may have devices; None while that is not known."""
        return self._pods.uids() if self._pods is not None else None

    def running_before(self, uid: str) -> Collection[str]:
        """Give a pod's containers that run since an earlier agent; none once this one has admitted it."""
        return self._pods.running_before(uid) if self._pods is not None else ()

    # Behind it

    def _amounts(self) -> DeviceAmounts:
        return DeviceAmounts(*self.manager.amounts())

    def _changed(self, uids: frozenset[str]) -> None:
        self._tell_node()
        if uids and self._shows_health:
            self._wake(uids)

    async def _grants(self, pod: Pod, container: Container) -> DeviceGrants:
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


class Shares(Protocol):
    """Who gives CPUs and memory."""

    cpus: CpuManager
    memory: MemoryManager


class GivenOut:
    """Tells what containers have, for the pod-resources API (`ResourceFacts`)."""

    def __init__(self, devices: NodeDevices, pods: ActivePods, shares: Shares) -> None:
        self._devices = devices
        self._pods = pods
        self._shares = shares

    def active_pods(self) -> Iterable[Pod]:
        """Give the pods that run or may come to run."""
        self._devices.manager.reclaim()
        return self._pods.pods()

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Give a pod of this node."""
        return self._pods.named(namespace, name)

    def devices(self, uid: str, container: str) -> Devices:
        """Give a container's devices."""
        return self._devices.manager.held(uid, container)

    def cpus(self, uid: str, container: str) -> Iterable[int]:
        """Give the CPUs that a container has for itself."""
        return self._shares.cpus.exclusive_of(uid, container)

    def memory(self, uid: str, container: str) -> Iterable[MemoryUse]:
        """Give the memory that is kept for a container."""
        return map(_use, self._shares.memory.blocks(uid, container))

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Give the resource claims of a container."""
        claims = self._devices.claims
        return claims.claims(pod, container) if claims is not None else ()

    def allocatable_devices(self) -> Devices:
        """Give all devices that pods can have."""
        return self._devices.manager.usable()

    def allocatable_cpus(self) -> Iterable[int]:
        """Give all CPUs that pods can have for themselves."""
        return self._shares.cpus.allocatable

    def allocatable_memory(self) -> Iterable[MemoryUse]:
        """Give all memory that can be kept for pods."""
        return map(_use, self._shares.memory.allocatable())


def _use(block: Block) -> MemoryUse:
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
