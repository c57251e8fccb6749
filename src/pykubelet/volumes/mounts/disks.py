"""Formatting, checking and mounting of disks as file systems, each at one mount point per node.

A disk is formatted only if blkid finds nothing on it and it is writable. A disk with an unexpected format is
passed to the kernel, which decides whether it can be mounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pykubelet.logs import get_logger
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.mounts.mount_helper import (
    HelperError,
    MissingHelper,
    is_mounted,
    mount_with_helper,
    run_helper,
)
from pykubelet.volumes.paths import make_directory

log = get_logger(__name__)
PARTITIONED = "unknown data, probably partitions"
DEFAULT_FS_TYPE = "ext4"
_DISK_TIMEOUT_SECONDS = 1800.0
"""Seconds allowed for mkfs and fsck of a large file system."""
_FORMAT_FLAGS = {"ext3": ["-F", "-m0"], "ext4": ["-F", "-m0"], "xfs": ["-f"]}
_NOT_FOUND = 2
_CORRECTED, _UNCORRECTED = 1, 4


class DiskError(VolumePluginError):
    """Raised when a disk cannot be probed, formatted or repaired, or is unformatted and read-only."""


class FilesystemMismatch(HelperError):
    """Raised when a disk cannot be mounted because it has another format than the requested one."""


async def format_and_mount(
    device: Path, mount_point: Path, fs_type: str, options: Sequence[str], *, read_only: bool
) -> None:
    """Ensure that a disk is mounted at `mount_point`; an empty one is formatted.

    `fs_type` is "" for ext4. Idempotent: a disk that is already mounted is left unchanged. Raises
    VolumePluginError (FilesystemMismatch for a disk with another format) and OSError.
    """
    if is_mounted(mount_point):
        return
    fs_type = fs_type or DEFAULT_FS_TYPE
    found = await disk_format(device)
    if not found:
        if read_only:
            raise DiskError(
                f"cannot mount unformatted disk {device} as we are manipulating it in read-only mode"
            )
        await _format(device, fs_type)
    else:
        if found != fs_type:
            log.info("Disk format differs from the requested one", device=device, found=found, fsType=fs_type)
        if not read_only:
            await _check(device)
    make_directory(mount_point)
    try:
        await mount_with_helper(fs_type, str(device), mount_point, [*options, "defaults"], scoped=True)
    except HelperError as err:
        if not is_mounted(mount_point):
            mount_point.rmdir()
        if found and found != fs_type:
            raise FilesystemMismatch(str(err), status=err.status, output=err.output) from err
        raise


async def disk_format(device: Path) -> str:
    """Return the format of a disk: a file system type, PARTITIONED, or "" if blkid finds nothing."""
    try:
        output = await run_helper(
            "blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", str(device), deadline=60
        )
    except HelperError as err:
        if err.status == _NOT_FOUND:
            return ""
        raise DiskError(f"failed to get disk format of disk {device}: {err}") from err
    return parse_format(output)


def parse_format(output: str) -> str:
    """Parse the output of `blkid -o export` and return the format."""
    fields = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    return PARTITIONED if fields.get("PTTYPE") else fields.get("TYPE", "")


async def _format(device: Path, fs_type: str) -> None:
    if "/" in fs_type:
        raise DiskError(f"{fs_type!r} is no file system")
    log.info("Formatting empty disk", device=device, fsType=fs_type)
    try:
        await run_helper(
            f"mkfs.{fs_type}", *_FORMAT_FLAGS.get(fs_type, ()), str(device), deadline=_DISK_TIMEOUT_SECONDS
        )
    except HelperError as err:
        raise DiskError(f'format of disk "{device}" failed: {err}') from err


async def _check(device: Path) -> None:
    try:
        await run_helper("fsck", "-a", str(device), deadline=_DISK_TIMEOUT_SECONDS)
    except MissingHelper as err:
        log.info("Skipped fsck, mounting disk unchecked", device=device, err=str(err))
    except HelperError as err:
        if err.status == _UNCORRECTED:
            raise DiskError(
                f"'fsck' found errors on device {device} but could not correct them: {err}"
            ) from err
        if err.status == _CORRECTED:
            log.info("Corrected file system errors on disk", device=device)
        else:
            log.info("Failed to check file system", device=device, err=str(err))
