"""Block devices of pods: `volumeMode: Block`, in the reference's places.

    plugins/<kind>/volumeDevices/<volume>/<uid>     the device itself, bound here
    pods/<uid>/volumeDevices/<kind>/<volume>        a link to the device, which the runtime is given

The bound device is kept open by a loop device on top of it, so that it cannot vanish and another one take
its name while the pod lives. A file becomes a device by a loop device of its own, which lives as long as
that one on top: so nothing is left behind, wherever the agent is killed. Everything here blocks.
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
    """Give the folder of a volume's bound devices, one per pod; `kind` is the name of the kind's folder."""
    return root / "plugins" / plain(kind) / DEVICES / plain(volume)


def map_device(root: Path, kind: str, uid: str, volume: str, source: Path, *, read_only: bool) -> str:
    """Have a block device, or a file as one, ready for a pod; gives the path for the runtime.

    `read_only` is for files: whether a device may be written is decided by what the container may do.
    Harmless to repeat. Raises OSError.
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
    """Undo `map_device`, as far as it came; raises OSError."""
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
        except OSError:  # it is gone already, or another pod uses it
            break


def mapped_devices(root: Path, uid: str) -> Iterator[tuple[str, str]]:
    """Give the devices that a pod has, each as its kind's folder and the volume's name.

    Bound ones count too, of which an agent that was killed has not made the link.
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
    """Have a loop device for a file, and keep it open; pods that share a file share its device."""
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
        # What it was then is another device now.
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
