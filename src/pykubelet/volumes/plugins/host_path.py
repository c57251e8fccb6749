"""hostPath: a path of the host, checked against the type in the pod's spec."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

from pykubelet.api.volume import HostPath
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeToMount

_CHECKS: dict[str, tuple[Callable[[int], bool], str]] = {
    "Directory": (stat.S_ISDIR, "a directory"),
    "File": (stat.S_ISREG, "a file"),
    "Socket": (stat.S_ISSOCK, "a socket file"),
    "CharDevice": (stat.S_ISCHR, "a character device"),
    "BlockDevice": (stat.S_ISBLK, "a block device"),
}
_OR_CREATE = "OrCreate"
CHECK_TIMEOUT_SECONDS = 20.0
"""Seconds after which the check of a path is given up."""


class HostPathError(VolumePluginError):
    """Raised when a path is invalid, does not respond or is not of the required type."""


class HostPathPlugin(BaseVolumePlugin):
    """Plugin for hostPath volumes."""

    directory_name = ""
    live = False
    slow = False

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Check the path; in a thread that may hang, because its file server may be unreachable."""
        source = volume.source
        assert isinstance(source, HostPath)
        if source.type:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                    await in_own_thread(lambda: check_host_path(source), name="hostPath", cancel_timeout=0)
            except TimeoutError:
                raise HostPathError(f"{source.path} does not answer: is a server behind it down?") from None
        else:
            check_host_path(source)
        return MountedVolume(source.path, read_only=volume.read_only)


def check_host_path(source: HostPath) -> None:
    """Check a path, and create it if its type ends with `OrCreate`. Raises HostPathError and OSError.

    A path without a type is not accessed: the runtime creates a directory if it does not exist.
    """
    if ".." in source.path.split("/"):
        raise HostPathError(f"invalid HostPath `{source.path}`: must not contain '..'")
    required_type = source.type or ""
    if not required_type:
        return
    kind = required_type.removesuffix(_OR_CREATE)
    if kind not in _CHECKS or (required_type != kind and kind not in ("Directory", "File")):
        raise HostPathError(f"{required_type} is an invalid volume type")
    path = Path(source.path)
    if required_type != kind and not path.exists():
        if kind == "Directory":
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        else:
            path.touch(mode=0o644)
        return
    matches, name = _CHECKS[kind]
    try:
        mode = path.stat().st_mode
    except OSError:
        mode = 0
    if not matches(mode):
        raise HostPathError(f"hostPath type check failed: {source.path} is not {name}")
