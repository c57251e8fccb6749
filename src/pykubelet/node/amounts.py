"""What the node has to give: capacity and allocatable in its status.

Pure. What the machine has and what device plugins offer is set; what somebody else advertised by
hand stays. All that is reserved or kept free is then taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pykubelet.api.meta import Resources
from pykubelet.api.names import is_extended_resource
from pykubelet.api.quantity import Quantity
from pykubelet.node.settings import NodeSettings
from pykubelet.resources.capacity import allocatable

NOTHING = Quantity.of(0)


@dataclass(frozen=True, slots=True)
class DeviceAmounts:
    """What device plugins offer; resources whose plugin went away are `removed`."""

    capacity: Resources = field(default_factory=dict)
    allocatable: Resources = field(default_factory=dict)
    removed: Sequence[str] = ()


def next_amounts(
    old_capacity: Resources,
    old_allocatable: Resources,
    machine: Resources,
    devices: DeviceAmounts,
    settings: NodeSettings,
) -> tuple[Resources, Resources]:
    """Give capacity and allocatable as they are now."""
    capacity = {**old_capacity, **machine, **devices.capacity, **dict.fromkeys(devices.removed, NOTHING)}
    left = allocatable(capacity, settings.config, ignore_eviction=settings.ignore_eviction)
    kept = {
        name: old
        for name, old in old_allocatable.items()
        if not is_extended_resource(name) or name in capacity
    }
    return capacity, {**kept, **left, **devices.allocatable}


def missing_amounts(capacity: Resources, *, storage: bool) -> str:
    """Say which resources that every node has are missing; empty when none is."""
    needed = ["cpu", "memory", "pods", *(["ephemeral-storage"] if storage else [])]
    absent = [name for name in needed if name not in capacity]
    return f"missing node capacity for resources: {', '.join(absent)}" if absent else ""
