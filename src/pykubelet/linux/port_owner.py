"""Owner of a listening TCP port, for errors such as "address already in use".

The socket is found in /proc/net/tcp and tcp6. Its process is found by scanning the open files of every
process, which is complete only for root: the port's use is certain, the owner's name is best effort.
"""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket of /proc/net/tcp or tcp6."""

    address: IPv4Address | IPv6Address
    port: int
    inode: int


@dataclass(frozen=True, slots=True)
class PortOwner:
    """The process that listens on a port; `pid` is 0 if it is not visible."""

    port: int
    address: str
    pid: int = 0
    command: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.pid else "another process"


def find_port_owner(port: int, proc: Path = Path("/proc")) -> PortOwner | None:
    """Return the process that listens on a TCP port of this host, on any address; None if there is none."""
    for listener in _listeners(proc):
        if listener.port == port:
            pid = _owner(listener.inode, proc)
            command = _command(pid, proc) if pid else ""
            return PortOwner(port, str(listener.address), pid, command)
    return None


def parse_listeners(text: str) -> list[Listener]:
    """Parse the listening sockets in the text of /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:
            address, _, port = fields[1].rpartition(":")
            found.append(Listener(_address(address), int(port, 16), int(fields[9])))
    return found


def _address(text: str) -> IPv4Address | IPv6Address:
    # The kernel prints each 32-bit word of the address in the host's byte order.
    raw = bytes.fromhex(text)
    words = [int.from_bytes(raw[at : at + 4]) for at in range(0, len(raw), 4)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def _listeners(proc: Path) -> list[Listener]:
    found = []
    for name in ("tcp", "tcp6"):
        try:
            found += parse_listeners((proc / "net" / name).read_text())
        except OSError:
            continue  # a host without IPv6 has no tcp6
    return found


def _owner(inode: int, proc: Path) -> int:
    for directory in proc.iterdir():
        if directory.name.isdecimal() and inode in _sockets(directory / "fd"):
            return int(directory.name)
    return 0


def _sockets(directory: Path) -> set[int]:
    found: set[int] = set()
    try:
        for entry in directory.iterdir():
            with suppress(FileNotFoundError):  # closed concurrently
                if match := _SOCKET.match(str(entry.readlink())):
                    found.add(int(match[1]))
    except OSError:
        pass  # the process ended, or permission is missing
    return found


def _command(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "ended meanwhile"
