"""Identity of the host (machine id, boot id, kernel, OS image), its clock and its boot time.

These values go into the node status, where users and controllers identify hosts and reboots by them, so they
are read from the same files as upstream. None of them changes while the kubelet runs.

The clock is checked because certificates, leases and tokens fail in confusing ways on a wrong clock. The boot
id distinguishes a reboot from a kubelet restart.
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

# A host without firmware tables is identified by its machine id.
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
    """Host information of the node status; values that could not be read are empty."""

    machine_id: str = ""
    system_uuid: str = ""
    boot_id: str = ""
    kernel: str = ""
    os_image: str = ""
    architecture: str = ""
    """Kubernetes' (Go's) name: amd64, arm64, …."""
    swap_bytes: int = 0


def read_machine(
    machine_id_files: str = MACHINE_ID_FILES, boot_id_files: str = BOOT_ID_FILES, root: Path = Path("/")
) -> Machine:
    """Read the host information; the files are those of `--machine-id-file` and `--boot-id-file`."""
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
    """Return Kubernetes' name of an architecture; `machine` is as in uname(2), this host's if empty."""
    machine = machine or platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def first_text(files: str, root: Path = Path("/")) -> str:
    """Return the text of the first readable file of a comma-separated list; empty if none is readable."""
    found = (_read(root / file.lstrip("/")) for file in files.split(",") if file)
    return next((text.strip() for text in found if text is not None), "")


def pretty_name(os_release: str) -> str:
    """Return PRETTY_NAME of the text of os-release; `Linux` if it is missing."""
    match = re.search(r"PRETTY_NAME=(.*)", os_release)
    return match[1].strip('"') if match else "Linux"


def parse_swap_total(meminfo: str) -> int:
    """Return the bytes of swap in the text of /proc/meminfo."""
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
    # The first fields of struct timex; the kernel writes the others, which are unused, into the padding.
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
    """Quality of the system clock as the kernel reports it."""

    synchronised: bool
    max_error_seconds: float


def clock_state() -> ClockState:
    """Return whether the clock is synchronised (by chrony, systemd-timesyncd, ntpd) according to the kernel.

    Raises OSError where adjtimex(2) is forbidden, as in some containers.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()  # modes 0: read only
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the clock's state cannot be read: {os.strerror(number)}")
    return decide_clock_state(state, timex.status, timex.maxerror)


def decide_clock_state(state: int, status: int, max_error_micros: int) -> ClockState:
    """Return the clock state for the result of adjtimex(2)."""
    return ClockState(state != _CLOCK_ERROR and not status & _UNSYNCHRONISED, max_error_micros / 1_000_000)


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return the id of the current boot, which changes at every reboot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def boot_time(proc: Path = Path("/proc")) -> float:
    """Return the boot time in seconds since the epoch."""
    return parse_boot_time((proc / "stat").read_text())


def parse_boot_time(stat: str) -> float:
    """Return the boot time in the text of /proc/stat, in seconds since the epoch.

    Raises ValueError if there is no `btime` line.
    """
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == "btime":
            return float(value)
    raise ValueError("/proc/stat has no btime line")
