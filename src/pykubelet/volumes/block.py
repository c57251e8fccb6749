"""Block devices of pods (`volumeMode: Block`), at upstream's paths.

    plugins/<plugin>/volumeDevices/<volume>/<uid>     bind mount of the device
    pods/<uid>/volumeDevices/<plugin>/<volume>        symlink to the device, passed to the runtime

A loop device on top of the bind mount keeps the device open, so that it cannot vanish and another device
reuse its name while the pod exists. A regular file becomes a device through a loop device of its own, which
lives as long as the one on top of it: nothing leaks, wherever the kubelet is killed. All functions block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pykubelet.linux.loop_devices import attach_loop, detach_loop, loops_of
from pykubelet.linux.mounts import MS_BIND, mount, read_mounts, unmount
from pykubelet.volumes.paths import VolumeFolders, make_folder, plain

DEVICES = "volumeDevices"


def global_folder(root: Path, kind: str, volume: str) -> Path:
    """Return the directory of a volume's bind-mounted devices, one per pod; `kind` is that of the plugin."""
    return root / "plugins" / plain(kind) / DEVICES / plain(volume)


def map_device(root: Path, kind: str, uid: str, volume: str, source: Path, *, read_only: bool) -> str:
    """Make a block device, or a regular file as one, available to a pod; return the path for the runtime.

    `read_only` applies to files: whether a device is writable is decided by the container's permissions on
    it. Idempotent. Raises OSError.
    """
    source = Path(os.path.realpath(source, strict=True))
    place = global_folder(root.resolve(), kind, volume) / plain(uid)
    link = VolumeFolders.of(root, uid).device(kind, volume)
    made = -1
    try:
        mode = source.stat().st_mode
        if stat.S_ISREG(mode):
            device, made = _file_device(source, read_only=read_only)
        elif stat.S_ISBLK(mode):
            device = str(source)
        else:
            raise OSError(errno.ENOTBLK, "neither a block device nor a file", str(source))
        _bind(Path(device), place)
        if not loops_of(place):
            _, lock = attach_loop(place, read_only=read_only)
            os.close(lock)
    finally:
        if made >= 0:
            os.close(made)
    make_folder(link.parent)
    link.unlink(missing_ok=True)
    link.symlink_to(device)
    return str(link)


def unmap_device(root: Path, kind: str, uid: str, volume: str) -> None:
    """Undo `map_device`, also one that was interrupted. Raises OSError."""
    folder = global_folder(root.resolve(), kind, volume)
    place = folder / plain(uid)
    for device in loops_of(place):
        detach_loop(device)
    VolumeFolders.of(root, uid).device(kind, volume).unlink(missing_ok=True)
    while unmount(place):
        continue
    place.unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        try:
            empty.rmdir()
        except OSError:  # already removed, or used by another pod
            break


def mapped_devices(root: Path, uid: str) -> Iterator[tuple[str, str]]:
    """Yield a pod's devices, each as the plugin's directory name and the volume's name.

    Includes bind-mounted devices without a symlink, which a killed kubelet process leaves.
    """
    found = set()
    for kind in _entries(VolumeFolders.of(root, uid).pod / DEVICES):
        found |= {(kind.name, link.name) for link in _entries(kind)}
    for kind in _entries(root / "plugins"):
        for volume in _entries(kind / DEVICES):
            if os.path.lexists(volume / uid):
                found.add((kind.name, volume.name))
    yield from sorted(found)


def _file_device(source: Path, *, read_only: bool) -> tuple[str, int]:
    """Return the loop device of a file and an open descriptor; pods that share a file share its device."""
    for device in loops_of(source):
        try:
            return device, os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return attach_loop(source, read_only=read_only, until_closed=True)


def _bind(device: Path, place: Path) -> None:
    given = device.stat()
    make_folder(place.parent)
    mounts = [entry for entry in read_mounts(place.parent) if entry.point == place]
    while mounts:
        if place.lstat().st_rdev == given.st_rdev:
            return
        # The bind mount is that of another device: the source has changed.
        for loop in loops_of(place):
            detach_loop(loop)
        unmount(place)
        mounts.pop()
    place.touch(mode=0o640)
    mount(str(device), place, "", flags=MS_BIND)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
