"""Which machine this is: its identities, its kernel, its operating system.

A node's status carries these, and the cluster's people tell machines and boots apart by them, so they
are found where the reference finds them. None of them changes while the agent runs.

The machine's clock: is it right, and since when does the machine run.

Certificates, leases and tokens all fail in odd ways on a wrong clock, so it is worth asking. The
boot id tells a reboot from a restart of the agent.
"""

from __future__ import annotations

import ctypes
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


_UNSYNCHRONISED = 0x40
_CLOCK_ERROR = 5


class _Timex(ctypes.Structure):
    # The beginning of struct timex; the kernel fills the rest, which nobody reads, into the padding.
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


@dataclass(frozen=True, slots=True)
class ClockState:
    """What the kernel knows of its clock's quality."""

    synchronised: bool
    max_error_seconds: float


def clock_state() -> ClockState:
    """Ask the kernel whether someone (chrony, systemd-timesyncd, ntpd) keeps its clock right.

    Raises OSError where the question is forbidden, as in some containers.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()  # modes 0: read only
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the clock's state cannot be read: {os.strerror(number)}")
    return decide_clock_state(state, timex.status, timex.maxerror)


def decide_clock_state(state: int, status: int, max_error_micros: int) -> ClockState:
    """Judge what adjtimex(2) answers."""
    return ClockState(state != _CLOCK_ERROR and not status & _UNSYNCHRONISED, max_error_micros / 1_000_000)


def boot_id(proc: Path = Path("/proc")) -> str:
    """Give the id of this boot, which changes at every one."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def boot_time(proc: Path = Path("/proc")) -> float:
    """Give the moment of the boot, in seconds since 1970."""
    return parse_boot_time((proc / "stat").read_text())


def parse_boot_time(stat: str) -> float:
    """Find the boot time in the text of /proc/stat.

    Raises ValueError when it is not there.
    """
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == "btime":
            return float(value)
    raise ValueError("/proc/stat has no btime line")
