"""Small file systems on loop devices, which can be filled to the last byte."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILLER = "filler"


@contextmanager
def loop_disk(tmp_path: Path, size_mb: int) -> Iterator[Path]:
    """Mount an ext4 file system of this size, without blocks that are reserved for root."""
    image, point = tmp_path / f"disk{size_mb}.img", tmp_path / f"disk{size_mb}"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", image], check=True)
    try:
        subprocess.run(["mount", "-o", "loop", image, point], check=True)
        try:
            yield point
        finally:
            # The loop device is removed with the last mount.
            subprocess.run(["umount", "--lazy", point], check=True)
    finally:
        image.unlink()
        point.rmdir()


def fill_disk(point: Path) -> None:
    """Use every block of a file system: large pieces first, then single bytes."""
    descriptor = os.open(point / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for piece in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, piece)
        with suppress(OSError):
            while True:
                os.write(descriptor, b"x" * 4096)
                os.fsync(descriptor)
    finally:
        os.close(descriptor)
    assert os.statvfs(point).f_bavail == 0


def free_disk(point: Path) -> None:
    """Delete what `fill_disk` has written."""
    (point / FILLER).unlink()
