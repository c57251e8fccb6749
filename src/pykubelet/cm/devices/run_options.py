"""Run options that device plugins and resource claims add to a container.

The types are shared by the device manager, the DRA manager and the code that builds requests to the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device of the host in the container; `permissions` is a subset of `r`, `w` and `m`."""

    host_path: str
    container_path: str
    permissions: str = "mrw"


@dataclass(frozen=True, slots=True)
class HostMount:
    """A mount that a device plugin requests."""

    host_path: str
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRunOptions:
    """Run options that device plugins and resource claims add to a container."""

    devices: tuple[DeviceNode, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    mounts: tuple[HostMount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def and_cdi(self, names: tuple[str, ...]) -> DeviceRunOptions:
        """Return the options with more CDI devices, each once."""
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


NO_DEVICE_OPTIONS = DeviceRunOptions()
"""Options of a container without devices."""
