"""Small file systems in files (ext4 on loop devices), fillers of them, and a private runtime on one of them.

For tests of full disks: what they fill is small, and the host's own disks stay as they are. A filler is a
file (or many empty ones) outside of every pod: it sets what is available without changing the usage of a pod.
"""

import glob
import os
import shutil
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
    pause_archive,
    read_static,
)
from tests.support.data_dir import take_down
from tests.support.runtime import RunningRuntime, runtime_process, why_no_machine

MIB = 1024 * 1024
FILLER = "filler"
_EMPTY_FILES = "filler.d"
_BLOCK = 4096
_UNMOUNT_SECONDS = 20.0


@contextmanager
def small_disk(size: int, *, inodes: int | None = None) -> Iterator[Path]:
    """Mount a new ext4 file system of `size` bytes, all of which root and others may use.

    Yields its mount point, which is empty, and whose path is short enough for sockets below it. The loop
    device is detached with the mount.
    """
    if reason := why_no_machine():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        image, point = Path(parent) / "disk.img", Path(parent) / "m"
        with image.open("wb") as file:
            file.truncate(size)
        options = ["-N", str(inodes)] if inodes is not None else []
        command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", str(_BLOCK), *options, str(image)]
        subprocess.run(command, check=True)
        point.mkdir()
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
        try:
            (point / "lost+found").rmdir()
            yield point
        finally:
            _unmount(point)


def _unmount(point: Path) -> None:
    """Unmount a file system, whose last user may still be about to end."""
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while True:
        command = ["umount", "--recursive", str(point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            users = _users(point)
            subprocess.run(["umount", "--lazy", str(point)], check=False)
            pytest.fail(f"{point} is still in use by {users}: {done.stderr}")
        time.sleep(0.2)


def fill_disk(point: Path) -> None:
    """Use every block of a file system: large pieces first, then single blocks."""
    descriptor = os.open(point / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for piece in (MIB, _BLOCK):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, piece)
        with suppress(OSError):
            while True:
                os.write(descriptor, b"x" * _BLOCK)
                os.fsync(descriptor)
    finally:
        os.close(descriptor)
    assert os.statvfs(point).f_bavail == 0


def leave_available(point: Path, amount: int) -> None:
    """Resize the filler so that `amount` bytes are available, up to a few blocks."""
    os.sync()  # blocks that are still to be allocated
    descriptor = os.open(point / FILLER, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        wanted = size + available_bytes(point) - amount
        assert wanted >= 0, f"{point} has only {available_bytes(point) + size} bytes for an empty filler"
        if wanted > size:
            os.posix_fallocate(descriptor, size, wanted - size)
        else:
            os.truncate(descriptor, wanted)
    finally:
        os.close(descriptor)


def leave_inodes(point: Path, amount: int) -> None:
    """Create empty files until `amount` inodes are free."""
    directory = point / _EMPTY_FILES
    directory.mkdir(exist_ok=True)
    for _ in range(os.statvfs(point).f_favail - amount):
        (directory / os.urandom(8).hex()).touch()


def free_disk(point: Path) -> None:
    """Delete the fillers."""
    (point / FILLER).unlink(missing_ok=True)
    shutil.rmtree(point / _EMPTY_FILES, ignore_errors=True)


def available_bytes(point: Path) -> int:
    """Return the available bytes of a file system."""
    sizes = os.statvfs(point)
    return sizes.f_bavail * sizes.f_frsize


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
    _import(instance, archive)


def import_pause_image(instance: Instance) -> None:
    """Import the image of sandboxes again, which the upstream kubelet removes when images are unpinned."""
    program = read_static(inspect_host().programs["catatonit"])
    _import(instance, pause_archive(program, machine_platform(os.uname().machine)))


def _import(instance: Instance, archive: bytes) -> None:
    state = load_state(instance)
    assert state is not None
    command = [
        *("ctr", f"--address={instance.socket}", f"--namespace={NAMESPACE}"),
        *("images", "import", f"--snapshotter={state.snapshotter}", "-"),
    ]
    subprocess.run(command, input=archive, check=True, capture_output=True, timeout=120)
