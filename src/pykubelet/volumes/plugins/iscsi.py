"""iscsi: a LUN of an iSCSI target, attached with the host's `iscsiadm`.

The node logs in to each portal of the target to which it has no session, and scans for the one LUN only. The
metadata file (`iscsi.json`, in upstream's format) is in the directory on which the disk is mounted, hidden by
the mount. `detach` reads it to log out, unless another LUN of the same target is in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import msgspec

from pykubelet.api.volume import Iscsi
from pykubelet.logs import get_logger
from pykubelet.volumes.block import DEVICES
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mount_helper import HelperError, is_mounted, run_helper
from pykubelet.volumes.paths import make_folder
from pykubelet.volumes.plugin import VolumeToMount
from pykubelet.volumes.plugins.network_disk import SharedDiskKind
from pykubelet.volumes.plugins.secret import named_secret

log = get_logger(__name__)
ENOUGH_PATHS = 2
"""Number of paths that suffice for a disk with several portals after FEWEST_TRIES attempts."""
FEWEST_TRIES, MOST_TRIES = 2, 5
DEVICE_SECONDS = 30.0
MULTIPATH_SECONDS = 10.0
_PAUSE = 0.2
_EXISTS = 15
_NOTHING_THERE = (2, 21)
_DISCOVERY = "discovery.sendtargets.auth."
_SESSION = "node.session.auth."
_LOGIN = ("username", "password", "username_in", "password_in")


class Disk(msgspec.Struct, rename="pascal"):
    """Metadata of a disk, in upstream's format."""

    vol_name: str
    portals: list[str]
    iqn: str
    lun: str
    init_iface: str
    iface: str
    initiator_name: str = ""

    @property
    def name(self) -> str:
        """Relative directory of the disk, below that of its interface."""
        return f"iface-{self.iface}/{self.portals[0]}-{self.iqn}-lun-{self.lun}"


def disk_of(source: Iscsi, volume: str) -> Disk:
    """Return the metadata of a volume's disk. Raises BadSource."""
    portals = [_with_port(portal) for portal in (source.target_portal, *source.portals)]
    initiator = source.initiator_name or ""
    iface = f"{portals[0]}:{volume}" if initiator else source.iscsi_interface
    disk = Disk(volume, portals, source.iqn, str(source.lun), source.iscsi_interface, iface, initiator)
    for word in (*portals, disk.iqn, disk.iface, disk.init_iface, initiator or "x"):
        if not word or word.startswith("-") or "/" in word or word in (".", ".."):
            raise BadSource(f"{word!r} cannot be part of an iSCSI disk's address")
    return disk


class IscsiKind(SharedDiskKind):
    """Plugin for iscsi volumes."""

    folder = "kubernetes.io~iscsi"
    depth = 2
    notes = "iscsi.json"

    def disk_name(self, wanted: VolumeToMount) -> str:
        """Return the relative directory of the disk."""
        return disk_of(wanted.source, wanted.name).name

    def attached_name(self, wanted: VolumeToMount) -> str:
        """Return the disk's address: portal, IQN and LUN."""
        return f"{wanted.source.target_portal}:{wanted.source.iqn}:{wanted.source.lun}"

    def volume_of(self, place: Path) -> str:
        """Return the volume name in the metadata."""
        disk = self._load(place)
        return disk.vol_name if disk is not None else ""

    async def attach(self, wanted: VolumeToMount, place: Path) -> Path:
        """Log in, and wait for the disk or for the multipath device on top of its paths."""
        disk = disk_of(wanted.source, wanted.name)
        secret = await self._secret(wanted)
        transport = await self._interface(disk)
        make_folder(place)
        if not is_mounted(place):
            (place / self.notes).write_bytes(msgspec.json.encode(disk))
        paths = await self._paths(disk, wanted.source, secret, transport)
        seconds = MULTIPATH_SECONDS if len(disk.portals) > 1 else 0
        end = asyncio.get_running_loop().time() + seconds
        while True:
            for path in paths:
                if multipath := self.scsi.multipath_of(path):
                    return multipath
            if asyncio.get_running_loop().time() >= end:
                return paths[0]
            await asyncio.sleep(_PAUSE)

    async def detach(self, place: Path, device: Path | None) -> None:
        """Remove the disk, and log out if no other disk of its target is in use."""
        disk = self._load(place)
        if disk is None:
            return
        disks = self.scsi.lun_disks(disk.iqn, int(disk.lun))
        for multipath in {found for one in disks if (found := self.scsi.multipath_of(one))}:
            await _try("multipath", "-f", str(multipath))
        for one in disks:
            self.scsi.remove(one)
        if self._shared(disk, place):
            return
        for portal in dict.fromkeys(disk.portals):
            node = ("-m", "node", "-p", portal, "-T", disk.iqn)
            await _admin(*node, "--logout", "-I", disk.iface, fine=_NOTHING_THERE)
            await _admin(*node, "-o", "delete", "-I", disk.iface, fine=_NOTHING_THERE)
        if disk.initiator_name and disk.iface == f"{disk.portals[0]}:{disk.vol_name}":
            await _admin("-m", "iface", "-I", disk.iface, "-o", "delete", fine=_NOTHING_THERE)

    async def _interface(self, disk: Disk) -> str:
        """Return the transport of the configured interface.

        With an initiator name, the volume gets an interface of its own, a copy of the configured one.
        """
        said = await _admin("-m", "iface", "-I", disk.init_iface, "-o", "show")
        facts = dict(_facts(said))
        if disk.initiator_name:
            await _admin("-m", "iface", "-I", disk.iface, "-o", "new", fine=(_EXISTS,))
            same = {name: value for name, value in facts.items() if value != "<empty>"}
            same.pop("iface.iscsi_ifacename", None)
            for name, value in sorted((same | {"iface.initiatorname": disk.initiator_name}).items()):
                await _admin("-m", "iface", "-I", disk.iface, "-o", "update", "-n", name, "-v", value)
        transport = facts.get("iface.transport_name", "")
        if not transport:
            raise VolumePluginError(f"could not parse iface file for {disk.init_iface}")
        return "tcp" if transport == "<empty>" else transport

    async def _paths(self, disk: Disk, source: Iscsi, secret: dict[str, str], transport: str) -> list[Path]:
        """Return the paths to the disk, retrying until all or enough are found, at most MOST_TRIES times.

        Raises VolumePluginError if an attempt ends without any path.
        """
        found: dict[str, Path] = {}
        failure: object = "none was tried"
        for attempt in range(1, MOST_TRIES + 1):
            for portal in disk.portals:
                if portal not in found:
                    try:
                        found[portal] = await self._path(disk, portal, source, secret, transport)
                    except (VolumePluginError, OSError) as err:
                        failure = err
            if not found:
                if disk.initiator_name:
                    await _try("iscsiadm", "-m", "iface", "-I", disk.iface, "-o", "delete")
                raise VolumePluginError(f"failed to get any path for iscsi disk, last err seen: {failure}")
            if len(found) == len(disk.portals) or (len(found) >= ENOUGH_PATHS and attempt >= FEWEST_TRIES):
                break
        return list(found.values())

    async def _path(
        self, disk: Disk, portal: str, source: Iscsi, secret: dict[str, str], transport: str
    ) -> Path:
        if portal not in self.scsi.portals(disk.iqn):
            await self._log_in(disk, portal, source, secret)
        host = self.scsi.portals(disk.iqn).get(portal)
        if host is None:
            raise VolumePluginError(f"iscsi: there is no host for portal {portal} after logging in")
        self.scsi.scan_lun(host, int(disk.lun))
        address = portal.replace("[", "").replace("]", "")
        name = f"ip-{address}-iscsi-{disk.iqn}-lun-{disk.lun}"
        end = asyncio.get_running_loop().time() + DEVICE_SECONDS
        while True:
            if path := self.scsi.disk_by_path(name, behind_pci=transport != "tcp"):
                return path
            if asyncio.get_running_loop().time() >= end:
                bus = "" if transport == "tcp" else "pci-*-"
                where = self.scsi.dev / f"disk/by-path/{bus}{name}"
                raise VolumePluginError(
                    f"Timed out waiting for device at path {where} after {DEVICE_SECONDS:g}s"
                )
            await asyncio.sleep(_PAUSE)

    async def _log_in(self, disk: Disk, portal: str, source: Iscsi, secret: dict[str, str]) -> None:
        discovery = ("-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", disk.iface)
        node = ("-m", "node", "-p", portal, "-T", disk.iqn, "-I", disk.iface)
        await _try("iscsiadm", *discovery, "-o", "new")
        if source.chap_auth_discovery:
            await _set_login(discovery, _DISCOVERY, secret)
        try:
            await _admin(*discovery, "--discover")
        except HelperError as err:
            await _try("iscsiadm", *discovery, "-o", "delete")
            raise VolumePluginError(f"iscsi: failed to sendtargets to portal {portal}: {err}") from err
        # Other LUNs of the target must not be attached to this node.
        await _try("iscsiadm", *node, "-o", "update", "-n", "node.session.scan", "-v", "manual")
        if source.chap_auth_session:
            await _set_login(node, _SESSION, secret)
        try:
            await _admin(*node, "--login", fine=(_EXISTS,))
        except HelperError as err:
            await _try("iscsiadm", *node, "-o", "delete")
            raise VolumePluginError(f"iscsi: failed to attach disk: {err}") from err
        # A booting host must not wait for a disk that may be attached elsewhere by then.
        startup = ("-o", "update", "-n", "node.startup", "-v", "manual")
        await _try("iscsiadm", "-m", "node", "-p", portal, "-T", disk.iqn, *startup)

    async def _secret(self, wanted: VolumeToMount) -> dict[str, str]:
        source = wanted.source
        reference = source.secret_ref
        if reference is None or not (source.chap_auth_discovery or source.chap_auth_session):
            return {}
        secret = await named_secret(self.given, wanted, reference)
        return {name: value.decode(errors="replace") for name, value in secret.data.items()}

    def _shared(self, disk: Disk, place: Path) -> bool:
        """Return whether another disk of the same target is in use on this node."""
        prefix = f"{disk.portals[0]}-{disk.iqn}"
        disks = place.parents[1].parent if place.parents[1].name == DEVICES else place.parents[1]
        others = (*disks.glob("iface-*/*"), *disks.glob(f"{DEVICES}/iface-*/*"))
        return any(other != place and other.name.startswith(f"{prefix}-lun-") for other in others)

    def _load(self, place: Path) -> Disk | None:
        try:
            return msgspec.json.decode((place / self.notes).read_bytes(), type=Disk)
        except (OSError, msgspec.MsgspecError):
            return None


async def _set_login(record: tuple[str, ...], prefix: str, secret: dict[str, str]) -> None:
    await _admin(*record, "-o", "update", "-n", f"{prefix}authmethod", "-v", "CHAP")
    for key in _LOGIN:
        if value := secret.get(prefix + key):
            await _admin(*record, "-o", "update", "-n", prefix + key, "-v", value, hidden=(value,))


async def _admin(*arguments: str, fine: Collection[int] = (), hidden: Collection[str] = ()) -> str:
    """Run `iscsiadm` and return its output. Raises HelperError, except for the exit statuses in `fine`."""
    try:
        return await run_helper("iscsiadm", *arguments, hidden=hidden)
    except HelperError as err:
        if err.status in fine:
            return err.output
        raise


async def _try(*command: str) -> None:
    """Run a command and ignore its failure."""
    try:
        await run_helper(*command)
    except HelperError as err:
        log.v(2).info("Ignored failed command for iSCSI disk", err=str(err))


def _facts(said: str) -> list[tuple[str, str]]:
    lines = (line.split(" = ", 1) for line in said.splitlines() if line.startswith("iface."))
    return [(line[0].strip(), line[1].strip()) for line in lines if len(line) == 2]


def _with_port(portal: str) -> str:
    return portal if ":" in portal else f"{portal}:3260"
