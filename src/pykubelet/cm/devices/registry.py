"""Which devices there are, and who has them. No plugin, no file, no waiting: facts and their changes.

A resource (`example.com/gpu`) is known from the first list of its plugin until five minutes after the
plugin went away. Its devices can be given out while the plugin is there and calls them healthy. What
containers have, they keep whatever happens to the plugin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

NOWHERE = -1
"""In place of a NUMA node: the device belongs to none."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its plugin describes it; `nodes` are the NUMA nodes that it is near to."""

    id: str
    healthy: bool = True
    nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceOwner:
    """Who can have devices: a container, of one resource."""

    uid: str
    container: str
    resource: str


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """What a container has: ids by NUMA node, and the plugin's word on how to use them.

    A device near to several NUMA nodes is named under each. `answer` is the plugin's
    ContainerAllocateResponse as it came.
    """

    devices: Mapping[int, tuple[str, ...]]
    answer: bytes

    @property
    def ids(self) -> frozenset[str]:
        """The devices, each once."""
        return frozenset(one for ids in self.devices.values() for one in ids)

    def near(self) -> dict[str, frozenset[int]]:
        """Give the NUMA nodes of each device."""
        return {
            one: frozenset(node for node, ids in self.devices.items() if one in ids and node != NOWHERE)
            for one in sorted(self.ids)
        }


@dataclass(slots=True)
class Resource:
    """The devices of one plugin; `offered` while the plugin is there to give them out."""

    devices: dict[str, Device] = field(default_factory=dict)
    offered: bool = False

    @property
    def usable(self) -> frozenset[str]:
        """The devices that may be given out, or are."""
        if not self.offered:
            return frozenset()
        return frozenset(one.id for one in self.devices.values() if one.healthy)


class DeviceRegistry:
    """All devices of a node."""

    def __init__(
        self, holdings: Mapping[DeviceOwner, DeviceAllocation] | None = None, known: Iterable[str] = ()
    ) -> None:
        """Take what a checkpoint says: who has what, and which resources there were."""
        self.resources = {name: Resource() for name in known}
        self.holdings = dict(holdings or {})
        self.gone: set[str] = set()
        """Resources that were here once; the node's status shows none of them."""
        self._promised: dict[DeviceOwner, frozenset[str]] = {}

    # What there is

    def knows(self, resource: str) -> bool:
        """Whether this is a resource of devices: offered now, or in somebody's hands."""
        return resource in self.resources or any(one.resource == resource for one in self.holdings)

    def is_awaited(self, resource: str) -> bool:
        """Return whether a checkpoint has this resource and its plugin has listed no device yet."""
        found = self.resources.get(resource)
        return found is not None and not found.offered and not found.devices

    def devices(self, resource: str) -> Mapping[str, Device]:
        """Give all devices of a resource by id."""
        found = self.resources.get(resource)
        return found.devices if found is not None else {}

    def usable(self, resource: str) -> frozenset[str]:
        """Give the devices that are healthy and whose plugin is there."""
        found = self.resources.get(resource)
        return found.usable if found is not None else frozenset()

    def available(self, resource: str) -> frozenset[str]:
        """Give the usable devices that nobody has."""
        return self.usable(resource) - self.in_use(resource)

    def in_use(self, resource: str) -> frozenset[str]:
        """Give the devices that somebody has, or is about to get."""
        held = [holding.ids for one, holding in self.holdings.items() if one.resource == resource]
        promised = [ids for one, ids in self._promised.items() if one.resource == resource]
        return frozenset().union(*held, *promised)

    def held_by(self, uid: str, container: str) -> dict[str, DeviceAllocation]:
        """Give what a container has, by resource."""
        return {
            one.resource: holding
            for one, holding in self.holdings.items()
            if (one.uid, one.container) == (uid, container)
        }

    def held_by_pod(self, uid: str, resource: str) -> frozenset[str]:
        """Give the devices that all containers of a pod have of a resource."""
        held = (one for one in self.holdings.items() if (one[0].uid, one[0].resource) == (uid, resource))
        return frozenset().union(*(holding.ids for _, holding in held))

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Give how many devices the node has of each resource, and how many of them can be used."""
        capacity = {name: len(one.devices) for name, one in self.resources.items()}
        return capacity, {name: len(one.usable) for name, one in self.resources.items()}

    # What happens

    def list(self, resource: str, devices: Iterable[Device]) -> frozenset[str]:
        """Take a plugin's list; gives the uids of pods to whose devices something happened."""
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
        """Give a resource up whose plugin did not come back."""
        found = self.resources.get(resource)
        if found is not None and not found.offered:
            del self.resources[resource]
            self.gone.add(resource)

    def promise(self, holder: DeviceOwner, ids: Collection[str]) -> None:
        """Keep devices for a container while its plugin is asked."""
        self._promised[holder] = frozenset(ids)

    def release(self, holder: DeviceOwner) -> None:
        """Take a promise back, kept or not."""
        self._promised.pop(holder, None)

    def give(self, holder: DeviceOwner, ids: Iterable[str], answer: bytes) -> None:
        """Note that a container has devices."""
        known, nodes = self.devices(holder.resource), dict[int, tuple[str, ...]]()
        for one in sorted(ids):
            near = known[one].nodes if one in known else frozenset()
            for node in sorted(near) or [NOWHERE]:
                nodes[node] = (*nodes.get(node, ()), one)
        self.holdings[holder] = DeviceAllocation(nodes, answer)

    def forget_pod(self, uid: str) -> None:
        """Take devices back from one pod."""
        for one in [holder for holder in self.holdings if holder.uid == uid]:
            del self.holdings[one]

    def keep_only(self, uids: Collection[str]) -> bool:
        """Take devices back from all pods but these, and those being served; gives whether any had some."""
        serving = {holder.uid for holder in self._promised}
        stale = [one for one in self.holdings if one.uid not in uids and one.uid not in serving]
        for one in stale:
            del self.holdings[one]
        return bool(stale)
