"""Small file systems in files (ext4 on loop devices), and a private runtime on one of them.

For tests of full disks: what they fill is small, and the host's own disks stay as they are.
"""

import glob
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pykubelet.linux.mounts import read_mounts
from pykubelet.standalone.data_dir import load_state
from pykubelet.standalone.instance import NAMESPACE, Instance
from pykubelet.standalone.requirements import inspect_host
from pykubelet.standalone.seed_images import (
    Entry,
    ImageConfig,
    busybox_entries,
    image_archive,
    machine_platform,
    read_static,
)
from tests.support.data_dir import take_down
from tests.support.runtime import RunningRuntime, runtime_process, why_no_machine

MIB = 1024 * 1024
_UNMOUNT_SECONDS = 20.0


@contextmanager
def small_disk(size: int, *, inodes: int | None = None) -> Iterator[Path]:
    """Mount a new ext4 file system of `size` bytes, all of which root and others may use.

    Yields its mount point, whose path is short enough for sockets below it. The loop device is detached with
    the mount.
    """
    if reason := why_no_machine():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        image, point = Path(parent) / "disk.img", Path(parent) / "m"
        with image.open("wb") as file:
            file.truncate(size)
        options = ["-N", str(inodes)] if inodes is not None else []
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", *options, str(image)], check=True)
        point.mkdir()
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
        try:
            yield point
        finally:
            _unmount(point)


def _unmount(point: Path) -> None:
    """Unmount a file system, whose last user may still be about to end."""
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while True:
        done = subprocess.run(["umount", str(point)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            users = _users(point)
            subprocess.run(["umount", "--lazy", str(point)], check=False)
            pytest.fail(f"{point} is still in use by {users}: {done.stderr}")
        time.sleep(0.2)


def _users(point: Path) -> list[str]:
    """Return the open files of processes on a file system, and the mounts on it."""
    found = [f"mount {mount.point}" for mount in read_mounts(point)]
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cwd"):  # noqa: PTH207
        with suppress(OSError):
            if (target := Path(path).readlink()).is_relative_to(point):
                name = Path(path.split("/fd/")[0].removesuffix("/cwd"), "comm").read_text().strip()
                found.append(f"{name} {path} {target}")
    return found


@contextmanager
def runtime_on_small_disk(size: int, *, inodes: int | None = None) -> Iterator[RunningRuntime]:
    """Run a private runtime whose data directory, kubelet root and logs included, is on a small disk.

    A kubelet with its files elsewhere has another `root` (`tests.support.node.kubelet_node`), such as one on
    a second `small_disk`.
    """
    with small_disk(size, inodes=inodes) as disk:
        path = disk / "d"
        try:
            with runtime_process(path) as runtime:
                yield runtime
        finally:
            if (path / ".pykubelet").exists():
                take_down(path)


def free_percent(path: Path) -> float:
    """Return the available share of a file system in percent."""
    sizes = os.statvfs(path)
    return sizes.f_bavail * 100 / sizes.f_blocks


def import_image(instance: Instance, name: str, size: int = 0, *, with_shell: bool = False) -> None:
    """Import an image with a file of `size` random bytes, which no other image has."""
    entries = [Entry("content", data=os.urandom(max(size, 16)))]
    applets: Sequence[str] = ("sh", "sleep", "true", "cat")
    if with_shell:
        entries += busybox_entries(read_static(inspect_host().programs["busybox"]), applets)
    archive = image_archive(
        name, entries, ImageConfig(env={"PATH": "/bin"}), machine_platform(os.uname().machine)
    )
    state = load_state(instance)
    assert state is not None
    command = [
        *("ctr", f"--address={instance.socket}", f"--namespace={NAMESPACE}"),
        *("images", "import", f"--snapshotter={state.snapshotter}", "-"),
    ]
    subprocess.run(command, input=archive, check=True, capture_output=True, timeout=120)
