"""Loop devices, by ioctl.

This module keeps no state: a device is found by its backing file (`/sys/block/loop*/loop/backing_file`).
Attaching may be interrupted at any point: a device with `until_closed` is detached by the kernel when its
last descriptor is closed, and others are found by their backing file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_CONTROL = "/dev/loop-control"
_SYS = Path("/sys/block")
_GET_FREE = 0x4C82
_CLEAR_FD = 0x4C01
_CONFIGURE = 0x4C0A
_READ_ONLY = 1
_AUTO_CLEAR = 4
_TRIES = 16


def attach_loop(path: Path, *, read_only: bool = False, until_closed: bool = False) -> tuple[str, int]:
    """Attach a file (or another block device) to a loop device; return its path and an open descriptor.

    The caller closes the descriptor. With `until_closed` the kernel detaches the device when the last
    descriptor is closed. Raises OSError.
    """
    access_mode = os.O_RDONLY if read_only else os.O_RDWR
    flags = (_READ_ONLY if read_only else 0) | (_AUTO_CLEAR if until_closed else 0)
    source = os.open(path, access_mode | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            name = f"/dev/loop{_free()}"
            fd = os.open(name, access_mode | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _CONFIGURE, _settings(source, path, flags))
            except OSError as err:
                os.close(fd)
                if err.errno != errno.EBUSY:  # another process has attached it first
                    raise
            else:
                return name, fd
        raise OSError(errno.EBUSY, "no loop device is free", str(path))
    finally:
        os.close(source)


def detach_loop(device: str) -> None:
    """Detach a loop device; while it is open elsewhere, the last close detaches it. Raises OSError."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.ioctl(fd, _CLEAR_FD)
    except OSError as err:
        if err.errno != errno.ENXIO:  # not attached
            raise
    finally:
        os.close(fd)


def loops_of(path: Path) -> list[str]:
    """Return the loop devices with this backing file."""
    paths = {str(path), os.path.realpath(path)}
    return [device for device, file in attached_loops() if file in paths]


def attached_loops() -> list[tuple[str, str]]:
    """Return all attached loop devices, each with its backing file."""
    found = []
    for entry in _SYS.glob("loop*"):
        try:
            text = (entry / "loop/backing_file").read_text(errors="surrogateescape")
        except OSError:  # not attached, or detached concurrently
            continue
        found.append((f"/dev/{entry.name}", text.rstrip("\n").removesuffix(" (deleted)")))
    return found


def _free() -> int:
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _GET_FREE)
    finally:
        os.close(control)


def _settings(source: int, path: Path, flags: int) -> bytes:
    """Return the `struct loop_config` for LOOP_CONFIGURE, which sets file, flags and name atomically."""
    name = os.fsencode(path)[:63]
    info = struct.pack("<5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
    return struct.pack("<2I", source, 0) + info + bytes(64)
