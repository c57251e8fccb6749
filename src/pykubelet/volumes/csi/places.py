"""Where CSI volumes lie below the agent's root: the reference's places, so that nodes can be handed over.

    pods/<uid>/volumes/kubernetes.io~csi/<name>/mount             published by the driver
    pods/<uid>/volumes/kubernetes.io~csi/<name>/vol_data.json     what must be known to take it down
    plugins/kubernetes.io/csi/<driver>/<digest>/globalmount       staged by the driver, for all pods
    plugins/kubernetes.io/csi/<driver>/<digest>/vol_data.json

and, of volumes that are wanted as devices:

    plugins/kubernetes.io/csi/volumeDevices/staging/<name>        staged
    plugins/kubernetes.io/csi/volumeDevices/publish/<name>/<uid>  published: the device itself
    plugins/kubernetes.io/csi/volumeDevices/<name>/dev/<uid>      the same, bound here
    plugins/kubernetes.io/csi/volumeDevices/<name>/data/vol_data.json
    pods/<uid>/volumeDevices/kubernetes.io~csi/<name>             a link to it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pykubelet.volumes.csi.names import FOLDER, staged_folder
from pykubelet.volumes.csi.volume_data import DATA_FILE
from pykubelet.volumes.folders import VolumeFolders, plain

DEVICES = "volumeDevices"
MOUNT = "mount"
GLOBAL_MOUNT = "globalmount"


@dataclass(frozen=True, slots=True)
class DevicePlaces:
    """The places of one volume that is wanted as a device; `base` is `.../volumeDevices`."""

    base: Path
    name: str

    @property
    def own(self) -> Path:
        """Everything of the volume but what the driver makes."""
        return self.base / self.name

    @property
    def data(self) -> Path:
        """The file with what must be known to take it down."""
        return self.own / "data" / DATA_FILE

    @property
    def maps(self) -> Path:
        """The folder in which the device is bound, once for each pod."""
        return self.own / "dev"

    @property
    def staging(self) -> Path:
        """Where the driver stages it."""
        return self.base / "staging" / self.name

    @property
    def published(self) -> Path:
        """The folder in which the driver publishes it, once for each pod."""
        return self.base / "publish" / self.name


@dataclass(frozen=True, slots=True)
class Places:
    """The places of all CSI volumes of a node."""

    root: Path

    @property
    def plugin(self) -> Path:
        """The folder of everything that does not belong to a pod."""
        return self.root / "plugins" / "kubernetes.io" / "csi"

    def volume(self, uid: str, name: str) -> Path:
        """The folder of a pod's volume; raises ValueError for names that are none."""
        return VolumeFolders.of(self.root, uid).volume(FOLDER, name)

    def published(self, uid: str, name: str) -> Path:
        """Where a driver publishes a volume for a pod."""
        return self.volume(uid, name) / MOUNT

    def data(self, uid: str, name: str) -> Path:
        """The file with what must be known to take a pod's volume down."""
        return self.volume(uid, name) / DATA_FILE

    def staged(self, driver: str, handle: str) -> Path:
        """Where a driver stages a volume for all pods."""
        return self.plugin / plain(driver) / staged_folder(handle) / GLOBAL_MOUNT

    def all_staged(self) -> Iterator[Path]:
        """Find the places of all staged volumes, also of drivers that are gone."""
        for driver in _folders(self.plugin):
            if driver.name != DEVICES:
                yield from (folder / GLOBAL_MOUNT for folder in _folders(driver))

    def all_data(self) -> Iterator[Path]:
        """Find where the data of all pods' volumes is, while pods come and go."""
        # Often asked, and mostly there are none: so only names are looked at.
        pods = str(self.root / "pods")
        for uid in _names(pods):
            volumes = f"{pods}/{uid}/volumes/{FOLDER}"
            yield from (Path(volumes, name, DATA_FILE) for name in _names(volumes))

    def device(self, name: str) -> DevicePlaces:
        """The places of a volume that is wanted as a device."""
        return DevicePlaces(self.plugin / DEVICES, plain(name))

    def all_devices(self) -> Iterator[DevicePlaces]:
        """Find all volumes that are, or were, wanted as devices."""
        for folder in _folders(self.plugin / DEVICES):
            if folder.name not in ("staging", "publish"):
                yield self.device(folder.name)

    def device_link(self, uid: str, name: str) -> Path:
        """The link in the pod's folder that leads to its device."""
        return VolumeFolders.of(self.root, uid).device(FOLDER, name)


def _names(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
