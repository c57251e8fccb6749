"""What giving a CSI volume as files and as a device have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pykubelet.host.plugin_calls import PluginError
from pykubelet.volumes.csi.attachments import Attachments
from pykubelet.volumes.csi.driver_objects import DriverObjects
from pykubelet.volumes.csi.drivers import Drivers
from pykubelet.volumes.csi.names import attachment_name
from pykubelet.volumes.csi.places import Places
from pykubelet.volumes.csi.telling_drivers import Teller
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.csi.volume_data import VolumeData
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.operations import Locks


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of which CSI volumes are made."""

    places: Places
    node_name: str
    drivers: Drivers
    objects: DriverObjects
    attachments: Attachments
    teller: Teller
    locks: Locks = field(default_factory=Locks)
    staged: set[str] = field(default_factory=set)
    """The volumes, by their unique names, that are certainly staged; others are staged again."""

    def data_of(self, volume: CsiVolume, label: str = "") -> VolumeData:
        """Give what must be known to take a pod's volume down."""
        return VolumeData(
            volume_handle=volume.handle,
            driver_name=volume.driver,
            spec_vol_id=volume.wanted.name,
            node_name=self.node_name,
            attachment_id=attachment_name(volume.handle, volume.driver, self.node_name),
            volume_lifecycle_mode=volume.mode,
            se_linux_mount_context=label,
        )


class DriverFailed(KindError):
    """A driver did not do what it was asked to; `is_final` as PluginError's."""

    def __init__(self, text: str, action: str, *, is_final: bool) -> None:
        super().__init__(text)
        self.action = action
        self.is_final = is_final


@contextmanager
def asking(prefix: str = "", action: str = KindError.action) -> Iterator[None]:
    """Turn what a driver says no with into a reason for the pod's author; `action` is what then failed."""
    try:
        yield
    except PluginError as err:
        raise DriverFailed(f"{prefix}{err}", action, is_final=err.is_final) from err
