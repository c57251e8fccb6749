"""What a container gets with its devices, whoever gives them: device plugins, or drivers of resource claims.

The one definition that those who give and those who make requests to the runtime share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device of the host in the container; `permissions` out of `r`, `w` and `m`."""

    host_path: str
    container_path: str
    permissions: str = "mrw"


@dataclass(frozen=True, slots=True)
class HostMount:
    """A mount that a device plugin asks for."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRunOptions:
    """What device plugins and resource claims add to a container."""

    devices: tuple[DeviceNode, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    mounts: tuple[HostMount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def and_cdi(self, names: tuple[str, ...]) -> DeviceRunOptions:
        """Give the same with more CDI devices, each once."""
        if not names:
            return self
        cdi = tuple(dict.fromkeys((*self.cdi_devices, *names)))
        return DeviceRunOptions(
            devices=self.devices,
            cdi_devices=cdi,
            mounts=self.mounts,
            env=self.env,
            annotations=self.annotations,
        )


NOTHING = DeviceRunOptions()
"""What most containers get."""
