"""The machine's network interfaces with their addresses, in the kernel's order.

glibc's getifaddrs, which the standard library does not offer: it answers in one call what /proc
and /sys only hold in pieces, and in the order on which the choice of a node's address depends.
"""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

_UP, _LOOPBACK, _POINT_TO_POINT = 0x1, 0x8, 0x10


@dataclass(slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool = True
    loopback: bool = False
    point_to_point: bool = False
    addresses: list[IPv4Address | IPv6Address] = field(default_factory=list)


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def read_interfaces() -> list[Interface]:
    """List every interface, also those without an address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_IfAddrs)]
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the network interfaces cannot be listed: {os.strerror(number)}")
    found: dict[str, Interface] = {}
    try:
        entry = first
        while entry:
            raw = entry.contents
            # An address with a label of its own comes as "eth0:label".
            name, flags = os.fsdecode(raw.name).partition(":")[0], raw.flags
            interface = found.setdefault(
                name,
                Interface(name, bool(flags & _UP), bool(flags & _LOOPBACK), bool(flags & _POINT_TO_POINT)),
            )
            if raw.address and (address := _address(raw.address)) is not None:
                interface.addresses.append(address)
            entry = raw.next
    finally:
        libc.freeifaddrs(first)
    return list(found.values())


def _address(pointer: int) -> IPv4Address | IPv6Address | None:
    # struct sockaddr: the family in two bytes, the port in two; an IPv6 one has its flow in four more.
    family = ctypes.c_ushort.from_address(pointer).value
    if family == socket.AF_INET:
        return IPv4Address(ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return IPv6Address(ctypes.string_at(pointer + 8, 16))
    return None
