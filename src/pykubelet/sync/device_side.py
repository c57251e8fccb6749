"""What the engine asks those who give out devices, device plugins and resource claims alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceStatus
from pykubelet.resources.grants import NOTHING, DeviceGrants

DeviceHealth = Mapping[str, list[ResourceStatus]]
"""How devices are, by the container that has them."""


async def no_grants(pod: Pod, container: Container) -> DeviceGrants:
    """Give nothing."""
    return NOTHING


def no_health(pod: Pod) -> DeviceHealth:
    """Know of no devices."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """How devices come to containers, and into their statuses."""

    grants: Callable[[Pod, Container], Awaitable[DeviceGrants]] = no_grants
    """What a container that is about to start gets with its devices; raises AllocationError."""
    health: Callable[[Pod], DeviceHealth] = no_health
    """How the devices of a pod's containers are."""


NO_DEVICES = DeviceSide()
