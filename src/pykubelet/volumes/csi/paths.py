"""On-disk layout of CSI volumes below the kubelet's root directory, and their `vol_data.json` files.

The paths are upstream's, so that a node can be handed over from one kubelet to the other:

    pods/<uid>/volumes/kubernetes.io~csi/<name>/mount             published by the driver
    pods/<uid>/volumes/kubernetes.io~csi/<name>/vol_data.json     data needed to unpublish it
    plugins/kubernetes.io/csi/<driver>/<digest>/globalmount       staged by the driver, for all pods
    plugins/kubernetes.io/csi/<driver>/<digest>/vol_data.json

and, of block volumes (`volumeMode: Block`):

    plugins/kubernetes.io/csi/volumeDevices/staging/<name>        staged
    plugins/kubernetes.io/csi/volumeDevices/publish/<name>/<uid>  published: the device itself
    plugins/kubernetes.io/csi/volumeDevices/<name>/dev/<uid>      bind mount of the device
    plugins/kubernetes.io/csi/volumeDevices/<name>/data/vol_data.json
    pods/<uid>/volumeDevices/kubernetes.io~csi/<name>             symlink to the published device

`vol_data.json` is written before the first call to the driver and deleted after the driver has undone all
calls, so that a kubelet process that never saw the pod finds everything that drivers may have mounted. The
file is replaced atomically: it is complete or absent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.linux.mounts import read_mounts
from pykubelet.util.files import write_atomically
from pykubelet.volumes.csi.names import EPHEMERAL, PLUGIN_DIR, staging_dir_name
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublish
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.paths import PodVolumePaths, make_directory, path_component

DATA_FILE = "vol_data.json"
ABANDONED_SECONDS = 300.0
"""Age in seconds from which unfinished files and directories count as abandoned."""


class VolumeData(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Content of `vol_data.json`; the field names are upstream's, which reads and writes the same file."""

    volume_handle: str
    driver_name: str
    spec_vol_id: str = msgspec.field(name="specVolID", default="")
    """Name of the PersistentVolume, or the pod's own name for an inline volume."""
    node_name: str = ""
    attachment_id: str = msgspec.field(name="attachmentID", default="")
    volume_lifecycle_mode: str = ""
    se_linux_mount_context: str = ""

    def pending_unpublish(self, target_path: Path, trace: Path, uid: str, name: str) -> PendingUnpublish:
        """Return the NodeUnpublishVolume call to store if the driver cannot be called.

        `trace` is the path in the pod's directory that exists until the volume is removed from the pod.
        """
        return PendingUnpublish(
            driver=self.driver_name,
            handle=self.volume_handle,
            target=str(target_path),
            trace=str(trace),
            ephemeral=self.volume_lifecycle_mode == EPHEMERAL,
            pod=uid,
            volume=name,
        )


def write_data(path: Path, data: VolumeData) -> None:
    """Write the file, unless it is unchanged, and create its directory. Raises OSError. Blocks."""
    make_directory(path.parent)
    if read_data(path) == data:
        return
    content = msgspec.json.encode(data) + b"\n"
    write_atomically(path, content, 0o644, temporary=_temporary(path), durable=False)


def read_data(path: Path) -> VolumeData | None:
    """Return the content of the file, or None if it does not exist or is malformed. Blocks."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=VolumeData)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def remove_mount_point(path: Path, data_file: Path) -> None:
    """Remove a path at which a driver had mounted a volume, then the data file, then their empty directory.

    Drivers should remove the path themselves. Raises VolumePluginError if it is still mounted or not empty:
    then the driver did not undo its call, and deleting would delete the volume's content. Blocks.
    """
    if read_mounts(path):
        # Checked before the path is accessed: a mount that was left may hang.
        raise VolumePluginError(f"kubernetes.io/csi: the driver has left {path} mounted")
    try:
        if path.is_symlink() or path.is_file() or path.is_block_device():
            path.unlink(missing_ok=True)
        elif path.exists():
            path.rmdir()
    except OSError as err:
        raise VolumePluginError(
            f"kubernetes.io/csi: failed to remove dir [{path}]: {err.strerror}; "
            "the driver has left something there"
        ) from err
    data_file.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        data_file.parent.rmdir()


def remove_abandoned(
    data_file: Path, directories: Iterable[Path], clock: Callable[[], float] = time.time
) -> None:
    """Remove the unfinished data file and the empty directories that a killed kubelet left. Blocks.

    Nothing younger than ABANDONED_SECONDS is removed: this kubelet may be writing it.
    """
    with suppress(OSError):
        if clock() - data_file.parent.stat().st_mtime < ABANDONED_SECONDS:
            return
        _temporary(data_file).unlink(missing_ok=True)
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


DEVICES = "volumeDevices"
MOUNT = "mount"
GLOBAL_MOUNT = "globalmount"


@dataclass(frozen=True, slots=True)
class BlockVolumePaths:
    """Paths of one block volume; `base` is `.../volumeDevices`."""

    base: Path
    name: str

    @property
    def volume_dir(self) -> Path:
        """Directory of the volume, apart from the paths that the driver writes to."""
        return self.base / self.name

    @property
    def data(self) -> Path:
        """Path of the volume's `vol_data.json`."""
        return self.volume_dir / "data" / DATA_FILE

    @property
    def maps(self) -> Path:
        """Directory of the device's bind mounts, one per pod UID."""
        return self.volume_dir / "dev"

    @property
    def staging(self) -> Path:
        """Staging path of the driver."""
        return self.base / "staging" / self.name

    @property
    def published(self) -> Path:
        """Directory of the driver's target paths, one per pod UID."""
        return self.base / "publish" / self.name


@dataclass(frozen=True, slots=True)
class CsiPaths:
    """Paths of all CSI volumes of a node."""

    root: Path

    @property
    def plugin(self) -> Path:
        """Directory of everything that does not belong to a single pod."""
        return self.root / "plugins" / "kubernetes.io" / "csi"

    def volume(self, uid: str, name: str) -> Path:
        """Return the directory of a pod's volume. Raises ValueError for an invalid name."""
        return PodVolumePaths.for_pod(self.root, uid).volume(PLUGIN_DIR, name)

    def published(self, uid: str, name: str) -> Path:
        """Return the target path of a pod's volume."""
        return self.volume(uid, name) / MOUNT

    def data(self, uid: str, name: str) -> Path:
        """Return the path of the `vol_data.json` of a pod's volume."""
        return self.volume(uid, name) / DATA_FILE

    def staged(self, driver: str, handle: str) -> Path:
        """Return the staging path of a volume, which all pods share."""
        return self.plugin / path_component(driver) / staging_dir_name(handle) / GLOBAL_MOUNT

    def all_staged(self) -> Iterator[Path]:
        """Yield the staging paths of all volumes, including those of drivers that are not registered."""
        for driver in _directories(self.plugin):
            if driver.name != DEVICES:
                yield from (directory / GLOBAL_MOUNT for directory in _directories(driver))

    def all_data(self) -> Iterator[Path]:
        """Yield the `vol_data.json` paths of all pods' volumes; pods may be added or removed concurrently."""
        # Called often, and mostly without a result: read names only, without a stat of each entry.
        pods = str(self.root / "pods")
        for uid in _names(pods):
            volumes = f"{pods}/{uid}/volumes/{PLUGIN_DIR}"
            yield from (Path(volumes, name, DATA_FILE) for name in _names(volumes))

    def device(self, name: str) -> BlockVolumePaths:
        """Return the paths of a block volume."""
        return BlockVolumePaths(self.plugin / DEVICES, path_component(name))

    def all_devices(self) -> Iterator[BlockVolumePaths]:
        """Yield the paths of all block volumes that have a directory, in use or not."""
        for directory in _directories(self.plugin / DEVICES):
            if directory.name not in ("staging", "publish"):
                yield self.device(directory.name)

    def device_link(self, uid: str, name: str) -> Path:
        """Return the path of the symlink to the device in the pod's directory."""
        return PodVolumePaths.for_pod(self.root, uid).device(PLUGIN_DIR, name)


def _names(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
