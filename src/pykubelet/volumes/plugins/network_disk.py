"""Base of iscsi and fc: a disk of a storage network, attached once for all pods of the node.

    plugins/kubernetes.io/<kind>/<disk>                 mount point of the disk; it hides the metadata file
    plugins/kubernetes.io/<kind>/volumeDevices/<disk>   metadata file of a disk used as a block device

The disk is bind-mounted from there into the pods' directories. fsGroup is applied before the bind mount, so
that a bound volume is ready. `unmount_unused` unmounts and detaches a disk without bind mounts; it reads the
mount table, hence it also works for a kubelet process that never saw the pods.

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
from pykubelet.volumes.mounts.block import DEVICES, global_map_path, map_device
from pykubelet.volumes.mounts.disks import format_and_mount
from pykubelet.volumes.mounts.mount_helper import is_mounted, join_options
from pykubelet.volumes.mounts.selinux import (
    context_option,
    label_conflict,
    mount_label,
    supports_context_mount,
)
from pykubelet.volumes.operations import Locks
from pykubelet.volumes.ownership import apply_fs_group
from pykubelet.volumes.paths import PodVolumePaths, bind_directory, mount_at
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
        delete_file = self.sys / "block" / disk.name / "device/delete"
        if delete_file.exists():
            delete_file.write_text("1")

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
        directory = self.dev / "disk/by-path"
        if not behind_pci:
            return directory / name if (directory / name).exists() else None
        try:
            found = sorted(path.name for path in directory.iterdir())
        except FileNotFoundError:
            return None
        front, end = "pci-", f"-{name}"
        shortest = len(front) + len(end)
        matches = (
            entry
            for entry in found
            if entry.startswith(front) and entry.endswith(end) and len(entry) >= shortest
        )
        return next((directory / match for match in matches), None)

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


class NetworkDiskPlugin(BaseVolumePlugin):
    """Base class of network disk plugins; subclasses find, attach and detach a disk."""

    blocks = True
    options = True
    depth = 1
    """Number of directory levels of a disk name below the plugin's directory."""
    metadata_file = ""
    """Name of the plugin's metadata file of a disk."""

    def __init__(self, host: VolumeHost, scsi: Scsi | None = None) -> None:
        self.host = host
        self.scsi = scsi or Scsi()
        self._disks = host.root / "plugins" / self.directory_name.replace("~", "/")
        self._locks = Locks()
        self._attached_names: dict[Path, str] = {}
        """Names in the node's status of the attached disks, by mount point or metadata directory."""
        self._labels: dict[Path, str] = {}
        """SELinux labels of the disks that this process has mounted, by mount point."""

    def disk_name(self, volume: VolumeToMount) -> str:
        """Return the disk's path relative to the plugin's directory. Raises VolumePluginError."""
        raise NotImplementedError

    async def attach(self, volume: VolumeToMount, disk_dir: Path) -> Path:
        """Attach the disk, write its metadata to `disk_dir` and return its device.

        Raises VolumePluginError and OSError.
        """
        raise NotImplementedError

    async def detach(self, disk_dir: Path, device: Path | None) -> None:
        """Detach the disk by the metadata in `disk_dir`; `device` was mounted there.

        Raises as `attach` does.
        """
        raise NotImplementedError

    def attached_name(self, volume: VolumeToMount) -> str:
        """Return the disk's name in `status.volumesInUse`, without the plugin's prefix."""
        raise NotImplementedError

    def volume_name(self, disk_dir: Path) -> str:
        """Return the name of the volume from the metadata in `disk_dir`; empty if there is no metadata."""
        raise NotImplementedError

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Attach the disk, and bind-mount it or map it as a block device."""
        read_only = volume.read_only or (volume.persistent is None and bool(volume.source.read_only))
        name, attached = self.disk_name(volume), self._attached_name(volume)
        paths = PodVolumePaths.for_pod(self.host.root, volume.uid)
        mount_point = paths.volume(self.directory_name, volume.name)
        mapped = volume.block and paths.device(self.directory_name, volume.name).is_symlink()
        if not mapped and not is_mounted(mount_point):
            # Not needed for a volume that is set up: its attachment was verified then.
            await self.host.attached_device(volume, attached)
        async with self._locks(name):
            self._attached_names[(self._disks / DEVICES if volume.block else self._disks) / name] = attached
            if volume.block:
                return await self._as_device(volume, name, read_only=read_only)
            label = self._label(volume, self._disks / name)
            if not is_mounted(mount_point):
                await self._bind(volume, self._disks / name, mount_point, label, read_only=read_only)
        relabel = not read_only and not label
        return MountedVolume(str(mount_point), read_only=read_only, relabel=relabel, attached=attached)

    async def supports_context_mount(self, volume: VolumeToMount) -> bool:
        """Return whether a volume can be mounted with a SELinux label: disks can."""
        return True

    def in_use(self) -> Collection[str]:
        """Return the disks attached here, until they are detached; then another node may attach them."""
        return {name for name in self._attached_names.values() if name}

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        """Unmount and detach the disks that no pod uses."""
        for directory in (self._disks, self._disks / DEVICES):
            for disk_dir in self._disk_dirs(directory):
                async with self._locks(str(disk_dir.relative_to(directory))):
                    await self._release(disk_dir, as_device=directory.name == DEVICES)
        for disk_dir in [disk_dir for disk_dir in self._attached_names if not disk_dir.exists()]:
            base = self._disks / DEVICES if disk_dir.is_relative_to(self._disks / DEVICES) else self._disks
            if self._locks.is_held(str(disk_dir.relative_to(base))):
                continue  # a set-up in progress has not created the directory yet
            del self._attached_names[disk_dir]
            self._labels.pop(disk_dir, None)

    async def _as_device(self, volume: VolumeToMount, name: str, *, read_only: bool) -> MountedVolume:
        device = await self.attach(volume, self._disks / DEVICES / name)
        root, uid = self.host.root, volume.uid
        link = await _thread(
            lambda: map_device(root, self.directory_name, uid, volume.name, device, read_only=read_only)
        )
        attached = self._attached_name(volume)
        return MountedVolume("", read_only=read_only, device=link, attached=attached)

    def _attached_name(self, volume: VolumeToMount) -> str:
        return (
            f"{self.directory_name.replace('~', '/')}/{self.attached_name(volume)}" if self.host.api else ""
        )

    def _label(self, volume: VolumeToMount, disk: Path) -> str:
        """Return the SELinux label to mount a disk with. Raises VolumePluginError.

        A disk that is mounted already keeps its label, which must be the same; labels of disks that an
        earlier kubelet process mounted are not known, and are accepted.
        """
        if not supports_context_mount(volume, all_modes=self.host.options.se_linux_mount):
            return ""
        label = mount_label(volume, supported=True)
        known = self._labels.get(disk, label)
        if known != label and is_mounted(disk):
            raise label_conflict(volume.name, known, label)
        return label

    async def _bind(
        self, volume: VolumeToMount, disk: Path, mount_point: Path, label: str, *, read_only: bool
    ) -> None:
        if not is_mounted(disk):
            device = await self.attach(volume, disk)
            options = join_options(volume.mount_options, ["ro"] if read_only else [])
            options += [context_option(label)] if label else []
            await format_and_mount(device, disk, volume.source.fs_type, options, read_only=read_only)
            self._labels[disk] = label
        if not read_only:
            await apply_fs_group(volume.pod, disk, self.host.record_event)
        await _thread(lambda: bind_directory(disk, mount_point, MS_RDONLY if read_only else 0))

    async def _release(self, disk_dir: Path, *, as_device: bool) -> None:
        if as_device:
            volume = self.volume_name(disk_dir)
            mapped = global_map_path(self.host.root, self.directory_name, volume) if volume else None
            if mapped is not None and mapped.is_dir():
                return
            device = None
        else:
            mounted = mount_at(disk_dir)
            device = Path(mounted.source) if mounted is not None else None
            if mounted is not None:
                same = (mounted.kind, mounted.source)
                if any(
                    (other.kind, other.source) == same and other.point != mounted.point
                    for other in read_mounts()
                ):
                    return
                await _thread(lambda: _unmount(disk_dir))
        await self.detach(disk_dir, device)
        (disk_dir / self.metadata_file).unlink(missing_ok=True)
        disk_dir.rmdir()
        log.info("Detached unused disk", path=disk_dir)

    def _disk_dirs(self, directory: Path) -> list[Path]:
        pattern = "/".join("*" * self.depth)
        return sorted(
            disk_dir
            for disk_dir in directory.glob(pattern)
            if disk_dir.is_dir() and disk_dir.relative_to(directory).parts[0] != DEVICES
        )


def _unmount(mount_point: Path) -> None:
    while unmount(mount_point):
        continue


async def _thread(work: Callable[[], T]) -> T:
    return await in_own_thread(work, name="shared disk")
