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

What must be known of a volume to take it down, kept beside it: `vol_data.json`.

It is written before the driver is asked for anything and deleted after the driver has undone everything,
so that an agent that never saw the pod finds all that drivers may have mounted. A file is there as a
whole or not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.linux.mounts import read_mounts
from pykubelet.volumes.csi.names import EPHEMERAL, FOLDER, staged_folder
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublish
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.paths import VolumeFolders, make_folder, plain

DATA_FILE = "vol_data.json"
SCRAP_SECONDS = 300.0
"""How old something must be that somebody has begun and not finished."""


class VolumeData(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The facts; the names are the reference's, which reads and writes the same file."""

    volume_handle: str
    driver_name: str
    spec_vol_id: str = msgspec.field(name="specVolID", default="")
    """The persistent volume's name, or the pod's own name for the volume."""
    node_name: str = ""
    attachment_id: str = msgspec.field(name="attachmentID", default="")
    volume_lifecycle_mode: str = ""
    se_linux_mount_context: str = ""

    def owed(self, place: Path, trace: Path, uid: str, name: str) -> PendingUnpublish:
        """Say what the driver is owed for what it published for a pod, if it cannot be asked.

        `trace` is what the pod has of the volume until it has let go.
        """
        return PendingUnpublish(
            driver=self.driver_name,
            handle=self.volume_handle,
            target=str(place),
            trace=str(trace),
            ephemeral=self.volume_lifecycle_mode == EPHEMERAL,
            pod=uid,
            volume=name,
        )


def write_data(path: Path, data: VolumeData) -> None:
    """Write the file, in a folder that is made; raises OSError. Blocks."""
    make_folder(path.parent)
    if read_data(path) == data:
        return
    with _replacing(path) as new:
        new.write_bytes(msgspec.json.encode(data) + b"\n")


def read_data(path: Path) -> VolumeData | None:
    """Read the file; None when there is none, or none that can be read as a whole. Blocks."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=VolumeData)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def drop_place(place: Path, data: Path) -> None:
    """Delete the place where a driver had mounted something, then the data, then their empty folder.

    Drivers delete the place themselves, or should. Raises KindError when something is in it: then the
    driver did not undo what it was asked to, and deleting would delete the volume's content. Blocks.
    """
    if read_mounts(place):
        # Said before the place is looked at: a mount that was left may not answer.
        raise VolumePluginError(f"kubernetes.io/csi: the driver has left {place} mounted")
    try:
        if place.is_symlink() or place.is_file() or place.is_block_device():
            place.unlink(missing_ok=True)
        elif place.exists():
            place.rmdir()
    except OSError as err:
        raise VolumePluginError(
            f"kubernetes.io/csi: failed to remove dir [{place}]: {err.strerror}; "
            "the driver has left something there"
        ) from err
    data.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        data.parent.rmdir()


def drop_scraps(file: Path, folders: Iterable[Path], clock: Callable[[], float] = time.time) -> None:
    """Delete what an agent that was killed has begun, before it wrote the data: empty folders. Blocks.

    Only what is old: an agent that lives may be writing it just now.
    """
    with suppress(OSError):
        if clock() - file.parent.stat().st_mtime < SCRAP_SECONDS:
            return
        _unfinished(file).unlink(missing_ok=True)
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    new = _unfinished(path)
    try:
        yield new
        new.chmod(0o644)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


DEVICES = "volumeDevices"
MOUNT = "mount"
GLOBAL_MOUNT = "globalmount"


@dataclass(frozen=True, slots=True)
class BlockVolumePaths:
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
class CsiPaths:
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

    def device(self, name: str) -> BlockVolumePaths:
        """The places of a volume that is wanted as a device."""
        return BlockVolumePaths(self.plugin / DEVICES, plain(name))

    def all_devices(self) -> Iterator[BlockVolumePaths]:
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
