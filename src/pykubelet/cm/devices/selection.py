"""Selection of devices, their topology hints, and merging of Allocate responses. Pure functions.

Devices are selected in two steps with the plugin's GetPreferredAllocation in between: first those of the
pod's ended init containers, then devices near the NUMA nodes that the topology manager chose. The plugin may
prefer some of those that fit; it knows, for example, which devices are linked to each other. Whatever it
returns, a container gets as many devices as it requests, none that another container has, and none that is
unhealthy.

Hints combine only nodes that have devices of the resource: hosts with dozens of nodes, most of them memory
only, would have billions of combinations.

Two plugins may return the same option, such as a common library: then it is added once. If they conflict, the
first resource by name wins, and the conflict is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.cm.devices import device_plugin_pb2 as pb
from pykubelet.cm.devices.registry import Device, DeviceAllocation, DeviceOwner, Resource
from pykubelet.cm.devices.run_options import DeviceNode, DeviceRunOptions, HostMount
from pykubelet.cm.topology.hints import TopologyHint, node_sets


class ChoiceError(Exception):
    """Raised when a container's devices cannot be allocated; the text is upstream's."""


@dataclass(frozen=True, slots=True)
class PreferredAllocationRequest:
    """Request to the plugin: `size` of the `available` devices that include the `required` ones."""

    available: frozenset[str]
    required: frozenset[str]
    size: int


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """Devices selected so far; the rest follows in the order of `then`, unless the plugin prefers others."""

    taken: frozenset[str]
    size: int
    eligible: frozenset[str] = frozenset()
    """Devices that the plugin may select from."""
    then: tuple[str, ...] = ()

    @property
    def plugin_request(self) -> PreferredAllocationRequest | None:
        """Request to the plugin, or None if nothing is left to decide."""
        if len(self.taken) == self.size:
            return None
        return PreferredAllocationRequest(self.eligible | self.taken, self.taken, self.size)

    def complete(self, preferred: Iterable[str] = ()) -> frozenset[str]:
        """Return the devices; eligible ones that the plugin prefers come first."""
        left = self.size - len(self.taken)
        order = [
            *(device_id for device_id in dict.fromkeys(preferred) if device_id in self.eligible),
            *self.then,
        ]
        return self.taken | frozenset(
            [device_id for device_id in dict.fromkeys(order) if device_id not in self.taken][:left]
        )


def choose(
    resource: str,
    size: int,
    devices: Mapping[str, Device],
    available: frozenset[str],
    reusable: frozenset[str] = frozenset(),
    near: frozenset[int] | None = None,
) -> DeviceSelection:
    """Select `size` of the available devices, near these NUMA nodes. Raises ChoiceError.

    `reusable` are devices of the pod's containers that will have ended.
    """
    taken = frozenset(sorted(reusable)[:size])
    left = size - len(taken)
    available -= taken
    if len(available) < left:
        raise ChoiceError(
            f"requested number of devices unavailable for {resource}. "
            f"Requested: {left}, Available: {len(available)}"
        )
    if near is None or not any(device.nodes for device in devices.values()):
        return DeviceSelection(taken, size, available, tuple(sorted(available)))
    aligned = frozenset(
        device_id for device_id in available if device_id in devices and devices[device_id].nodes & near
    )
    if left <= len(aligned):
        if left == len(aligned):
            return DeviceSelection(taken | aligned, size)
        return DeviceSelection(taken, size, aligned, tuple(sorted(aligned)))
    # Aligned devices are always selected, or the chosen alignment is lost.
    elsewhere = available - aligned
    placed = [
        device_id for device_id in sorted(elsewhere) if device_id in devices and devices[device_id].nodes
    ]
    return DeviceSelection(taken | aligned, size, elsewhere, (*placed, *sorted(elsewhere.difference(placed))))


def is_served(
    owner: DeviceOwner, size: int, held: DeviceAllocation | None, resource: Resource | None
) -> bool:
    """Return whether a container that requests `size` devices already has them, all healthy.

    Raises ChoiceError if it cannot get any, also if those it has are no longer healthy.
    """
    if held is not None and len(held.ids) != size:
        raise ChoiceError(
            f'pod "{owner.uid}" container "{owner.container}" changed request for resource '
            f'"{owner.resource}" from {len(held.ids)} to {size}'
        )
    if resource is None:
        raise ChoiceError(f"cannot allocate unregistered device {owner.resource}")
    unhealthy = f"cannot allocate unhealthy devices {owner.resource}"
    if not resource.usable:
        raise ChoiceError(f"no healthy devices present; {unhealthy}")
    if held is not None and not held.ids <= resource.usable:
        raise ChoiceError(f"previously allocated devices are no longer healthy; {unhealthy}")
    return held is not None


def reusable(pod: Pod, container: Container, held: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the devices that a container may reuse from init containers, which will have ended.

    `held` are the devices of each container of the pod, of one resource. Devices of a container that runs for
    the pod's life are not reused.
    """
    left: set[str] = set()
    for other in pod.spec.init_containers:
        if other.name == container.name:
            break
        if not is_sidecar(other):
            left |= held.get(other.name, frozenset())
    lasting = (*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers)
    in_use = (held.get(other.name, frozenset()) for other in lasting if other.name != container.name)
    return frozenset(left).difference(*in_use)


MOST_NODES = 16
"""Maximum number of NUMA nodes that are combined; a plugin could list any number of nodes."""


def device_hints(
    size: int,
    devices: Mapping[str, Device],
    available: Collection[str],
    machine: Collection[int],
    reusable: Collection[str] = (),
) -> list[TopologyHint] | None:
    """Return the hints for `size` devices, or None if the devices have no NUMA nodes.

    `devices` are all of the resource, `machine` the NUMA nodes of the host. A set is preferred if no smaller
    one would suffice on an empty host. `reusable` devices are taken first, so all of them must be near the
    nodes of a set.
    """
    if not any(device.nodes for device in devices.values()):
        return None
    if len({*available, *reusable}) < size:
        return []
    nodes = frozenset().union(*(device.nodes for device in devices.values())) & frozenset(machine)
    nodes = frozenset(sorted(nodes or machine)[:MOST_NODES])
    placed = [
        devices[device_id].nodes
        for device_id in reusable
        if device_id in devices and devices[device_id].nodes
    ]
    free = [
        devices[device_id].nodes
        for device_id in available
        if device_id in devices and device_id not in reusable
    ]
    fitting, narrowest = [], len(nodes)
    for some in node_sets(nodes):
        if sum(not some.isdisjoint(device.nodes) for device in devices.values()) >= size:
            narrowest = min(narrowest, len(some))
        if any(some.isdisjoint(near) for near in placed):
            continue
        if len(placed) + sum(not some.isdisjoint(near) for near in free) >= size:
            fitting.append(some)
    return [TopologyHint(some, preferred=len(some) == narrowest) for some in fitting]


T = TypeVar("T")


def grants_of(allocations: Mapping[str, DeviceAllocation]) -> tuple[DeviceRunOptions, list[str]]:
    """Merge the Allocate responses of a container's devices; also return the conflicts of its plugins."""
    env: dict[str, str] = {}
    annotations: dict[str, str] = {}
    devices: dict[str, DeviceNode] = {}
    mounts: dict[str, HostMount] = {}
    cdi: dict[str, None] = {}
    clashes: list[str] = []
    for _, allocation in sorted(allocations.items()):
        response = pb.ContainerAllocateResponse.FromString(allocation.response)
        clashes += _add(env, sorted(response.envs.items()), "environment variable")
        clashes += _add(annotations, sorted(response.annotations.items()), "annotation")
        nodes = (
            DeviceNode(device.host_path, device.container_path, device.permissions)
            for device in response.devices
        )
        clashes += _add(devices, ((node.container_path, node) for node in nodes), "device")
        host_mounts = (
            HostMount(mount.host_path, mount.container_path, mount.read_only) for mount in response.mounts
        )
        clashes += _add(mounts, ((mount.container_path, mount) for mount in host_mounts), "mount")
        cdi.update(dict.fromkeys(device.name for device in response.cdi_devices))
    grants = DeviceRunOptions(
        devices=tuple(devices.values()),
        cdi_devices=tuple(cdi),
        mounts=tuple(mounts.values()),
        env=env,
        annotations=annotations,
    )
    return grants, clashes


def _add(known: dict[str, T], more: Iterable[tuple[str, T]], what: str) -> list[str]:
    return [f"{what} {name}" for name, value in more if known.setdefault(name, value) != value]
