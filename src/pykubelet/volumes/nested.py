"""Volumes mounted inside of other volumes of the same container.

A volume that containers cannot write must have the folders that others are mounted on, before the
runtime needs them: it could not make them any more.
"""

from __future__ import annotations

import errno
import os
import posixpath
from contextlib import suppress
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.volumes.errors import KindError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o755


def nested_mount_points(pod: Pod, volume: str) -> list[str]:
    """Give the paths in a volume that other volumes are mounted on, in any container; raises KindError.

    Only the outermost: what is mounted in one of those is not this volume's business. Nor are names
    that the writer of volumes keeps for itself.
    """
    spec = pod.spec
    found: dict[str, None] = {}
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if len(container.volume_mounts) > 1:
            found |= dict.fromkeys(_in_container(container, volume))
    return [point for point in found if not point.startswith("..")]


def make_mount_points(volume: Path, points: list[str]) -> None:
    """Make folders in a volume, never through a link; raises OSError. Blocks."""
    if not points:
        return
    root = os.open(volume, _FOLDER)
    try:
        for point in points:
            _make(root, point.split("/"))
    finally:
        os.close(root)


def _in_container(container: Container, volume: str) -> list[str]:
    cleaned = [(mount.name, _clean(mount.mount_path)) for mount in container.volume_mounts]
    places = sorted({path for _, path in cleaned})
    points = []
    for outer in (path for name, path in cleaned if name == volume):
        if outer == ".." or outer.startswith("../"):
            raise KindError(f"invalid container mount point {outer}")
        inside: list[str] = []
        for place in places:
            if place.startswith(f"{outer}/") and not any(place.startswith(f"{known}/") for known in inside):
                inside.append(place)
        points += [place.removeprefix(f"{outer}/") for place in inside]
    return points


def _clean(path: str) -> str:
    clean = posixpath.normpath(path)
    return f"/{clean.lstrip('/')}" if clean.startswith("/") else clean


def _make(root: int, parts: list[str]) -> None:
    at = os.dup(root)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, _MODE, dir_fd=at)
            try:
                folder = os.open(part, _FOLDER, dir_fd=at)
            except OSError as err:
                if err.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                # A file of the volume is in the way, or its link. The runtime may find its way with that,
                # or tell the container's author; the volume itself is fine.
                return
            os.close(at)
            at = folder
    finally:
        os.close(at)
