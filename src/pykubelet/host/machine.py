"""Which machine this is: its identities, its kernel, its operating system.

A node's status carries these, and the cluster's people tell machines and boots apart by them, so they
are found where the reference finds them. None of them changes while the agent runs.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

MACHINE_ID_FILES = "/etc/machine-id,/var/lib/dbus/machine-id"
BOOT_ID_FILES = "/proc/sys/kernel/random/boot_id"

# A machine without firmware tables is known by the id of its installation.
_SYSTEM_UUID_FILES = (
    "sys/class/dmi/id/product_uuid",
    "proc/device-tree/system-id",
    "proc/device-tree/vm,uuid",
    "etc/machine-id",
)
_OS_RELEASE_FILES = ("etc/os-release", "usr/lib/os-release")
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "i386": "386",
    "i686": "386",
    "armv6l": "arm",
    "armv7l": "arm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a node's status says of its machine; what could not be found is empty."""

    machine_id: str = ""
    system_uuid: str = ""
    boot_id: str = ""
    kernel: str = ""
    os_image: str = ""
    architecture: str = ""
    """In Kubernetes' words: amd64, arm64…"""
    swap_bytes: int = 0


def read_machine(
    machine_id_files: str = MACHINE_ID_FILES, boot_id_files: str = BOOT_ID_FILES, root: Path = Path("/")
) -> Machine:
    """Read this machine; the files are those of `--machine-id-file` and `--boot-id-file`."""
    return Machine(
        machine_id=first_text(machine_id_files, root),
        system_uuid=_system_uuid(root),
        boot_id=first_text(boot_id_files, root),
        kernel=os.uname().release,
        os_image=_os_image(root),
        architecture=architecture(),
        swap_bytes=parse_swap_total(_read(root / "proc/meminfo") or ""),
    )


def architecture(machine: str = "") -> str:
    """Give the architecture as Kubernetes calls it; `machine` is the kernel's word, else asked for."""
    machine = machine or platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def first_text(files: str, root: Path = Path("/")) -> str:
    """Give the text of the first file of a comma-separated list that can be read; empty without one."""
    found = (_read(root / file.lstrip("/")) for file in files.split(",") if file)
    return next((text.strip() for text in found if text is not None), "")


def pretty_name(os_release: str) -> str:
    """Find the operating system's name in the text of os-release; `Linux` when it is not there."""
    match = re.search(r"PRETTY_NAME=(.*)", os_release)
    return match[1].strip('"') if match else "Linux"


def parse_swap_total(meminfo: str) -> int:
    """Find the bytes of swap in the text of /proc/meminfo."""
    match = re.search(r"^SwapTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _system_uuid(root: Path) -> str:
    found = (_read(root / name) for name in _SYSTEM_UUID_FILES)
    return next((text.rstrip("\0").strip() for text in found if text is not None), "")


def _os_image(root: Path) -> str:
    for name in _OS_RELEASE_FILES:
        if (text := _read(root / name)) is not None:
            return pretty_name(text)
    return "Unknown"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
