"""Stand-ins: for the machine's programs, found through PATH, and for a server that is away."""

import ctypes
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.loop_devices import attached_loops
from pykubelet.linux.mounts import unmount
from pykubelet.volumes.plugin import FLEX_DRIVERS, MemoryLimits, VolumeHost, VolumeOptions, VolumeToMount
from tests.support.volumes import ALLOCATABLE, Node, Shelf

_RECORD = """#!{python} -S
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
MOUNT = """
import subprocess
*_, source, target = sys.argv[1:]
server, _, path = source.rpartition(":")
given = dict(zip(sys.argv[1:], sys.argv[2:]))
read_only = "ro" in given.get("-o", "").split(",")
real = "/usr/bin/mount" if os.path.exists("/usr/bin/mount") else "/bin/mount"
if given.get("-t") != "nfs":
    os.execv(real, sys.argv)
subprocess.run([real, "--bind", path, target], check=True)
if read_only:
    subprocess.run([real, "-o", "remount,bind,ro", target], check=True)
"""
"""A `mount` for NFS without a server: the export is a directory of this machine, bound."""


class StandIns:
    """A directory of programs at the head of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls"

    def add(self, name: str, script: str = "") -> None:
        """Put a program there; the script is Python, and begins after the call was recorded."""
        path = self.folder / name
        path.write_text(_RECORD.format(python=sys.executable, log=str(self.log)) + script)
        path.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        """How they were called, in order."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def path(self) -> str:
        """The PATH with them."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"


@contextmanager
def stand_ins(folder: Path) -> Iterator[StandIns]:
    """Have programs of the test's own found first."""
    folder.mkdir()
    made = StandIns(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", made.path)
        yield made


def surroundings(
    root: Path, shelf: Shelf, *, flex_drivers: Path = Path(FLEX_DRIVERS), **more: Any
) -> VolumeHost:
    """Return the dependencies of volume plugins on a standalone node."""
    return VolumeHost(
        root,
        shelf,
        Node(),
        MemoryLimits(lambda pod: None, ALLOCATABLE),
        options=VolumeOptions(node_name="n1", flex_drivers=flex_drivers),
        **more,
    )


def wanted(pod: Pod, **more: Any) -> VolumeToMount:
    """The first volume of a pod, as its spec has it."""
    volume = pod.spec.volumes[0]
    kind, source = volume.sources[0]
    return VolumeToMount(pod, volume, kind, source, more.pop("name", volume.name), **more)


def loops_left(folder: Path) -> list[str]:
    """The files below a directory that loop devices stay on.

    One that somebody else looks at just now is let go a moment later, as is one whose file system a
    container has got a copy of that is being started just now.
    """
    end = time.monotonic() + 30
    while found := [file for _, file in attached_loops() if Path(file).is_relative_to(folder)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return found


def wait_until_free(device: Path) -> None:
    """Wait until no file system is on a device: a container that is being started has copies of mounts."""
    end = time.monotonic() + 30
    while True:
        try:
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
            return
        except OSError as err:
            if err.errno != errno.EBUSY or time.monotonic() > end:
                raise
        time.sleep(0.05)


@contextmanager
def dead_server(point: Path) -> Iterator[None]:
    """A file system of which nobody answers: whoever looks at it hangs, until it is over."""
    point.mkdir()
    at = os.open("/dev/fuse", os.O_RDWR)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={at},rootmode=40000,user_id=0,group_id=0".encode()
        assert libc.mount(b"dead", os.fsencode(point), b"fuse", 0, options) == 0, ctypes.get_errno()
        yield
    finally:
        os.close(at)  # now the kernel answers that nobody does
        unmount(point, detach=True)
