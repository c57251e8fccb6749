"""Near to which NUMA nodes a request for devices can be served, for the topology manager.

Pure. Only nodes that have devices of the resource are combined: machines with dozens of nodes, most of
them memory only, would have billions of combinations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pykubelet.resources.device_table import Device
from pykubelet.resources.hints import Hint, node_sets

MOST_NODES = 16
"""Of how many NUMA nodes all combinations are looked at; a plugin could name any number of nodes."""


def device_hints(
    size: int,
    devices: Mapping[str, Device],
    available: Collection[str],
    machine: Collection[int],
    reusable: Collection[str] = (),
) -> list[Hint] | None:
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
    return [Hint(some, preferred=len(some) == narrowest) for some in fitting]
