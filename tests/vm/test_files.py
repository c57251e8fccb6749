"""What the virtual machine is made of, as far as it can be judged without booting it."""

import lzma
import struct
import subprocess
from pathlib import Path

import pytest

from tests.vm.initramfs import archive
from tests.vm.kernel import load_order, unpack_image
from tests.vm.machine import qemu_command, why_not


def test_archive_unpacks_with_cpio(tmp_path: Path) -> None:
    made = archive({"init": b"#!/bin/sh\n", "a/b/c": b"12345"}, ["proc"], executable=["init"])
    assert len(made) % 4 == 0
    subprocess.run(["busybox", "cpio", "-idm"], input=made, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a/b/c").read_bytes() == b"12345"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "proc").is_dir()


def test_load_order_dependencies_come_first() -> None:
    table = "k/top-one.ko: k/mid.ko k/low.ko\nk/low.ko:\nk/mid.ko: k/low.ko\nk/other.ko:\n"
    assert load_order(table, ("top_one",)) == ["k/low.ko", "k/mid.ko", "k/top-one.ko"]
    assert load_order(table, ("mid", "top_one", "mid")) == ["k/low.ko", "k/mid.ko", "k/top-one.ko"]
    with pytest.raises(KeyError):
        load_order(table, ("none",))


def test_unpack_image_returns_kernel() -> None:
    payload = lzma.compress(b"\x7fELF kernel", check=lzma.CHECK_CRC32) + struct.pack("<I", 11)
    image = bytearray(3 * 512)
    image[0x1F1] = 1
    struct.pack_into("<II", image, 0x248, 512, len(payload))
    assert unpack_image(bytes(image) + payload) == b"\x7fELF kernel"


def test_qemu_command_host_share_is_read_only() -> None:
    command = qemu_command(Path("/k"), Path("/i"), Path("/c"))
    (share,) = [part for part in command if part.startswith("local,")]
    assert "readonly=on" in share
    assert not [part for part in command if part in ("-drive", "-nic", "-netdev", "-virtfs")]


def test_why_not_checkout_below_tmp_returns_reason() -> None:
    assert "a /tmp of its own" in why_not(Path("/tmp/clone"))
    assert "of its own" not in why_not(Path("/tmpfiles/clone"))
