"""Which devices a container gets, as a pure decision in two steps with the plugin's wish between them.

First what init containers of the pod leave behind; then devices near to the NUMA nodes that the topology
manager chose. The plugin may say which it would take of what fits; it knows, for instance, which devices
are linked to each other. Whatever it says, a container gets as many as it asked for, none that anybody
else has, and none that is not healthy.

Near to which NUMA nodes a request for devices can be served, for the topology manager.

Pure. Only nodes that have devices of the resource are combined: machines with dozens of nodes, most of
them memory only, would have billions of combinations.

What a container gets with its devices: the answers of its plugins, put together.

Pure. Two plugins may want the same thing, such as a common library: then it is there once. When they
disagree about it, the first wins, in the order of the resources' names, and the disagreement is said.
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
    """A container cannot have its devices; the text is the reference's."""


@dataclass(frozen=True, slots=True)
class PreferredAllocationRequest:
    """What to ask the plugin: of `available`, which `size` would it take that include `required`?"""

    available: frozenset[str]
    required: frozenset[str]
    size: int


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """What is certain so far; the rest is taken in the order of `then`, if the plugin has no other wish."""

    taken: frozenset[str]
    size: int
    eligible: frozenset[str] = frozenset()
    """What the plugin may choose from."""
    then: tuple[str, ...] = ()

    @property
    def question(self) -> PreferredAllocationRequest | None:
        """What the plugin may decide; None when there is nothing to decide."""
        if len(self.taken) == self.size:
            return None
        return PreferredAllocationRequest(self.eligible | self.taken, self.taken, self.size)

    def settled(self, wish: Iterable[str] = ()) -> frozenset[str]:
        """Give the devices, heeding as much of the plugin's wish as makes sense."""
        left = self.size - len(self.taken)
        order = [*(one for one in dict.fromkeys(wish) if one in self.eligible), *self.then]
        return self.taken | frozenset([one for one in dict.fromkeys(order) if one not in self.taken][:left])


def choose(
    resource: str,
    size: int,
    devices: Mapping[str, Device],
    available: frozenset[str],
    reusable: frozenset[str] = frozenset(),
    near: frozenset[int] | None = None,
) -> DeviceSelection:
    """Choose `size` of the available devices, near to these NUMA nodes; raises ChoiceError.

    `reusable` are devices that the pod has already for containers that will have ended.
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
    aligned = frozenset(one for one in available if one in devices and devices[one].nodes & near)
    if left <= len(aligned):
        if left == len(aligned):
            return DeviceSelection(taken | aligned, size)
        return DeviceSelection(taken, size, aligned, tuple(sorted(aligned)))
    # What is near is taken in any case, or the alignment that was promised is lost.
    elsewhere = available - aligned
    placed = [one for one in sorted(elsewhere) if one in devices and devices[one].nodes]
    return DeviceSelection(taken | aligned, size, elsewhere, (*placed, *sorted(elsewhere.difference(placed))))


def is_served(
    holder: DeviceOwner, size: int, held: DeviceAllocation | None, resource: Resource | None
) -> bool:
    """Whether a container that asks for `size` devices has them already, all in order.

    Raises ChoiceError when it cannot have any; also when what it has is not healthy any more.
    """
    if held is not None and len(held.ids) != size:
        raise ChoiceError(
            f'pod "{holder.uid}" container "{holder.container}" changed request for resource '
            f'"{holder.resource}" from {len(held.ids)} to {size}'
        )
    if resource is None:
        raise ChoiceError(f"cannot allocate unregistered device {holder.resource}")
    unhealthy = f"cannot allocate unhealthy devices {holder.resource}"
    if not resource.usable:
        raise ChoiceError(f"no healthy devices present; {unhealthy}")
    if held is not None and not held.ids <= resource.usable:
        raise ChoiceError(f"previously allocated devices are no longer healthy; {unhealthy}")
    return held is not None


def reusable(pod: Pod, container: Container, held: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Give the devices that a container may take over from init containers, which will have ended.

    `held` is what each container of the pod has, of one resource. What a container has that runs for
    the pod's life is not given to any other.
    """
    left: set[str] = set()
    for one in pod.spec.init_containers:
        if one.name == container.name:
            break
        if not is_sidecar(one):
            left |= held.get(one.name, frozenset())
    lasting = (*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers)
    kept = (held.get(one.name, frozenset()) for one in lasting if one.name != container.name)
    return frozenset(left).difference(*kept)


MOST_NODES = 16
"""Of how many NUMA nodes all combinations are looked at; a plugin could name any number of nodes."""


def device_hints(
    size: int,
    devices: Mapping[str, Device],
    available: Collection[str],
    machine: Collection[int],
    reusable: Collection[str] = (),
) -> list[TopologyHint] | None:
    """Give the sets of NUMA nodes near to which there are `size` devices; None when devices have no place.

    `devices` are all of the resource, `machine` the machine's NUMA nodes. A set is preferred when no
    smaller one would do on an empty machine. Devices that are `reusable` are taken first, so all of them
    must be near.
    """
    if not any(device.nodes for device in devices.values()):
        return None
    if len({*available, *reusable}) < size:
        return []
    nodes = frozenset().union(*(device.nodes for device in devices.values())) & frozenset(machine)
    nodes = frozenset(sorted(nodes or machine)[:MOST_NODES])
    placed = [devices[one].nodes for one in reusable if one in devices and devices[one].nodes]
    free = [devices[one].nodes for one in available if one in devices and one not in reusable]
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


def grants_of(holdings: Mapping[str, DeviceAllocation]) -> tuple[DeviceRunOptions, list[str]]:
    """Put together what a container has, by resource; gives also what its plugins disagree about."""
    env: dict[str, str] = {}
    annotations: dict[str, str] = {}
    devices: dict[str, DeviceNode] = {}
    mounts: dict[str, HostMount] = {}
    cdi: dict[str, None] = {}
    clashes: list[str] = []
    for _, holding in sorted(holdings.items()):
        answer = pb.ContainerAllocateResponse.FromString(holding.answer)
        clashes += _add(env, sorted(answer.envs.items()), "environment variable")
        clashes += _add(annotations, sorted(answer.annotations.items()), "annotation")
        nodes = (DeviceNode(one.host_path, one.container_path, one.permissions) for one in answer.devices)
        clashes += _add(devices, ((node.container_path, node) for node in nodes), "device")
        wanted = (HostMount(one.host_path, one.container_path, one.read_only) for one in answer.mounts)
        clashes += _add(mounts, ((mount.container_path, mount) for mount in wanted), "mount")
        cdi.update(dict.fromkeys(one.name for one in answer.cdi_devices))
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
