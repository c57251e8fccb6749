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

    A device with several NUMA nodes is listed under each. `answer` is the plugin's ContainerAllocateResponse,
    serialized.
    """

    devices: Mapping[int, tuple[str, ...]]
    answer: bytes

    @property
    def ids(self) -> frozenset[str]:
        """Device IDs, each once."""
        return frozenset(one for ids in self.devices.values() for one in ids)

    def near(self) -> dict[str, frozenset[int]]:
        """Return the NUMA nodes of each device."""
        return {
            one: frozenset(node for node, ids in self.devices.items() if one in ids and node != NOWHERE)
            for one in sorted(self.ids)
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
        return frozenset(one.id for one in self.devices.values() if one.healthy)


class DeviceRegistry:
    """All devices of a node."""

    def __init__(
        self, holdings: Mapping[DeviceOwner, DeviceAllocation] | None = None, known: Iterable[str] = ()
    ) -> None:
        """Initialize from a checkpoint: allocations and known resources."""
        self.resources = {name: Resource() for name in known}
        self.holdings = dict(holdings or {})
        self.gone: set[str] = set()
        """Removed resources, which the node's status reports with an amount of 0."""
        self._promised: dict[DeviceOwner, frozenset[str]] = {}

    # Queries

    def knows(self, resource: str) -> bool:
        """Return whether this is a device resource: known from a plugin, or allocated to a container."""
        return resource in self.resources or any(one.resource == resource for one in self.holdings)

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
        held = [holding.ids for one, holding in self.holdings.items() if one.resource == resource]
        promised = [ids for one, ids in self._promised.items() if one.resource == resource]
        return frozenset().union(*held, *promised)

    def held_by(self, uid: str, container: str) -> dict[str, DeviceAllocation]:
        """Return the allocations of a container, by resource."""
        return {
            one.resource: holding
            for one, holding in self.holdings.items()
            if (one.uid, one.container) == (uid, container)
        }

    def held_by_pod(self, uid: str, resource: str) -> frozenset[str]:
        """Return the devices of a resource that are allocated to a pod's containers."""
        held = (one for one in self.holdings.items() if (one[0].uid, one[0].resource) == (uid, resource))
        return frozenset().union(*(holding.ids for _, holding in held))

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of devices of each resource, and of usable devices."""
        capacity = {name: len(one.devices) for name, one in self.resources.items()}
        return capacity, {name: len(one.usable) for name, one in self.resources.items()}

    # Changes

    def list(self, resource: str, devices: Iterable[Device]) -> frozenset[str]:
        """Set a plugin's device list; return the UIDs of pods whose devices changed."""
        old = self.devices(resource)
        new = {one.id: one for one in devices}
        self.resources[resource] = Resource(new, offered=True)
        self.gone.discard(resource)
        changed = {
            one for one in new if one not in old or old[one].healthy != new[one].healthy
        } | old.keys() - new.keys()
        return frozenset(
            holder.uid
            for holder, holding in self.holdings.items()
            if holder.resource == resource and not changed.isdisjoint(holding.ids)
        )

    def withdraw(self, resource: str) -> None:
        """Mark a resource as not offered: its plugin disconnected.

        A plugin that never listed a device leaves a resource of capacity 0, as in the upstream kubelet.
        """
        self.resources.setdefault(resource, Resource()).offered = False
        self.gone.discard(resource)

    def forget(self, resource: str) -> None:
        """Remove a resource whose plugin did not reconnect."""
        found = self.resources.get(resource)
        if found is not None and not found.offered:
            del self.resources[resource]
            self.gone.add(resource)

    def promise(self, holder: DeviceOwner, ids: Collection[str]) -> None:
        """Reserve devices for a container while its plugin is called."""
        self._promised[holder] = frozenset(ids)

    def release(self, holder: DeviceOwner) -> None:
        """End a reservation, whether or not the devices were allocated."""
        self._promised.pop(holder, None)

    def give(self, holder: DeviceOwner, ids: Iterable[str], answer: bytes) -> None:
        """Record the allocation of devices to a container."""
        known, nodes = self.devices(holder.resource), dict[int, tuple[str, ...]]()
        for one in sorted(ids):
            near = known[one].nodes if one in known else frozenset()
            for node in sorted(near) or [NOWHERE]:
                nodes[node] = (*nodes.get(node, ()), one)
        self.holdings[holder] = DeviceAllocation(nodes, answer)

    def forget_pod(self, uid: str) -> None:
        """Release the devices of a pod."""
        for one in [holder for holder in self.holdings if holder.uid == uid]:
            del self.holdings[one]

    def keep_only(self, uids: Collection[str]) -> bool:
        """Release the devices of all pods except these and those being served; return whether any had."""
        serving = {holder.uid for holder in self._promised}
        stale = [one for one in self.holdings if one.uid not in uids and one.uid not in serving]
        for one in stale:
            del self.holdings[one]
        return bool(stale)
