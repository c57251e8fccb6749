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
from pykubelet.util.files import write_if_changed
from pykubelet.volumes.errors import BadSource, VolumePluginError
from pykubelet.volumes.mounts.block import DEVICES
from pykubelet.volumes.mounts.mount_helper import HelperError, is_mounted, run_helper
from pykubelet.volumes.paths import make_directory
from pykubelet.volumes.plugin import VolumeToMount
from pykubelet.volumes.plugins.network_disk import NetworkDiskPlugin
from pykubelet.volumes.plugins.secret import named_secret

log = get_logger(__name__)
SUFFICIENT_PATHS = 2
"""Number of paths that suffice for a disk with several portals after MIN_ATTEMPTS attempts."""
MIN_ATTEMPTS, MAX_ATTEMPTS = 2, 5
DEVICE_SECONDS = 30.0
MULTIPATH_SECONDS = 10.0
_POLL_SECONDS = 0.2
_EXISTS = 15
_NOT_FOUND = (2, 21)
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


def disk_for(source: Iscsi, volume: str) -> Disk:
    """Return the metadata of a volume's disk. Raises BadSource."""
    portals = [_with_port(portal) for portal in (source.target_portal, *source.portals)]
    initiator = source.initiator_name or ""
    iface = f"{portals[0]}:{volume}" if initiator else source.iscsi_interface
    disk = Disk(volume, portals, source.iqn, str(source.lun), source.iscsi_interface, iface, initiator)
    for part in (*portals, disk.iqn, disk.iface, disk.init_iface, initiator or "x"):
        if not part or part.startswith("-") or "/" in part or part in (".", ".."):
            raise BadSource(f"{part!r} cannot be part of an iSCSI disk's address")
    return disk


class IscsiPlugin(NetworkDiskPlugin):
    """Plugin for iscsi volumes."""

    directory_name = "kubernetes.io~iscsi"
    depth = 2
    metadata_file = "iscsi.json"

    def disk_name(self, volume: VolumeToMount) -> str:
        """Return the relative directory of the disk."""
        return disk_for(volume.source, volume.name).name

    def attached_name(self, volume: VolumeToMount) -> str:
        """Return the disk's address: portal, IQN and LUN."""
        return f"{volume.source.target_portal}:{volume.source.iqn}:{volume.source.lun}"

    def volume_name(self, disk_dir: Path) -> str:
        """Return the volume name in the metadata."""
        disk = self._load(disk_dir)
        return disk.vol_name if disk is not None else ""

    async def attach(self, volume: VolumeToMount, disk_dir: Path) -> Path:
        """Log in, and wait for the disk or for the multipath device on top of its paths."""
        disk = disk_for(volume.source, volume.name)
        secret = await self._secret(volume)
        transport = await self._interface(disk)
        make_directory(disk_dir)
        if not is_mounted(disk_dir):
            write_if_changed(disk_dir / self.metadata_file, msgspec.json.encode(disk), 0o644)
        paths = await self._paths(disk, volume.source, secret, transport)
        seconds = MULTIPATH_SECONDS if len(disk.portals) > 1 else 0
        end = asyncio.get_running_loop().time() + seconds
        while True:
            for path in paths:
                if multipath := self.scsi.multipath_of(path):
                    return multipath
            if asyncio.get_running_loop().time() >= end:
                return paths[0]
            await asyncio.sleep(_POLL_SECONDS)

    async def detach(self, disk_dir: Path, device: Path | None) -> None:
        """Remove the disk, and log out if no other disk of its target is in use."""
        disk = self._load(disk_dir)
        if disk is None:
            return
        disks = self.scsi.lun_disks(disk.iqn, int(disk.lun))
        for multipath in {found for path in disks if (found := self.scsi.multipath_of(path))}:
            await _try("multipath", "-f", str(multipath))
        for path in disks:
            self.scsi.remove(path)
        if self._is_target_in_use(disk, disk_dir):
            return
        for portal in dict.fromkeys(disk.portals):
            node = ("-m", "node", "-p", portal, "-T", disk.iqn)
            await _admin(*node, "--logout", "-I", disk.iface, accepted=_NOT_FOUND)
            await _admin(*node, "-o", "delete", "-I", disk.iface, accepted=_NOT_FOUND)
        if disk.initiator_name and disk.iface == f"{disk.portals[0]}:{disk.vol_name}":
            await _admin("-m", "iface", "-I", disk.iface, "-o", "delete", accepted=_NOT_FOUND)

    async def _interface(self, disk: Disk) -> str:
        """Return the transport of the configured interface.

        With an initiator name, the volume gets an interface of its own, a copy of the configured one.
        """
        output = await _admin("-m", "iface", "-I", disk.init_iface, "-o", "show")
        settings = dict(_parse_settings(output))
        if disk.initiator_name:
            await _admin("-m", "iface", "-I", disk.iface, "-o", "new", accepted=(_EXISTS,))
            copied = {name: value for name, value in settings.items() if value != "<empty>"}
            copied.pop("iface.iscsi_ifacename", None)
            for name, value in sorted((copied | {"iface.initiatorname": disk.initiator_name}).items()):
                await _admin("-m", "iface", "-I", disk.iface, "-o", "update", "-n", name, "-v", value)
        transport = settings.get("iface.transport_name", "")
        if not transport:
            raise VolumePluginError(f"could not parse iface file for {disk.init_iface}")
        return "tcp" if transport == "<empty>" else transport

    async def _paths(self, disk: Disk, source: Iscsi, secret: dict[str, str], transport: str) -> list[Path]:
        """Return the paths to the disk, retrying until all or enough are found, at most MAX_ATTEMPTS times.

        Raises VolumePluginError if an attempt ends without any path.
        """
        found: dict[str, Path] = {}
        failure: object = "none was tried"
        for attempt in range(1, MAX_ATTEMPTS + 1):
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
            if len(found) == len(disk.portals) or (
                len(found) >= SUFFICIENT_PATHS and attempt >= MIN_ATTEMPTS
            ):
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
            await asyncio.sleep(_POLL_SECONDS)

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
            await _admin(*node, "--login", accepted=(_EXISTS,))
        except HelperError as err:
            await _try("iscsiadm", *node, "-o", "delete")
            raise VolumePluginError(f"iscsi: failed to attach disk: {err}") from err
        # A booting host must not wait for a disk that may be attached elsewhere by then.
        startup = ("-o", "update", "-n", "node.startup", "-v", "manual")
        await _try("iscsiadm", "-m", "node", "-p", portal, "-T", disk.iqn, *startup)

    async def _secret(self, volume: VolumeToMount) -> dict[str, str]:
        source = volume.source
        reference = source.secret_ref
        if reference is None or not (source.chap_auth_discovery or source.chap_auth_session):
            return {}
        secret = await named_secret(self.host, volume, reference)
        return {name: value.decode(errors="replace") for name, value in secret.data.items()}

    def _is_target_in_use(self, disk: Disk, disk_dir: Path) -> bool:
        """Return whether another disk of the same target is in use on this node."""
        prefix = f"{disk.portals[0]}-{disk.iqn}"
        disks = disk_dir.parents[1].parent if disk_dir.parents[1].name == DEVICES else disk_dir.parents[1]
        other_disks = (*disks.glob("iface-*/*"), *disks.glob(f"{DEVICES}/iface-*/*"))
        return any(other != disk_dir and other.name.startswith(f"{prefix}-lun-") for other in other_disks)

    def _load(self, disk_dir: Path) -> Disk | None:
        try:
            return msgspec.json.decode((disk_dir / self.metadata_file).read_bytes(), type=Disk)
        except (OSError, msgspec.MsgspecError):
            return None


async def _set_login(record: tuple[str, ...], prefix: str, secret: dict[str, str]) -> None:
    await _admin(*record, "-o", "update", "-n", f"{prefix}authmethod", "-v", "CHAP")
    for key in _LOGIN:
        if value := secret.get(prefix + key):
            await _admin(*record, "-o", "update", "-n", prefix + key, "-v", value, hidden=(value,))


async def _admin(*arguments: str, accepted: Collection[int] = (), hidden: Collection[str] = ()) -> str:
    """Run `iscsiadm` and return its output. Raises HelperError, unless the exit status is `accepted`."""
    try:
        return await run_helper("iscsiadm", *arguments, hidden=hidden)
    except HelperError as err:
        if err.status in accepted:
            return err.output
        raise


async def _try(*command: str) -> None:
    """Run a command and ignore its failure."""
    try:
        await run_helper(*command)
    except HelperError as err:
        log.v(2).info("Ignored failed command for iSCSI disk", err=str(err))


def _parse_settings(output: str) -> list[tuple[str, str]]:
    lines = (line.split(" = ", 1) for line in output.splitlines() if line.startswith("iface."))
    return [(line[0].strip(), line[1].strip()) for line in lines if len(line) == 2]


def _with_port(portal: str) -> str:
    return portal if ":" in portal else f"{portal}:3260"
