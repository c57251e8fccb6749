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
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mount_helper import HelperError, is_mounted, run_helper
from pykubelet.volumes.paths import make_folder, plain
from pykubelet.volumes.plugin import VolumeToMount
from pykubelet.volumes.plugins.network_disk import SharedDiskKind

log = get_logger(__name__)


class Notes(msgspec.Struct):
    """Metadata of an attached disk."""

    volume: str
    device: str


class FcKind(SharedDiskKind):
    """Plugin for fc volumes."""

    folder = "kubernetes.io~fc"
    notes = "fc.json"

    def disk_name(self, wanted: VolumeToMount) -> str:
        """Return the relative directory of the disk."""
        return fc_name(wanted.source)

    def attached_name(self, wanted: VolumeToMount) -> str:
        """Return the disk's address, formatted as by the controllers."""
        source = wanted.source
        if source.target_wwns and source.lun is not None:
            return f"[{' '.join(source.target_wwns)}]:{source.lun}"
        return f"[{' '.join(source.wwids)}]"

    def volume_of(self, place: Path) -> str:
        """Return the volume name in the metadata."""
        found = self._load(place)
        return found.volume if found is not None else ""

    async def attach(self, wanted: VolumeToMount, place: Path) -> Path:
        """Find the disk, after a scan of all SCSI hosts if it is missing or has no multipath device."""
        source = wanted.source
        device = self._find(source)
        if device is None or self.scsi.multipath_of(device) is None:
            await in_own_thread(self.scsi.scan_all, name="fc scan")
            device = self._find(source) or device
        if device is None:
            raise VolumePluginError("no fc disk found")
        device = self.scsi.multipath_of(device) or device.resolve()
        make_folder(place)
        if not is_mounted(place):
            (place / self.notes).write_bytes(msgspec.json.encode(Notes(wanted.name, str(device))))
        return device

    async def detach(self, place: Path, device: Path | None) -> None:
        """Flush the disk and remove it from the kernel; a missing disk is ignored."""
        found = self._load(place)
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
        return next((one for one in found if self.scsi.multipath_of(one)), next(iter(found), None))

    def _candidates(self, source: FibreChannel) -> Iterator[Path]:
        disks = self.scsi.dev / "disk"
        if source.lun is not None and source.target_wwns:
            for wwn in source.target_wwns:
                wanted = re.compile(rf"(pci-.*-fc|fc)-0x{re.escape(wwn)}-lun-{source.lun}")
                names = sorted(path for path in disks.glob("by-path/*") if wanted.fullmatch(path.name))
                yield from (path for path in names[:1] if path.exists())
        else:
            for wwid in source.wwids:
                path = disks / "by-id" / plain(f"scsi-{_underscored(wwid)}")
                if path.exists():
                    yield path

    def _load(self, place: Path) -> Notes | None:
        try:
            return msgspec.json.decode((place / self.notes).read_bytes(), type=Notes)
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
        return plain(name)
    except ValueError:
        raise BadSource(f"{name!r} cannot be a fibre channel disk's name") from None


def _underscored(wwid: str) -> str:
    return wwid.replace(" ", "_")
