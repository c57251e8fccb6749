"""Device manager: allocates the devices of device plugins to containers, and releases them with their pods.

    plugins           plugins register, disconnect, and list their devices -> registry
    hints, allocate   at admission: selection of devices (`selection`), then the plugin's Allocate call
    grants            at each container start: device nodes, mounts, environment
    checkpoint        allocations, on disk before the pod is admitted

A container keeps its devices for the pod's life: across restarts of itself, of the plugin and of the kubelet.
A plugin that hangs, crashes or returns invalid responses fails the pods that need it, with its error, and
blocks no others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.devices.checkpoint import FILE_NAME, encode, read_checkpoint, write_checkpoint
from pykubelet.cm.devices.plugins import GRACE_SECONDS, DeviceMetrics, DevicePlugin, DevicePlugins
from pykubelet.cm.devices.registry import DeviceOwner, DeviceRegistry
from pykubelet.cm.devices.run_options import NO_DEVICE_OPTIONS, DeviceRunOptions
from pykubelet.cm.devices.selection import (
    ChoiceError,
    PreferredAllocationRequest,
    choose,
    device_hints,
    grants_of,
    is_served,
    reusable,
)
from pykubelet.cm.qos import pod_limits
from pykubelet.cm.topology.hints import ANYWHERE, AllocationError, Hints, TopologyHint
from pykubelet.linux.kernel import label_for_containers
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import PluginHandler
from pykubelet.transport.grpc_server import serving
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
SOCKET_NAME = "kubelet.sock"
_DIRECTORY_MODE = 0o750


class PodFacts(Protocol):
    """State of pods that other components provide."""

    def active(self) -> Collection[str] | None:
        """Return the UIDs of the pods that may have devices, or None until all pod sources are synced."""

    def running_before(self, uid: str) -> Collection[str]:
        """Return a pod's containers that an earlier kubelet process started; empty once it is admitted."""


def _nothing(uids: frozenset[str]) -> None:
    """Ignore the change."""


class DeviceManager:
    """Device manager of a node, while it is `serving`."""

    def __init__(
        self,
        directory: Path,
        numa_nodes: Collection[int],
        pods: PodFacts,
        metrics: DeviceMetrics | None = None,
        changed: Callable[[frozenset[str]], None] = _nothing,
    ) -> None:
        """Initialize with the directory of device plugins and the host's NUMA nodes.

        `changed` is called when the number of devices may have changed, with the UIDs of pods whose devices
        changed.
        """
        self._directory = directory
        self._numa_nodes = numa_nodes
        self._pods = pods
        self._metrics = metrics or DeviceMetrics()
        self._changed = changed
        self._registry = DeviceRegistry()
        self._plugins: DevicePlugins | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._saving = asyncio.Lock()
        self._saved = b""
        self._plugin_deadline: float | None = None
        """Loop time until which pods wait for plugins that were registered before the kubelet started."""
        self._plugin_event = asyncio.Event()
        """Set, and replaced by a new one, whenever a plugin registered, listed devices or disconnected."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve plugins and pods within the block.

        Raises PolicyError when the checkpoint is invalid, and OSError.
        """
        self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        label_for_containers(self._directory)
        self._registry = read_checkpoint(self._directory / FILE_NAME)
        # Plugins register again when their socket is removed.
        for path in self._directory.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)
        async with TaskScope() as scope:
            plugins = DevicePlugins(
                self._directory, self._registry, scope, self._metrics, self._handle_plugin_change
            )
            async with serving(self._directory / SOCKET_NAME, plugins.methods()):
                self._plugins = plugins
                self._plugin_deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
                try:
                    yield
                finally:
                    self._plugins = None
                    plugins.close()

    @property
    def handler(self) -> PluginHandler:
        """Handler of plugins of the type `DevicePlugin`, while it is `serving`."""
        assert self._plugins is not None
        return self._plugins

    def registration_problem(self) -> str | None:
        """Return the reason why plugins cannot register now, or None."""
        if self._plugins is not None:
            return None
        return "device registration error: no device plugins can register, their socket is not served"

    # HintProvider

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Return the topology hints for a container's devices; existing ones are hinted again."""
        self._reclaim(pod)
        found: Hints = {}
        for resource, size in self._requested(pod, container):
            held = self._registry.allocations.get(DeviceOwner(pod.metadata.uid, container.name, resource))
            mine = held.ids if held is not None else frozenset()
            left = self._reusable(pod, container, resource)
            found[resource] = self._hints(resource, size, mine, left)
        return found

    def pod_hints(self, pod: Pod) -> Hints:
        """Return the topology hints for the devices of all the pod's containers."""
        self._reclaim(pod)
        uid = pod.metadata.uid
        return {
            resource: self._hints(resource, size, self._registry.held_by_pod(uid, resource), frozenset())
            for resource, size in self._known(pod_limits(pod, overhead=False))
        }

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None] | None:
        """Allocate a container's devices near the chosen nodes; no-op if it has them.

        Containers of a pod come in the order of their start. Returns None if the container requests no
        devices; awaiting the result may raise AllocationError.
        """
        requested = self._requested(pod, container)
        return self._allocate(pod, container, requested, chosen) if requested else None

    async def _allocate(
        self, pod: Pod, container: Container, requested: list[tuple[str, int]], chosen: TopologyHint
    ) -> None:
        self._reclaim(pod)
        changed = False
        for resource, size in requested:
            async with self._locks[resource]:
                changed |= await self._serve(pod, container, resource, size, chosen)
        if changed:
            try:
                await self._save()
            except OSError as err:
                raise AllocationError(f'failed to write checkpoint file "{FILE_NAME}": {err}') from err

    # Waiting for plugins

    def awaited(self, pod: Pod) -> list[str]:
        """Return the pod's resources whose plugins have not registered yet since the kubelet started.

        Empty after `GRACE_SECONDS`, when the node removes those resources.
        """
        if self._plugins is None or self._plugin_deadline is None:
            return []
        if asyncio.get_running_loop().time() >= self._plugin_deadline:
            self._plugin_deadline = None
            return []
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        names = {resource for container in containers for resource, _ in self._requested(pod, container)}
        return sorted(name for name in names if self._registry.is_awaited(name))

    async def wait_registered(self, pod: Pod) -> None:
        """Wait until no plugin is `awaited` for the pod any more."""
        while self.awaited(pod):
            try:
                async with asyncio.timeout_at(self._plugin_deadline):
                    await self._plugin_event.wait()
            except TimeoutError:
                self._plugin_deadline = None

    # Devices of containers

    async def grants(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Return the run options of the devices of a container about to start. Raises AllocationError."""
        requested = self._requested(pod, container)
        if not requested:
            return NO_DEVICE_OPTIONS
        uid, active = pod.metadata.uid, self._pods.active()
        missing = any(
            DeviceOwner(uid, container.name, resource) not in self._registry.allocations
            for resource, _ in requested
        )
        if missing and (active is None or uid in active):
            # Its plugin was unknown when the pod was admitted, or the checkpoint was lost.
            log.info("Allocating devices at container start", pod=pod.full_name, containerName=container.name)
            await self._allocate(pod, container, requested, ANYWHERE)
        for resource, _ in requested:
            await self._pre_start(DeviceOwner(uid, container.name, resource))
        grants, clashes = grants_of(self._registry.held_by(uid, container.name))
        for clash in clashes:
            log.info(
                "Ignored conflicting option of device plugin",
                option=clash,
                pod=pod.full_name,
                containerName=container.name,
            )
        return grants

    def held(self, uid: str, container: str) -> dict[str, dict[str, frozenset[int]]]:
        """Return the devices of a container, by resource and ID, with their NUMA nodes."""
        held = self._registry.held_by(uid, container)
        return {resource: allocation.numa_nodes() for resource, allocation in sorted(held.items())}

    def health(self, uid: str, container: str) -> dict[str, dict[str, bool]]:
        """Return whether each device of a container is healthy; True for devices not listed by a plugin."""
        return {
            resource: {
                device_id: device.healthy
                if (device := self._registry.devices(resource).get(device_id))
                else True
                for device_id in sorted(allocation.ids)
            }
            for resource, allocation in sorted(self._registry.held_by(uid, container).items())
        }

    def usable(self) -> dict[str, dict[str, frozenset[int]]]:
        """Return all devices that pods can use, by resource and ID, with their NUMA nodes."""
        return {
            name: {device_id: resource.devices[device_id].nodes for device_id in sorted(resource.usable)}
            for name, resource in sorted(self._registry.resources.items())
        }

    # Resources of the node

    def amounts(self) -> tuple[Resources, Resources, list[str]]:
        """Return capacity and allocatable for the node's status, and the removed resources."""
        capacity, allocatable = self._registry.counts()
        return _quantities(capacity), _quantities(allocatable), sorted(self._registry.removed)

    def minimum_amounts(self, uid: str) -> Resources:
        """Return the minimum amounts of the node for admitting again a pod that holds devices."""
        if not any(owner.uid == uid for owner in self._registry.allocations):
            return {}
        resources = {owner.resource for owner in self._registry.allocations}
        return _quantities({name: len(self._registry.in_use(name)) for name in resources})

    def allocatable_for(self, uid: str) -> Resources:
        """Return the allocatable amounts for admitting a pod, including the devices that it holds.

        Plugins may not have registered yet after a kubelet start; a pod that holds devices has them
        nevertheless.
        """
        _, allocatable, removed = self.amounts()
        found = {**dict.fromkeys(removed, Quantity.from_units(0)), **allocatable}
        for name, amount in self.minimum_amounts(uid).items():
            if name not in found or int(found[name]) < int(amount):
                found[name] = amount
        return found

    @property
    def holders(self) -> set[str]:
        """UIDs of the pods that hold devices."""
        return {owner.uid for owner in self._registry.allocations}

    def reclaim(self) -> None:
        """Release the devices of pods that no longer exist."""
        self._reclaim(None)

    def forget(self, uid: str) -> None:
        """Release the devices of a terminated pod: none of its containers runs or will run again."""
        self._registry.forget_pod(uid)

    # Internals

    def _requested(self, pod: Pod, container: Container) -> list[tuple[str, int]]:
        limits = container.resources.limits
        if claimed := pod.status.extended_resource_claim_status:
            # The scheduler may have allocated these from a ResourceClaim.
            mapped = {
                mapping.resource_name
                for mapping in claimed.request_mappings
                if mapping.container_name == container.name
            }
            limits = {name: amount for name, amount in limits.items() if name not in mapped}
        return self._known(limits)

    def _known(self, limits: Resources) -> list[tuple[str, int]]:
        return [
            (resource, int(amount))
            for resource, amount in limits.items()
            if int(amount) > 0 and self._registry.knows(resource)
        ]

    def _reclaim(self, serving: Pod | None) -> None:
        active = self._pods.active()
        if active is not None:
            self._registry.retain({*active, serving.metadata.uid} if serving is not None else active)

    def _reusable(self, pod: Pod, container: Container, resource: str) -> frozenset[str]:
        held = {
            owner.container: allocation.ids
            for owner, allocation in self._registry.allocations.items()
            if (owner.uid, owner.resource) == (pod.metadata.uid, resource)
        }
        return reusable(pod, container, held) & self._registry.usable(resource)

    def _hints(
        self, resource: str, size: int, mine: frozenset[str], left: frozenset[str]
    ) -> list[TopologyHint] | None:
        devices = self._registry.devices(resource)
        if not mine:
            return device_hints(size, devices, self._registry.available(resource), self._numa_nodes, left)
        if len(mine) != size and any(device.nodes for device in devices.values()):
            return []
        return device_hints(size, devices, mine, self._numa_nodes)

    async def _serve(
        self, pod: Pod, container: Container, resource: str, size: int, chosen: TopologyHint
    ) -> bool:
        """Allocate a container's devices of one resource; return whether it had none before."""
        owner = DeviceOwner(pod.metadata.uid, container.name, resource)
        held = self._registry.allocations.get(owner)
        before = self._pods.running_before(owner.uid)
        if owner.container in before or (before and held is not None and len(held.ids) == size):
            # It has its devices, or the pod would not run: its plugin may not have registered again yet.
            return False
        plugin = self._plugins.get(resource) if self._plugins is not None else None
        try:
            if is_served(owner, size, held, self._registry.resources.get(resource)):
                return False
            if plugin is None:
                raise ChoiceError(f"unknown Device Plugin {resource}")
            choice = choose(
                resource,
                size,
                self._registry.devices(resource),
                self._registry.available(resource),
                self._reusable(pod, container, resource),
                chosen.nodes,
            )
            preferred: list[str] = []
            if plugin.has_preferences and (request := choice.plugin_request):
                preferred = await _preferred(plugin, request)
            ids = choice.complete(preferred)
            self._registry.reserve(owner, ids)
            with self._metrics.timed(resource):
                response = await plugin.allocate(ids)
            self._registry.record_allocation(owner, ids, response)
        except (ChoiceError, PluginError) as err:
            raise AllocationError(str(err)) from err
        finally:
            self._registry.release(owner)
        log.v(3).info(
            "Allocated devices", pod=pod.full_name, containerName=container.name, devices=sorted(ids)
        )
        return True

    async def _pre_start(self, owner: DeviceOwner) -> None:
        held = self._registry.allocations.get(owner)
        if held is None or self._plugins is None or not self._plugins.requires_pre_start(owner.resource):
            return
        try:
            plugin = self._plugins.get(owner.resource)
            if plugin is None:
                raise PluginError("Unavailable", f"the plugin of {owner.resource} has gone away")
            await plugin.pre_start(held.ids)
        except PluginError as err:
            raise AllocationError(f"device plugin PreStartContainer rpc failed with err: {err}") from err

    async def _handle_plugin_change(self, uids: frozenset[str]) -> None:
        """Handle a change that a plugin reported."""
        self._plugin_event.set()
        self._plugin_event = asyncio.Event()
        self._changed(uids)
        try:
            await self._save()
        except OSError as err:
            log.error(err, "Failed to write device manager checkpoint")

    async def _save(self) -> None:
        """Update the checkpoint. Raises OSError. Concurrent calls are combined into one write."""
        async with self._saving:
            content = encode(self._registry)
            if content != self._saved:
                await finish_in_thread(lambda: write_checkpoint(self._directory / FILE_NAME, content))
                self._saved = content


async def _preferred(plugin: DevicePlugin, request: PreferredAllocationRequest) -> list[str]:
    try:
        return await plugin.preferred(request.available, request.required, request.size)
    except PluginError as err:
        raise ChoiceError(f"device plugin GetPreferredAllocation rpc failed with err: {err}") from err


def _quantities(counts: dict[str, int]) -> Resources:
    return {name: Quantity.from_units(count) for name, count in sorted(counts.items())}
