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
from pykubelet.volumes.paths import PodVolumePaths, entries, make_directory, path_component

DEVICES = "volumeDevices"


def global_map_path(root: Path, plugin_dir: str, volume: str) -> Path:
    """Return the directory of a volume's bind-mounted devices, one per pod.

    `plugin_dir` is the plugin's directory name.
    """
    return root / "plugins" / path_component(plugin_dir) / DEVICES / path_component(volume)


def map_device(root: Path, plugin_dir: str, uid: str, volume: str, source: Path, *, read_only: bool) -> str:
    """Make a block device, or a regular file as one, available to a pod; return the path for the runtime.

    `read_only` applies to files: whether a device is writable is decided by the container's permissions on
    it. Idempotent. Raises OSError.
    """
    source = Path(os.path.realpath(source, strict=True))
    mount_point = global_map_path(root.resolve(), plugin_dir, volume) / path_component(uid)
    link = PodVolumePaths.for_pod(root, uid).device(plugin_dir, volume)
    loop_fd = -1
    try:
        mode = source.stat().st_mode
        if stat.S_ISREG(mode):
            device, loop_fd = _file_device(source, read_only=read_only)
        elif stat.S_ISBLK(mode):
            device = str(source)
        else:
            raise OSError(errno.ENOTBLK, "neither a block device nor a file", str(source))
        _bind(Path(device), mount_point)
        if not loops_of(mount_point):
            _, lock = attach_loop(mount_point, read_only=read_only)
            os.close(lock)
    finally:
        if loop_fd >= 0:
            os.close(loop_fd)
    make_directory(link.parent)
    link.unlink(missing_ok=True)
    link.symlink_to(device)
    return str(link)


def unmap_device(root: Path, plugin_dir: str, uid: str, volume: str) -> None:
    """Undo `map_device`, also one that was interrupted. Raises OSError."""
    directory = global_map_path(root.resolve(), plugin_dir, volume)
    mount_point = directory / path_component(uid)
    for device in loops_of(mount_point):
        detach_loop(device)
    PodVolumePaths.for_pod(root, uid).device(plugin_dir, volume).unlink(missing_ok=True)
    while unmount(mount_point):
        continue
    mount_point.unlink(missing_ok=True)
    for empty in (directory, directory.parent):
        try:
            empty.rmdir()
        except OSError:  # already removed, or used by another pod
            break


def mapped_devices(root: Path, uid: str) -> Iterator[tuple[str, str]]:
    """Yield a pod's devices, each as the plugin's directory name and the volume's name.

    Includes bind-mounted devices without a symlink, which a killed kubelet process leaves.
    """
    found = set()
    for plugin_dir in entries(PodVolumePaths.for_pod(root, uid).pod / DEVICES):
        found |= {(plugin_dir.name, link.name) for link in entries(plugin_dir)}
    for plugin_dir in entries(root / "plugins"):
        for volume in entries(plugin_dir / DEVICES):
            if os.path.lexists(volume / uid):
                found.add((plugin_dir.name, volume.name))
    yield from sorted(found)


def _file_device(source: Path, *, read_only: bool) -> tuple[str, int]:
    """Return the loop device of a file and an open descriptor; pods that share a file share its device."""
    for device in loops_of(source):
        try:
            return device, os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return attach_loop(source, read_only=read_only, until_closed=True)


def _bind(device: Path, mount_point: Path) -> None:
    device_status = device.stat()
    make_directory(mount_point.parent)
    mounts = [entry for entry in read_mounts(mount_point.parent) if entry.point == mount_point]
    while mounts:
        if mount_point.lstat().st_rdev == device_status.st_rdev:
            return
        # The bind mount is that of another device: the source has changed.
        for loop in loops_of(mount_point):
            detach_loop(loop)
        unmount(mount_point)
        mounts.pop()
    mount_point.touch(mode=0o640)
    mount(str(device), mount_point, "", flags=MS_BIND)
