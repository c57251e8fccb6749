"""Devices for containers: what plugins offer is given out, remembered, and taken back when pods have gone.

    device_plugins    plugins come and go, and list their devices      -> device_table
    hints, allocate   at admission: who gets which (`device_hints`, `device_choice`), then the plugin is asked
    grants            at each start of a container: device nodes, mounts, environment (`device_grants`)
    device_checkpoint who has what, on disk before the pod is admitted

A container keeps its devices for the pod's life: over restarts of itself, of the plugin and of the agent.
A plugin that hangs, dies or lies makes pods that need it fail with its words, and holds up nobody else.
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
from pykubelet.cm.devices.run_options import NOTHING, DeviceRunOptions
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
from pykubelet.linux.kernel import share_with_containers
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import PluginHandler
from pykubelet.transport.grpc_server import serving
from pykubelet.util.tasks import TaskScope, finish_in_thread

log = get_logger(__name__)
SOCKET_NAME = "kubelet.sock"
_FOLDER_MODE = 0o750


class PodFacts(Protocol):
    """What is known of pods elsewhere."""

    def active(self) -> Collection[str] | None:
        """Give the uids of the pods that may have devices; None while some sources have not been heard."""

    def running_before(self, uid: str) -> Collection[str]:
        """Give a pod's containers that run since an earlier agent; none once this one has admitted it."""


def _nothing(uids: frozenset[str]) -> None:
    """Tell nobody."""


class DeviceManager:
    """The devices of one node, while it is `serving`."""

    def __init__(
        self,
        folder: Path,
        numa_nodes: Collection[int],
        pods: PodFacts,
        metrics: DeviceMetrics | None = None,
        changed: Callable[[frozenset[str]], None] = _nothing,
    ) -> None:
        """Take the folder of device plugins and the machine's NUMA nodes.

        `changed` is called whenever the amounts of devices may be others than before, with the uids of
        pods to whose devices something happened.
        """
        self._folder = folder
        self._numa_nodes = numa_nodes
        self._pods = pods
        self._metrics = metrics or DeviceMetrics()
        self._changed = changed
        self._table = DeviceRegistry()
        self._plugins: DevicePlugins | None = None
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._saving = asyncio.Lock()
        self._saved = b""
        self._awaits_until: float | None = None
        """Loop time until which pods wait for plugins that were here before the kubelet started."""
        self._news = asyncio.Event()
        """Set, and replaced by a new one, whenever a plugin has registered, listed devices or gone."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Be there for plugins and pods; raises PolicyError when the checkpoint is not sound, and OSError."""
        self._folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        share_with_containers(self._folder)
        self._table = read_checkpoint(self._folder / FILE_NAME)
        # Plugins take the disappearance of their socket as the sign to register anew.
        for path in self._folder.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)
        async with TaskScope() as scope:
            plugins = DevicePlugins(self._folder, self._table, scope, self._metrics, self._take_note)
            async with serving(self._folder / SOCKET_NAME, plugins.methods()):
                self._plugins = plugins
                self._awaits_until = asyncio.get_running_loop().time() + GRACE_SECONDS
                try:
                    yield
                finally:
                    self._plugins = None
                    plugins.close()

    @property
    def handler(self) -> PluginHandler:
        """Give who takes plugins of the type `DevicePlugin`, while it is `serving`."""
        assert self._plugins is not None
        return self._plugins

    def registration_problem(self) -> str | None:
        """Say why plugins cannot register now; None when they can."""
        if self._plugins is not None:
            return None
        return "device registration error: no device plugins can register, their socket is not served"

    # A HintProvider

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Say near to which NUMA nodes a container's devices could be; what it has, it gets again."""
        self._reclaim(pod)
        found: Hints = {}
        for resource, size in self._wanted(pod, container):
            held = self._table.holdings.get(DeviceOwner(pod.metadata.uid, container.name, resource))
            mine = held.ids if held is not None else frozenset()
            left = self._left_over(pod, container, resource)
            found[resource] = self._hints(resource, size, mine, left)
        return found

    def pod_hints(self, pod: Pod) -> Hints:
        """Say near to which NUMA nodes the devices of all the pod's containers could be."""
        self._reclaim(pod)
        uid = pod.metadata.uid
        return {
            resource: self._hints(resource, size, self._table.held_by_pod(uid, resource), frozenset())
            for resource, size in self._known(pod_limits(pod, overhead=False))
        }

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None] | None:
        """Give a container its devices, near to the chosen nodes; does nothing for one that has them.

        Containers of a pod come in the order of their start. None for one that asks for no devices; to
        wait for it may raise AllocationError.
        """
        wanted = self._wanted(pod, container)
        return self._allocate(pod, container, wanted, chosen) if wanted else None

    async def _allocate(
        self, pod: Pod, container: Container, wanted: list[tuple[str, int]], chosen: TopologyHint
    ) -> None:
        self._reclaim(pod)
        given = False
        for resource, size in wanted:
            async with self._turns[resource]:
                given |= await self._serve(pod, container, resource, size, chosen)
        if given:
            try:
                await self._save()
            except OSError as err:
                raise AllocationError(f'failed to write checkpoint file "{FILE_NAME}": {err}') from err

    # What pods wait for

    def awaited(self, pod: Pod) -> list[str]:
        """Return the pod's resources whose plugins have not registered yet since the kubelet started.

        None after `GRACE_SECONDS`, when the node gives those resources up.
        """
        if self._plugins is None or self._awaits_until is None:
            return []
        if asyncio.get_running_loop().time() >= self._awaits_until:
            self._awaits_until = None
            return []
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        names = {resource for one in containers for resource, _ in self._wanted(pod, one)}
        return sorted(name for name in names if self._table.is_awaited(name))

    async def wait_registered(self, pod: Pod) -> None:
        """Wait until no plugin is `awaited` for the pod any more."""
        while self.awaited(pod):
            try:
                async with asyncio.timeout_at(self._awaits_until):
                    await self._news.wait()
            except TimeoutError:
                self._awaits_until = None

    # What containers get and have

    async def grants(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Give what a container that is about to start gets with its devices; raises AllocationError."""
        wanted = self._wanted(pod, container)
        if not wanted:
            return NOTHING
        uid, active = pod.metadata.uid, self._pods.active()
        missing = any(
            DeviceOwner(uid, container.name, resource) not in self._table.holdings for resource, _ in wanted
        )
        if missing and (active is None or uid in active):
            # Its plugin was unknown when the pod was admitted, or the checkpoint was lost.
            log.info(
                "Needs devices that it was not given before", pod=pod.full_name, container=container.name
            )
            await self._allocate(pod, container, wanted, ANYWHERE)
        for resource, _ in wanted:
            await self._pre_start(DeviceOwner(uid, container.name, resource))
        grants, clashes = grants_of(self._table.held_by(uid, container.name))
        for clash in clashes:
            log.info("Device plugins disagree", about=clash, pod=pod.full_name, container=container.name)
        return grants

    def held(self, uid: str, container: str) -> dict[str, dict[str, frozenset[int]]]:
        """Give the devices of a container, by resource and id, with their NUMA nodes."""
        held = self._table.held_by(uid, container)
        return {resource: holding.near() for resource, holding in sorted(held.items())}

    def health(self, uid: str, container: str) -> dict[str, dict[str, bool]]:
        """Give whether each device of a container is healthy, as far as its plugin knows it."""
        return {
            resource: {
                one: device.healthy if (device := self._table.devices(resource).get(one)) else True
                for one in sorted(holding.ids)
            }
            for resource, holding in sorted(self._table.held_by(uid, container).items())
        }

    def usable(self) -> dict[str, dict[str, frozenset[int]]]:
        """Give all devices that pods can have, by resource and id, with their NUMA nodes."""
        return {
            name: {one: resource.devices[one].nodes for one in sorted(resource.usable)}
            for name, resource in sorted(self._table.resources.items())
        }

    # What the node offers

    def amounts(self) -> tuple[Resources, Resources, list[str]]:
        """Give capacity and allocatable of the node's status, and resources that are no more."""
        capacity, allocatable = self._table.counts()
        return _quantities(capacity), _quantities(allocatable), sorted(self._table.gone)

    def at_least(self, uid: str) -> Resources:
        """Give what the node must be taken to have when a pod that holds devices is admitted again."""
        if not any(holder.uid == uid for holder in self._table.holdings):
            return {}
        resources = {holder.resource for holder in self._table.holdings}
        return _quantities({name: len(self._table.in_use(name)) for name in resources})

    def allocatable_for(self, uid: str) -> Resources:
        """Give what a pod that is to be admitted is counted against: what there is, and what it has.

        Plugins may not be back yet when the agent starts; a pod that holds devices has them all the same.
        """
        _, allocatable, gone = self.amounts()
        found = {**dict.fromkeys(gone, Quantity.of(0)), **allocatable}
        for name, amount in self.at_least(uid).items():
            if name not in found or int(found[name]) < int(amount):
                found[name] = amount
        return found

    @property
    def holders(self) -> set[str]:
        """Give the uids of the pods that have devices."""
        return {holder.uid for holder in self._table.holdings}

    def reclaim(self) -> None:
        """Take devices back from pods that are gone."""
        self._reclaim(None)

    def forget(self, uid: str) -> None:
        """Take a pod's devices back: nothing of it runs any more, and nothing will."""
        self._table.forget_pod(uid)

    # Behind it

    def _wanted(self, pod: Pod, container: Container) -> list[tuple[str, int]]:
        limits = container.resources.limits
        if claimed := pod.status.extended_resource_claim_status:
            # The cluster may have found a claim's device for it.
            mapped = {
                one.resource_name for one in claimed.request_mappings if one.container_name == container.name
            }
            limits = {name: amount for name, amount in limits.items() if name not in mapped}
        return self._known(limits)

    def _known(self, limits: Resources) -> list[tuple[str, int]]:
        return [
            (one, int(amount)) for one, amount in limits.items() if int(amount) > 0 and self._table.knows(one)
        ]

    def _reclaim(self, serving: Pod | None) -> None:
        active = self._pods.active()
        if active is not None:
            self._table.keep_only({*active, serving.metadata.uid} if serving is not None else active)

    def _left_over(self, pod: Pod, container: Container, resource: str) -> frozenset[str]:
        held = {
            holder.container: holding.ids
            for holder, holding in self._table.holdings.items()
            if (holder.uid, holder.resource) == (pod.metadata.uid, resource)
        }
        return reusable(pod, container, held) & self._table.usable(resource)

    def _hints(
        self, resource: str, size: int, mine: frozenset[str], left: frozenset[str]
    ) -> list[TopologyHint] | None:
        devices = self._table.devices(resource)
        if not mine:
            return device_hints(size, devices, self._table.available(resource), self._numa_nodes, left)
        if len(mine) != size and any(device.nodes for device in devices.values()):
            return []
        return device_hints(size, devices, mine, self._numa_nodes)

    async def _serve(
        self, pod: Pod, container: Container, resource: str, size: int, chosen: TopologyHint
    ) -> bool:
        """Give a container its devices of one resource; gives whether it had none before."""
        holder = DeviceOwner(pod.metadata.uid, container.name, resource)
        held = self._table.holdings.get(holder)
        before = self._pods.running_before(holder.uid)
        if holder.container in before or (before and held is not None and len(held.ids) == size):
            # It has all it needs, or the pod would not run: its plugin may still be on the way back.
            return False
        plugin = self._plugins.get(resource) if self._plugins is not None else None
        try:
            if is_served(holder, size, held, self._table.resources.get(resource)):
                return False
            if plugin is None:
                raise ChoiceError(f"unknown Device Plugin {resource}")
            choice = choose(
                resource,
                size,
                self._table.devices(resource),
                self._table.available(resource),
                self._left_over(pod, container, resource),
                chosen.nodes,
            )
            wish: list[str] = []
            if plugin.has_preferences and (asked := choice.question):
                wish = await _preferred(plugin, asked)
            ids = choice.settled(wish)
            self._table.promise(holder, ids)
            with self._metrics.timed(resource):
                answer = await plugin.allocate(ids)
            self._table.give(holder, ids, answer)
        except (ChoiceError, PluginError) as err:
            raise AllocationError(str(err)) from err
        finally:
            self._table.release(holder)
        log.v(3).info("Gave devices", pod=pod.full_name, container=container.name, devices=sorted(ids))
        return True

    async def _pre_start(self, holder: DeviceOwner) -> None:
        held = self._table.holdings.get(holder)
        if held is None or self._plugins is None or not self._plugins.wants_pre_start(holder.resource):
            return
        try:
            plugin = self._plugins.get(holder.resource)
            if plugin is None:
                raise PluginError("Unavailable", f"the plugin of {holder.resource} has gone away")
            await plugin.pre_start(held.ids)
        except PluginError as err:
            raise AllocationError(f"device plugin PreStartContainer rpc failed with err: {err}") from err

    async def _take_note(self, uids: frozenset[str]) -> None:
        """Tell of news from plugins."""
        self._news.set()
        self._news = asyncio.Event()
        self._changed(uids)
        try:
            await self._save()
        except OSError as err:
            log.error(err, "Could not write the device manager's checkpoint")

    async def _save(self) -> None:
        """Bring the checkpoint up to date; raises OSError. Many at once cost one write."""
        async with self._saving:
            content = encode(self._table)
            if content != self._saved:
                await finish_in_thread(lambda: write_checkpoint(self._folder / FILE_NAME, content))
                self._saved = content


async def _preferred(plugin: DevicePlugin, asked: PreferredAllocationRequest) -> list[str]:
    try:
        return await plugin.preferred(asked.available, asked.required, asked.size)
    except PluginError as err:
        raise ChoiceError(f"device plugin GetPreferredAllocation rpc failed with err: {err}") from err


def _quantities(counts: dict[str, int]) -> Resources:
    return {name: Quantity.of(count) for name, count in sorted(counts.items())}
