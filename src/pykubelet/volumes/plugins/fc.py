"""fc: a Fibre Channel disk, which the kernel finds when the SCSI hosts are scanned.

A disk is identified by target WWN and LUN, or by its WWID; if it has several paths, the multipath device is
used. To detach a disk is to remove it from the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pykubelet.api.volume import FibreChannel
from pykubelet.logs import get_logger
from pykubelet.util.files import write_if_changed
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mounts.mount_helper import HelperError, is_mounted, run_helper
from pykubelet.volumes.paths import make_directory, path_component
from pykubelet.volumes.plugin import VolumeToMount
from pykubelet.volumes.plugins.network_disk import NetworkDiskPlugin

log = get_logger(__name__)


class DiskMetadata(msgspec.Struct):
    """Metadata of an attached disk."""

    volume: str
    device: str


class FcPlugin(NetworkDiskPlugin):
    """Plugin for fc volumes."""

    directory_name = "kubernetes.io~fc"
    metadata_file = "fc.json"

    def disk_name(self, volume: VolumeToMount) -> str:
        """Return the relative directory of the disk."""
        return fc_name(volume.source)

    def attached_name(self, volume: VolumeToMount) -> str:
        """Return the disk's address, formatted as by the controllers."""
        source = volume.source
        if source.target_wwns and source.lun is not None:
            return f"[{' '.join(source.target_wwns)}]:{source.lun}"
        return f"[{' '.join(source.wwids)}]"

    def volume_name(self, disk_dir: Path) -> str:
        """Return the volume name in the metadata."""
        found = self._load(disk_dir)
        return found.volume if found is not None else ""

    async def attach(self, volume: VolumeToMount, disk_dir: Path) -> Path:
        """Find the disk, after a scan of all SCSI hosts if it is missing or has no multipath device."""
        source = volume.source
        device = self._find(source)
        if device is None or self.scsi.multipath_of(device) is None:
            await in_own_thread(self.scsi.scan_all, name="fc scan")
            device = self._find(source) or device
        if device is None:
            raise VolumePluginError("no fc disk found")
        device = self.scsi.multipath_of(device) or device.resolve()
        make_directory(disk_dir)
        if not is_mounted(disk_dir):
            metadata = msgspec.json.encode(DiskMetadata(volume.name, str(device)))
            write_if_changed(disk_dir / self.metadata_file, metadata, 0o644)
        return device

    async def detach(self, disk_dir: Path, device: Path | None) -> None:
        """Flush the disk and remove it from the kernel; a missing disk is ignored."""
        found = self._load(disk_dir)
        if device is None and found is not None:
            device = Path(found.device)
        if device is None or not device.exists():
            return
        disks = self.scsi.disks_of(device)
        if device.resolve().name.startswith("dm-"):
            await run_helper("multipath", "-f", str(device.resolve()))
        for disk in disks:
            try:
                await run_helper("blockdev", "--flushbufs", str(disk))
            except HelperError as err:
                log.error(err, "Failed to flush disk before detaching it", device=disk)
            self.scsi.remove(disk)

    def _find(self, source: FibreChannel) -> Path | None:
        """Return the disk, preferably one that is part of a multipath device, or None."""
        found = list(self._candidates(source))
        return next((path for path in found if self.scsi.multipath_of(path)), next(iter(found), None))

    def _candidates(self, source: FibreChannel) -> Iterator[Path]:
        disks = self.scsi.dev / "disk"
        if source.lun is not None and source.target_wwns:
            for wwn in source.target_wwns:
                pattern = re.compile(rf"(pci-.*-fc|fc)-0x{re.escape(wwn)}-lun-{source.lun}")
                names = sorted(path for path in disks.glob("by-path/*") if pattern.fullmatch(path.name))
                yield from (path for path in names[:1] if path.exists())
        else:
            for wwid in source.wwids:
                path = disks / "by-id" / path_component(f"scsi-{_underscored(wwid)}")
                if path.exists():
                    yield path

    def _load(self, disk_dir: Path) -> DiskMetadata | None:
        try:
            return msgspec.json.decode((disk_dir / self.metadata_file).read_bytes(), type=DiskMetadata)
        except (OSError, msgspec.MsgspecError):
            return None


def fc_name(source: FibreChannel) -> str:
    """Return the directory name of a disk. Raises BadSource."""
    if source.lun is not None and source.target_wwns:
        name = f"{'-'.join(source.target_wwns)}-lun-{source.lun}"
    elif source.wwids:
        name = "-".join(_underscored(wwid) for wwid in source.wwids)
    else:
        raise BadSource("fc: no fc disk information found. failed to make a new mounter")
    try:
        return path_component(name)
    except ValueError:
        raise BadSource(f"{name!r} cannot be a fibre channel disk's name") from None


def _underscored(wwid: str) -> str:
    return wwid.replace(" ", "_")
