"""What the virtual machine is made of, as far as it can be judged without booting it."""

import lzma
import struct
import subprocess
from pathlib import Path

import pytest

from tests.vm.initramfs import archive
from tests.vm.kernel import load_order, unpack_image
from tests.vm.machine import Equipment, Link, guest_script, qemu_command, why_not


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


@pytest.mark.parametrize(("listens", "server"), [(True, "server=on"), (False, "server=off")])
def test_qemu_command_link_carries_frames_over_a_socket(listens: bool, server: str) -> None:
    link = Link(Path("/a,b/link"), listens, "10.99.0.17")
    command = qemu_command(Path("/k"), Path("/i"), Path("/c"), equipment=Equipment(link=link))
    (net,) = [part for part in command if part.startswith("stream,")]
    assert f"{server},addr.type=unix,addr.path=/a,,b/link" in net
    assert "virtio-net-pci,netdev=link,mac=52:54:0a:63:00:11" in command


def test_guest_script_link_replaces_network_that_leads_nowhere() -> None:
    alone = guest_script(["true"], Equipment())
    linked = guest_script(["true"], Equipment(link=Link(Path("/l"), True, "10.99.0.17")))
    assert "veth" in alone
    assert "eth0" not in alone
    assert "10.99.0.17/24 dev eth0" in linked
    assert "veth" not in linked


def test_why_not_checkout_below_tmp_returns_reason() -> None:
    assert "a /tmp of its own" in why_not(Path("/tmp/clone"))
    assert "of its own" not in why_not(Path("/tmpfiles/clone"))
