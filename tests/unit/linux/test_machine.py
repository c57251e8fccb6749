import os
from pathlib import Path

import pytest

from pykubelet.linux.host_info import (
    architecture,
    boot_id,
    first_text,
    parse_swap_total,
    pretty_name,
    read_machine,
)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n', "Debian GNU/Linux 12 (bookworm)"),
        ("PRETTY_NAME=Alpine\n", "Alpine"),
        ("NAME=x\n", "Linux"),
        ("", "Linux"),
    ],
)
def test_pretty_name_returns_os_name_or_linux(text: str, name: str) -> None:
    assert pretty_name(text) == name


def test_read_machine_fixture_ids_are_read(tmp_path: Path) -> None:
    write(tmp_path, "var/lib/dbus/machine-id", "abc\n")
    write(tmp_path, "usr/lib/os-release", 'PRETTY_NAME="Clear"\n')
    write(tmp_path, "proc/device-tree/vm,uuid", "u-u\0")
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nSwapTotal:      4 kB\n")
    write(tmp_path, "boot", "b\n")
    found = read_machine(boot_id_files="/none,/boot", root=tmp_path)
    assert (found.machine_id, found.system_uuid, found.boot_id) == ("abc", "u-u", "b")
    assert (found.os_image, found.swap_bytes) == ("Clear", 4096)
    write(tmp_path, "sys/class/dmi/id/product_uuid", "dmi\n")
    assert read_machine(root=tmp_path).system_uuid == "dmi"


def test_read_machine_empty_root_returns_defaults(tmp_path: Path) -> None:
    found = read_machine(root=tmp_path)
    assert (found.machine_id, found.boot_id, found.os_image, found.swap_bytes) == ("", "", "Unknown", 0)
    assert first_text("", tmp_path) == ""


def test_read_machine_on_host_matches_uname() -> None:
    found = read_machine()
    assert found.boot_id == boot_id()
    assert found.kernel == os.uname().release
    assert found.architecture
    assert found.os_image


@pytest.mark.parametrize(("kernel", "word"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("s390x", "s390x")])
def test_architecture_maps_kernel_to_go_names(kernel: str, word: str) -> None:
    assert architecture(kernel) == word


def test_parse_swap_total_returns_bytes() -> None:
    assert parse_swap_total("SwapCached: 1 kB\nSwapTotal:       2097148 kB\n") == 2097148 * 1024
    assert parse_swap_total("") == 0
