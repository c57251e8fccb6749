"""The machine's clock: is it right, and since when does the machine run.

Certificates, leases and tokens all fail in odd ways on a wrong clock, so it is worth asking. The
boot id tells a reboot from a restart of the agent.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

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
