"""Base of iscsi and fc: a disk of a storage network, attached once for all pods of the node.

    plugins/kubernetes.io/<kind>/<disk>                 mount point of the disk; it hides the metadata file
    plugins/kubernetes.io/<kind>/volumeDevices/<disk>   metadata file of a disk used as a block device

The disk is bind-mounted from there into the pods' directories. fsGroup is applied before the bind mount, so
that a bound volume is ready. `sweep` unmounts and detaches a disk without bind mounts; it reads the mount
table, hence it also works for a kubelet process that never saw the pods.

`Scsi` finds, scans for and removes SCSI disks through `/sys` and `/dev`. Several paths to one disk form a
multipath device (`dm-…`) on top of the disks. Its methods block briefly, those that scan for longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pykubelet.linux.mounts import MS_RDONLY, read_mounts, unmount
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.block import DEVICES, global_folder, map_device
from pykubelet.volumes.disks import format_and_mount
from pykubelet.volumes.mount_helper import is_mounted, join_options
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import own
from pykubelet.volumes.paths import VolumeFolders, bind_folder, mount_at
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

log = get_logger(__name__)
_SESSION = "iscsi_session"
_CONNECTION = "iscsi_connection"


@dataclass(frozen=True, slots=True)
class Scsi:
    """SCSI disks of the host; tests replace the two directories."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    def multipath_of(self, device: Path) -> Path | None:
        """Return the multipath device on top of a disk, or None; a multipath device is returned itself."""
        real = device.resolve()
        if real.name.startswith("dm-"):
            return real
        for slave in sorted((self.sys / "block").glob(f"dm-*/slaves/{real.name}")):
            return self.dev / slave.parent.parent.name
        return None

    def disks_of(self, device: Path) -> list[Path]:
        """Return the disks below a multipath device, or the disk itself."""
        real = device.resolve()
        if not real.name.startswith("dm-"):
            return [real]
        return sorted(
            self.dev / slave.name for slave in (self.sys / "block" / real.name / "slaves").glob("*")
        )

    def remove(self, disk: Path) -> None:
        """Remove a disk from the kernel; a missing disk is ignored. Raises OSError."""
        place = self.sys / "block" / disk.name / "device/delete"
        if place.exists():
            place.write_text("1")

    def scan_all(self) -> None:
        """Scan all SCSI hosts for new disks. Raises OSError."""
        for host in sorted((self.sys / "class/scsi_host").glob("*/scan")):
            host.write_text("- - -")

    def scan_lun(self, host: int, lun: int) -> None:
        """Scan for one LUN only; other LUNs of the target may belong to other nodes. Raises OSError."""
        (self.sys / f"class/scsi_host/host{host}/scan").write_text(f"0 0 {lun}")

    def disk_by_path(self, name: str, *, behind_pci: bool) -> Path | None:
        """Return the device with exactly this name in `/dev/disk/by-path`, or None.

        With `behind_pci`, the name follows the address of a PCI host bus adapter. The name contains text of
        the pod's spec and therefore is never a pattern: `*` as iqn would match the disks of other pods.
        """
        folder = self.dev / "disk/by-path"
        if not behind_pci:
            return folder / name if (folder / name).exists() else None
        try:
            found = sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return None
        front, end = "pci-", f"-{name}"
        shortest = len(front) + len(end)
        matches = (
            one for one in found if one.startswith(front) and one.endswith(end) and len(one) >= shortest
        )
        return next((folder / match for match in matches), None)

    def portals(self, target: str) -> dict[str, int]:
        """Return the portals with a session to an iSCSI target, each with its SCSI host number."""
        found = {}
        for host, session in self._sessions(target):
            for connection in sorted(session.glob(f"connection*/{_CONNECTION}/connection*")):
                for address, port in (("address", "port"), ("persistent_address", "persistent_port")):
                    where, number = _read(connection / address), _read(connection / port)
                    if where and number:
                        found[f"[{where}]:{number}" if ":" in where else f"{where}:{number}"] = host
        return found

    def lun_disks(self, target: str, lun: int) -> list[Path]:
        """Return the disks of one LUN of an iSCSI target, one per session."""
        found = []
        for host, session in self._sessions(target):
            blocks = (session / f"target{host}:0:0/{host}:0:0:{lun}/block").glob("*")
            found += [self.dev / block.name for block in sorted(blocks)[:1]]
        return found

    def _sessions(self, target: str) -> Iterator[tuple[int, Path]]:
        for session in sorted((self.sys / "class/iscsi_host").glob("host*/device/session*")):
            host = re.fullmatch(r"host(\d+)", session.parent.parent.name)
            if host and _read(session / _SESSION / session.name / "targetname") == target:
                yield int(host[1]), session


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # the session may end concurrently


T = TypeVar("T")


class SharedDiskKind(BaseVolumePlugin):
    """Base class of network disk plugins; subclasses find, attach and detach a disk."""

    blocks = True
    options = True
    depth = 1
    """Number of directory levels of a disk name below the plugin's directory."""
    notes = ""
    """Name of the plugin's metadata file of a disk."""

    def __init__(self, given: VolumeHost, scsi: Scsi | None = None) -> None:
        self.given = given
        self.scsi = scsi or Scsi()
        self._disks = given.root / "plugins" / self.folder.replace("~", "/")
        self._locks = Locks()
        self._here: dict[Path, str] = {}
        """Names in the node's status of the attached disks, by mount point or metadata directory."""

    def disk_name(self, wanted: VolumeToMount) -> str:
        """Return the disk's path relative to the plugin's directory. Raises VolumePluginError."""
        raise NotImplementedError

    async def attach(self, wanted: VolumeToMount, place: Path) -> Path:
        """Attach the disk, write its metadata to `place` and return its device.

        Raises VolumePluginError and OSError.
        """
        raise NotImplementedError

    async def detach(self, place: Path, device: Path | None) -> None:
        """Detach the disk by the metadata in `place`; `device` was mounted there. Raises as `attach` does."""
        raise NotImplementedError

    def attached_name(self, wanted: VolumeToMount) -> str:
        """Return the disk's name in `status.volumesInUse`, without the plugin's prefix."""
        raise NotImplementedError

    def volume_of(self, place: Path) -> str:
        """Return the name of the volume from the metadata in `place`; empty if there is no metadata."""
        raise NotImplementedError

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Attach the disk, and bind-mount it or map it as a block device."""
        read_only = wanted.read_only or (wanted.persistent is None and bool(wanted.source.read_only))
        name, attached = self.disk_name(wanted), self._attached_name(wanted)
        folders = VolumeFolders.of(self.given.root, wanted.uid)
        place = folders.volume(self.folder, wanted.name)
        mapped = wanted.block and folders.device(self.folder, wanted.name).is_symlink()
        if not mapped and not is_mounted(place):
            # Not needed for a volume that is set up: its attachment was verified then.
            await self.given.attached(wanted, attached)
        async with self._locks(name):
            self._here[(self._disks / DEVICES if wanted.block else self._disks) / name] = attached
            if wanted.block:
                return await self._as_device(wanted, name, read_only=read_only)
            if not is_mounted(place):
                await self._bind(wanted, self._disks / name, place, read_only=read_only)
        return MountedVolume(str(place), read_only=read_only, relabel=not read_only, attached=attached)

    def in_use(self) -> Collection[str]:
        """Return the disks attached here, until they are detached; then another node may attach them."""
        return {name for name in self._here.values() if name}

    async def sweep(self, in_use: Collection[str]) -> None:
        """Unmount and detach the disks that no pod uses."""
        for folder in (self._disks, self._disks / DEVICES):
            for place in self._places(folder):
                async with self._locks(str(place.relative_to(folder))):
                    await self._release(place, as_device=folder.name == DEVICES)
        for place in [place for place in self._here if not place.exists()]:
            del self._here[place]

    async def _as_device(self, wanted: VolumeToMount, name: str, *, read_only: bool) -> MountedVolume:
        device = await self.attach(wanted, self._disks / DEVICES / name)
        root, uid = self.given.root, wanted.uid
        link = await _thread(
            lambda: map_device(root, self.folder, uid, wanted.name, device, read_only=read_only)
        )
        attached = self._attached_name(wanted)
        return MountedVolume("", read_only=read_only, device=link, attached=attached)

    def _attached_name(self, wanted: VolumeToMount) -> str:
        return f"{self.folder.replace('~', '/')}/{self.attached_name(wanted)}" if self.given.api else ""

    async def _bind(self, wanted: VolumeToMount, disk: Path, place: Path, *, read_only: bool) -> None:
        if not is_mounted(disk):
            device = await self.attach(wanted, disk)
            options = join_options(wanted.mount_options, ["ro"] if read_only else [])
            await format_and_mount(device, disk, wanted.source.fs_type, options, read_only=read_only)
        if not read_only:
            await own(wanted.pod, disk, self.given.tell)
        await _thread(lambda: bind_folder(disk, place, MS_RDONLY if read_only else 0))

    async def _release(self, place: Path, *, as_device: bool) -> None:
        if as_device:
            volume = self.volume_of(place)
            mapped = global_folder(self.given.root, self.folder, volume) if volume else None
            if mapped is not None and mapped.is_dir():
                return
            device = None
        else:
            here = mount_at(place)
            device = Path(here.source) if here is not None else None
            if here is not None:
                same = (here.kind, here.source)
                if any((one.kind, one.source) == same and one.point != here.point for one in read_mounts()):
                    return
                await _thread(lambda: _unmount(place))
        await self.detach(place, device)
        (place / self.notes).unlink(missing_ok=True)
        place.rmdir()
        log.info("Detached unused disk", path=place)

    def _places(self, folder: Path) -> list[Path]:
        pattern = "/".join("*" * self.depth)
        return sorted(
            place
            for place in folder.glob(pattern)
            if place.is_dir() and place.relative_to(folder).parts[0] != DEVICES
        )


def _unmount(place: Path) -> None:
    while unmount(place):
        continue


async def _thread(work: Callable[[], T]) -> T:
    return await in_own_thread(work, name="shared disk")
