"""Disks: real ones, as far as a file behind a loop device is one."""

import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.loop_devices import attach_loop, detach_loop
from pykubelet.linux.mounts import unmount
from pykubelet.volumes.mounts.disks import (
    PARTITIONED,
    DiskError,
    FilesystemMismatch,
    disk_format,
    format_and_mount,
    parse_format,
)
from pykubelet.volumes.mounts.mount_helper import HelperError, is_mounted
from tests.support.volume_programs import stand_ins, wait_until_free
from tests.support.volumes import needs_root


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("DEVNAME=/dev/sda\nTYPE=ext4\n", "ext4"),
        ("DEVNAME=/dev/sda\nPTTYPE=gpt\n", PARTITIONED),
        ("DEVNAME=/dev/sda\nTYPE=vfat\nPTTYPE=dos\n", PARTITIONED),
        ("", ""),
    ],
)
def test_parse_format_blkid_output_returns_file_system(said: str, found: str) -> None:
    assert parse_format(said) == found


@pytest.mark.machine
@needs_root
class TestDisks:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        device, lock = attach_loop(image)
        os.close(lock)
        yield Path(device)
        detach_loop(device)

    @pytest.fixture
    def place(self, tmp_path: Path, disk: Path) -> Iterator[Path]:
        place = tmp_path / "mounts/place"
        yield place
        while unmount(place):
            pass

    async def test_format_and_mount_empty_disk_is_formatted(self, disk: Path, place: Path) -> None:
        assert await disk_format(disk) == ""
        await format_and_mount(disk, place, "", ["noatime"], read_only=False)
        assert await disk_format(disk) == "ext4"
        (place / "file").write_text("kept")
        await format_and_mount(disk, place, "", ["noatime"], read_only=False)
        unmount(place)
        wait_until_free(disk)
        await format_and_mount(disk, place, "ext4", ["ro"], read_only=True)
        assert (place / "file").read_text() == "kept"
        with pytest.raises(OSError, match="Read-only"):
            (place / "new").touch()

    async def test_format_and_mount_read_only_unformatted_raises(self, disk: Path, place: Path) -> None:
        with pytest.raises(DiskError, match=r"cannot mount unformatted disk .* read-only mode"):
            await format_and_mount(disk, place, "ext4", ["ro"], read_only=True)
        assert await disk_format(disk) == ""
        assert not place.exists()

    async def test_format_and_mount_partitioned_disk_is_not_formatted(self, disk: Path, place: Path) -> None:
        with disk.open("r+b") as file:
            file.seek(446)
            file.write(struct.pack("<B3sB3sII", 0x80, b"\0\2\0", 0x83, b"\4\1\4", 2048, 60000))
            file.seek(510)
            file.write(b"\x55\xaa")
        assert await disk_format(disk) == PARTITIONED
        with pytest.raises(HelperError, match=r"^mount failed: "):
            await format_and_mount(disk, place, "ext4", [], read_only=False)
        assert await disk_format(disk) == PARTITIONED
        assert not place.exists()

    async def test_format_and_mount_other_file_system_raises(self, disk: Path, place: Path) -> None:
        subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
        with pytest.raises(FilesystemMismatch, match=r"^mount failed: mount -t xfs -o defaults "):
            await format_and_mount(disk, place, "xfs", [], read_only=False)
        assert await disk_format(disk) == "ext4"

    async def test_format_and_mount_mkfs_missing_or_invalid_raises(self, disk: Path, place: Path) -> None:
        with pytest.raises(DiskError, match=r"format of disk .* failed: the program mkfs.nofs is not on"):
            await format_and_mount(disk, place, "nofs", [], read_only=False)
        with pytest.raises(DiskError, match="is no file system"):
            await format_and_mount(disk, place, "ext4/../../tmp/x", [], read_only=False)

    @pytest.mark.parametrize(("status", "mounted"), [(0, True), (1, True), (4, False), (8, True)])
    async def test_format_and_mount_runs_fsck_and_uncorrectable_errors_raise(
        self, disk: Path, place: Path, tmp_path: Path, status: int, mounted: bool
    ) -> None:
        subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
        with stand_ins(tmp_path / "bin") as programs:
            programs.add("fsck", f"sys.exit({status})")
            if mounted:
                await format_and_mount(disk, place, "ext4", [], read_only=False)
            else:
                with pytest.raises(DiskError, match=r"'fsck' found errors on device .* could not correct"):
                    await format_and_mount(disk, place, "ext4", [], read_only=False)
            assert programs.calls == [["fsck", "-a", str(disk)]]
        assert is_mounted(place) is mounted
