"""Disks as file systems: made if there is none, checked, and mounted; each at one place of the node.

A disk is only ever formatted when nothing at all is found on it and it may be written. What is found but
was not expected is left to the kernel to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pykubelet.logs import get_logger
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.mount_helper import (
    HelperError,
    MissingHelper,
    is_mounted,
    mount_with_helper,
    run_helper,
)
from pykubelet.volumes.paths import make_folder

log = get_logger(__name__)
PARTITIONED = "unknown data, probably partitions"
DEFAULT = "ext4"
_LONG = 1800.0
"""Seconds that making or checking a large file system may take."""
_FORMAT_FLAGS = {"ext3": ["-F", "-m0"], "ext4": ["-F", "-m0"], "xfs": ["-f"]}
_NOTHING_FOUND = 2
_CORRECTED, _UNCORRECTED = 1, 4


class DiskError(VolumePluginError):
    """A disk cannot be used as it is; the text says why."""


async def format_and_mount(
    device: Path, place: Path, kind: str, options: Sequence[str], *, read_only: bool
) -> None:
    """Have a disk mounted at a place; harmless to repeat. Raises KindError and OSError.

    `kind` is the file system, "" for the usual one; a disk that is mounted already stays as it is.
    """
    if is_mounted(place):
        return
    kind = kind or DEFAULT
    found = await disk_format(device)
    if not found:
        if read_only:
            raise DiskError(
                f"cannot mount unformatted disk {device} as we are manipulating it in read-only mode"
            )
        await _format(device, kind)
    else:
        if found != kind:
            log.info("A disk has another format than it should", device=device, found=found, wanted=kind)
        if not read_only:
            await _check(device)
    make_folder(place)
    try:
        await mount_with_helper(kind, str(device), place, [*options, "defaults"], scoped=True)
    except HelperError:
        if not is_mounted(place):
            place.rmdir()
        raise


async def disk_format(device: Path) -> str:
    """Give what is on a disk: a file system's name, PARTITIONED, or "" when there is nothing at all."""
    try:
        said = await run_helper(
            "blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", str(device), deadline=60
        )
    except HelperError as err:
        if err.status == _NOTHING_FOUND:
            return ""
        raise DiskError(f"failed to get disk format of disk {device}: {err}") from err
    return read_format(said)


def read_format(said: str) -> str:
    """Give the format that `blkid` told of."""
    facts = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return PARTITIONED if facts.get("PTTYPE") else facts.get("TYPE", "")


async def _format(device: Path, kind: str) -> None:
    if "/" in kind:
        raise DiskError(f"{kind!r} is no file system")
    log.info("Formatting a disk that is empty", device=device, format=kind)
    try:
        await run_helper(f"mkfs.{kind}", *_FORMAT_FLAGS.get(kind, ()), str(device), deadline=_LONG)
    except HelperError as err:
        raise DiskError(f'format of disk "{device}" failed: {err}') from err


async def _check(device: Path) -> None:
    try:
        await run_helper("fsck", "-a", str(device), deadline=_LONG)
    except MissingHelper as err:
        log.info("A disk is mounted unchecked", device=device, reason=str(err))
    except HelperError as err:
        if err.status == _UNCORRECTED:
            raise DiskError(
                f"'fsck' found errors on device {device} but could not correct them: {err}"
            ) from err
        if err.status == _CORRECTED:
            log.info("Errors on a disk were corrected", device=device)
        else:
            log.info("A disk could not be checked", device=device, reason=str(err))
