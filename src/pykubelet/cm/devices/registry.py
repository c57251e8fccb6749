"""Registry of devices by resource, and of their allocations to containers, in memory.

It makes no calls and does no I/O. A resource (`example.com/gpu`) is known from the first list of its plugin
until five minutes after the plugin disconnected. Its devices can be allocated while the plugin is connected
and reports them healthy. Containers keep their devices whatever happens to the plugin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

NOWHERE = -1
"""Key for devices without a NUMA node."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its plugin describes it; `nodes` are its NUMA nodes."""

    id: str
    healthy: bool = True
    nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceOwner:
    """Owner of an allocation: a container and a resource."""

    uid: str
    container: str
    resource: str


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """Devices of a container: IDs by NUMA node, and the plugin's response.

    A device with several NUMA nodes is listed under each. `response` is the plugin's
    ContainerAllocateResponse, serialized.
    """

    devices: Mapping[int, tuple[str, ...]]
    response: bytes

    @property
    def ids(self) -> frozenset[str]:
        """Device IDs, each once."""
        return frozenset(device_id for ids in self.devices.values() for device_id in ids)

    def numa_nodes(self) -> dict[str, frozenset[int]]:
        """Return the NUMA nodes of each device."""
        return {
            device_id: frozenset(
                node for node, ids in self.devices.items() if device_id in ids and node != NOWHERE
            )
            for device_id in sorted(self.ids)
        }


@dataclass(slots=True)
class Resource:
    """Devices of one plugin; `offered` while the plugin is connected."""

    devices: dict[str, Device] = field(default_factory=dict)
    offered: bool = False

    @property
    def usable(self) -> frozenset[str]:
        """Devices that can be allocated, or are."""
        if not self.offered:
            return frozenset()
        return frozenset(device.id for device in self.devices.values() if device.healthy)


class DeviceRegistry:
    """All devices of a node."""

    def __init__(
        self, allocations: Mapping[DeviceOwner, DeviceAllocation] | None = None, known: Iterable[str] = ()
    ) -> None:
        """Initialize from a checkpoint: allocations and known resources."""
        self.resources = {name: Resource() for name in known}
        self.allocations = dict(allocations or {})
        self.removed: set[str] = set()
        """Removed resources, which the node's status reports with an amount of 0."""
        self._reserved: dict[DeviceOwner, frozenset[str]] = {}

    # Queries

    def knows(self, resource: str) -> bool:
        """Return whether this is a device resource: known from a plugin, or allocated to a container."""
        return resource in self.resources or any(owner.resource == resource for owner in self.allocations)

    def is_awaited(self, resource: str) -> bool:
        """Return whether a checkpoint has this resource and its plugin has listed no device yet."""
        found = self.resources.get(resource)
        return found is not None and not found.offered and not found.devices

    def devices(self, resource: str) -> Mapping[str, Device]:
        """Return all devices of a resource by ID."""
        found = self.resources.get(resource)
        return found.devices if found is not None else {}

    def usable(self, resource: str) -> frozenset[str]:
        """Return the healthy devices whose plugin is connected."""
        found = self.resources.get(resource)
        return found.usable if found is not None else frozenset()

    def available(self, resource: str) -> frozenset[str]:
        """Return the usable devices that are not allocated."""
        return self.usable(resource) - self.in_use(resource)

    def in_use(self, resource: str) -> frozenset[str]:
        """Return the devices that are allocated or being allocated."""
        held = [
            allocation.ids for owner, allocation in self.allocations.items() if owner.resource == resource
        ]
        reserved = [ids for owner, ids in self._reserved.items() if owner.resource == resource]
        return frozenset().union(*held, *reserved)

    def held_by(self, uid: str, container: str) -> dict[str, DeviceAllocation]:
        """Return the allocations of a container, by resource."""
        return {
            owner.resource: allocation
            for owner, allocation in self.allocations.items()
            if (owner.uid, owner.container) == (uid, container)
        }

    def held_by_pod(self, uid: str, resource: str) -> frozenset[str]:
        """Return the devices of a resource that are allocated to a pod's containers."""
        held = (
            item for item in self.allocations.items() if (item[0].uid, item[0].resource) == (uid, resource)
        )
        return frozenset().union(*(allocation.ids for _, allocation in held))

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of devices of each resource, and of usable devices."""
        capacity = {name: len(resource.devices) for name, resource in self.resources.items()}
        return capacity, {name: len(resource.usable) for name, resource in self.resources.items()}

    # Changes

    def set_devices(self, resource: str, devices: Iterable[Device]) -> frozenset[str]:
        """Set a plugin's device list; return the UIDs of pods whose devices changed."""
        old = self.devices(resource)
        new = {device.id: device for device in devices}
        self.resources[resource] = Resource(new, offered=True)
        self.removed.discard(resource)
        changed = {
            device_id
            for device_id in new
            if device_id not in old or old[device_id].healthy != new[device_id].healthy
        } | old.keys() - new.keys()
        return frozenset(
            owner.uid
            for owner, allocation in self.allocations.items()
            if owner.resource == resource and not changed.isdisjoint(allocation.ids)
        )

    def withdraw(self, resource: str) -> None:
        """Mark a resource as not offered: its plugin disconnected.

        A plugin that never listed a device leaves a resource of capacity 0, as in the upstream kubelet.
        """
        self.resources.setdefault(resource, Resource()).offered = False
        self.removed.discard(resource)

    def forget(self, resource: str) -> None:
        """Remove a resource whose plugin did not reconnect."""
        found = self.resources.get(resource)
        if found is not None and not found.offered:
            del self.resources[resource]
            self.removed.add(resource)

    def reserve(self, owner: DeviceOwner, ids: Collection[str]) -> None:
        """Reserve devices for a container while its plugin is called."""
        self._reserved[owner] = frozenset(ids)

    def release(self, owner: DeviceOwner) -> None:
        """End a reservation, whether or not the devices were allocated."""
        self._reserved.pop(owner, None)

    def record_allocation(self, owner: DeviceOwner, ids: Iterable[str], response: bytes) -> None:
        """Record the allocation of devices to a container."""
        known, nodes = self.devices(owner.resource), dict[int, tuple[str, ...]]()
        for device_id in sorted(ids):
            near = known[device_id].nodes if device_id in known else frozenset()
            for node in sorted(near) or [NOWHERE]:
                nodes[node] = (*nodes.get(node, ()), device_id)
        self.allocations[owner] = DeviceAllocation(nodes, response)

    def forget_pod(self, uid: str) -> None:
        """Release the devices of a pod."""
        for owner in [owner for owner in self.allocations if owner.uid == uid]:
            del self.allocations[owner]

    def retain(self, uids: Collection[str]) -> bool:
        """Release the devices of all pods except these and those being served; return whether any had."""
        serving = {owner.uid for owner in self._reserved}
        stale = [owner for owner in self.allocations if owner.uid not in uids and owner.uid not in serving]
        for owner in stale:
            del self.allocations[owner]
        return bool(stale)
