"""SCSI disks as the kernel shows them below `/sys` and `/dev`: finding, scanning for and removing them.

Several paths to one disk make a multipath device (`dm-…`) on top of the disks. Everything here blocks
for a moment only, except for scanning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SESSION = "iscsi_session"
_CONNECTION = "iscsi_connection"


@dataclass(frozen=True, slots=True)
class Scsi:
    """The machine's disks; the two folders are others only in tests."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    def multipath_of(self, device: Path) -> Path | None:
        """Give the multipath device on top of a disk, if there is one; it is its own."""
        real = device.resolve()
        if real.name.startswith("dm-"):
            return real
        for slave in sorted((self.sys / "block").glob(f"dm-*/slaves/{real.name}")):
            return self.dev / slave.parent.parent.name
        return None

    def disks_of(self, device: Path) -> list[Path]:
        """Give the disks below a multipath device, or the disk itself."""
        real = device.resolve()
        if not real.name.startswith("dm-"):
            return [real]
        return sorted(
            self.dev / slave.name for slave in (self.sys / "block" / real.name / "slaves").glob("*")
        )

    def remove(self, disk: Path) -> None:
        """Have the kernel forget a disk; raises OSError. One that is gone is fine."""
        place = self.sys / "block" / disk.name / "device/delete"
        if place.exists():
            place.write_text("1")

    def scan_all(self) -> None:
        """Look for new disks everywhere; raises OSError."""
        for host in sorted((self.sys / "class/scsi_host").glob("*/scan")):
            host.write_text("- - -")

    def scan_lun(self, host: int, lun: int) -> None:
        """Look for one disk, and not for its neighbours, which are others' business; raises OSError."""
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
        """Give the portals through which the node is logged in to an iSCSI target, each with its host."""
        found = {}
        for host, session in self._sessions(target):
            for connection in sorted(session.glob(f"connection*/{_CONNECTION}/connection*")):
                for address, port in (("address", "port"), ("persistent_address", "persistent_port")):
                    where, number = _read(connection / address), _read(connection / port)
                    if where and number:
                        found[f"[{where}]:{number}" if ":" in where else f"{where}:{number}"] = host
        return found

    def lun_disks(self, target: str, lun: int) -> list[Path]:
        """Give the disks that one lun of an iSCSI target is here."""
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
        return ""  # a session may end while we look
