"""Node IP, node name, and the interfaces, links and routes of the host.

The address selection is pure and follows upstream, since other nodes connect to the result: an address of the
interface of a default route, IPv4 before IPv6 unless a family is requested (`--node-ip=::`); an address of
the loopback interface if only that has a global one (BGP to the host); if the kernel exposes no routes, an
address of any interface.

Interfaces are read with glibc's getifaddrs, which the standard library lacks: one call returns what /proc and
/sys only have in pieces, and in the kernel's order, on which the selection depends.

The node name is `--hostname-override` or the host name, as in upstream. A name that the API server would
reject is rejected here, where the error still reaches the operator.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from pykubelet.linux import HostError
from pykubelet.linux.processes import CommandError, run

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
    """Return all interfaces, including those without an address. Raises OSError."""
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
            # An address with a label is listed as "eth0:label".
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
    # struct sockaddr: two bytes of family and two of port; sockaddr_in6 has four bytes of flow info after.
    family = ctypes.c_ushort.from_address(pointer).value
    if family == socket.AF_INET:
        return IPv4Address(ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return IPv6Address(ctypes.string_at(pointer + 8, 16))
    return None


IPAddress = IPv4Address | IPv6Address
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+){3}")
_BROADCAST = IPv4Address("255.255.255.255")


class NodeIPError(HostError):
    """Raised when the requested node IP is not usable, or none can be found."""


@dataclass(frozen=True, slots=True)
class NodeIPs:
    """Value of `--node-ip`: nothing, one address, or a dual-stack pair."""

    addresses: tuple[IPAddress, ...] = ()
    ignored: tuple[str, ...] = ()
    """Parts that are not addresses; they are ignored with a warning, as in upstream."""


@dataclass(frozen=True, slots=True)
class DefaultRoute:
    """A default route through an interface; `version` is 4 or 6."""

    interface: str
    version: int


def parse_node_ip(text: str) -> NodeIPs:
    """Parse `--node-ip`: "", one address, or an IPv4 and an IPv6 address separated by a comma.

    `0.0.0.0` or `::` alone requests the default address of that family. Parts that are not addresses are
    ignored. Raises NodeIPError if no valid part is left, or the combination is not valid.
    """
    addresses: list[IPAddress] = []
    ignored: list[str] = []
    for part in text.split(",") if text else []:
        address = parse_address(part.strip())
        if address is None:
            ignored.append(part.strip())
        else:
            addresses.append(address)
    if problem := _node_ip_problem(addresses, ignored):
        raise NodeIPError(f"bad --node-ip {text!r}: {problem}")
    return NodeIPs(tuple(addresses), tuple(ignored))


def parse_address(text: str) -> IPAddress | None:
    """Parse an IP address as Kubernetes does; None if it is not valid.

    Leading zeros are decimal, an IPv4-mapped IPv6 address is IPv4, and a zone is not allowed.
    """
    if _DOTTED.fullmatch(text):
        text = ".".join(part.lstrip("0") or "0" for part in text.split("."))
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return None
        return address.ipv4_mapped or address
    return address


def node_ip_problem(address: IPAddress, interfaces: list[Interface]) -> str | None:
    """Return the reason why an address cannot be the node IP, or None."""
    if address.is_loopback:
        return f"node IP {address} is a loopback address: give one that other nodes can reach"
    if address.is_multicast:
        return f"node IP {address} is a multicast address: give one of an interface of this machine"
    if address.is_link_local:
        return f"node IP {address} is a link-local address: give one that is routed"
    if address.is_unspecified:
        return f"node IP {address} is the all-zeros address: give one of an interface of this machine"
    local_addresses = [local for interface in interfaces for local in interface.addresses]
    if address not in local_addresses:
        listed = ", ".join(str(local) for local in local_addresses if is_global_unicast(local)) or "none"
        return f"node IP {address} is not on an interface of this machine: it has {listed}"
    return None


def choose_host_address(
    interfaces: list[Interface], routes: list[DefaultRoute] | None, prefer: int = 4
) -> IPAddress:
    """Return the address to use as the host's; `prefer` is the IP version to try first.

    `routes` is None if the kernel exposes no routes at all. Raises NodeIPError if no address is found.
    """
    versions = (4, 6) if prefer == 4 else (6, 4)
    if routes is None:
        return _choose_by_interface(interfaces, versions)
    if not routes:
        raise NodeIPError(
            "no default route in /proc/net/route or /proc/net/ipv6_route: add one, or give --node-ip"
        )
    by_name = {interface.name: interface for interface in interfaces}
    loopbacks = [interface for interface in interfaces if interface.loopback]
    for version in versions:
        for route in routes:
            if route.version != version:
                continue
            first = by_name.get(route.interface)
            for interface in ([first] if first else []) + loopbacks:
                if (found := _global_address(interface, version)) is not None:
                    return found
    names = ", ".join(sorted({route.interface for route in routes}))
    raise NodeIPError(f"no usable address on the interface of a default route ({names}): give --node-ip")


def is_global_unicast(address: IPAddress) -> bool:
    """Return whether an address is reachable from other hosts; private networks count."""
    is_special = (
        address.is_unspecified or address.is_loopback or address.is_multicast or address.is_link_local
    )
    return not is_special and address != _BROADCAST


def host_address(prefer: int = 4, proc: Path = Path("/proc")) -> IPAddress:
    """Return the address to use as this host's.

    Raises NodeIPError if it has no global unicast address.
    """
    return choose_host_address(read_interfaces(), read_default_routes(proc), prefer)


def check_node_ips(ips: NodeIPs) -> None:
    """Check that the requested addresses are on this host; unspecified ones are skipped.

    Raises NodeIPError.
    """
    specified_ips = [address for address in ips.addresses if not address.is_unspecified]
    interfaces = read_interfaces() if specified_ips else []
    for address in specified_ips:
        if problem := node_ip_problem(address, interfaces):
            raise NodeIPError(problem)


def read_default_routes(proc: Path = Path("/proc")) -> list[DefaultRoute] | None:
    """Return the kernel's default routes, IPv4 first; None if it exposes no routes.

    A missing IPv6 table (a host without IPv6) is not an error.
    """
    try:
        routes = parse_ipv4_routes((proc / "net/route").read_text())
    except FileNotFoundError:
        return None
    try:
        return routes + parse_ipv6_routes((proc / "net/ipv6_route").read_text())
    except OSError:
        return routes


def parse_ipv4_routes(text: str) -> list[DefaultRoute]:
    """Parse the default routes in the text of /proc/net/route (name, destination, gateway, ...)."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return [DefaultRoute(row[0], 4) for row in rows if len(row) > 2 and int(row[1], 16) == 0]


def parse_ipv6_routes(text: str) -> list[DefaultRoute]:
    """Parse the default routes in /proc/net/ipv6_route; routes without a gateway are the kernel's own."""
    rows = [line.split() for line in text.splitlines()]
    return [
        DefaultRoute(row[9], 6)
        for row in rows
        if len(row) > 9 and int(row[0], 16) == 0 and int(row[4], 16) != 0
    ]


def _node_ip_problem(addresses: list[IPAddress], ignored: list[str]) -> str | None:
    if ignored and not addresses:
        return "this is not an IP address: give one, such as 192.0.2.10, or an IPv4,IPv6 pair"
    if len(addresses) > 2 or len({address.version for address in addresses}) != len(addresses):
        return "must contain either a single IP or a dual-stack pair of IPs, such as 192.0.2.10,2001:db8::10"
    if len(addresses) == 2 and any(address.is_unspecified for address in addresses):
        return (
            "dual-stack node IP cannot include '0.0.0.0' or '::': give both addresses, or one of these alone"
        )
    return None


def _choose_by_interface(interfaces: list[Interface], versions: tuple[int, int]) -> IPAddress:
    for version in versions:
        for interface in interfaces:
            if interface.loopback or interface.point_to_point:
                continue
            if (found := _global_address(interface, version)) is not None:
                return found
    raise NodeIPError("no interface of this machine has a global address: give it one, or give --node-ip")


def _global_address(interface: Interface, version: int) -> IPAddress | None:
    if not interface.up:
        return None
    for address in interface.addresses:
        if address.version == version and is_global_unicast(address):
            return address
    return None


_NET = Path("/sys/class/net")


def link_exists(name: str) -> bool:
    """Return whether a network link with this name exists."""
    return (_NET / name).exists()


def bridge_ports(bridge: str) -> list[str]:
    """Return the links that are attached to a bridge; empty if the bridge does not exist."""
    ports = _NET / bridge / "brif"
    return sorted(entry.name for entry in ports.iterdir()) if ports.is_dir() else []


async def delete_link(name: str) -> bool:
    """Delete a link; return whether it existed. Raises CommandError if it cannot be deleted."""
    try:
        await run("ip", "link", "delete", "dev", name)
    except CommandError:
        # The kernel deletes a veth with its peer's network namespace, asynchronously.
        if link_exists(name):
            raise
        return False
    return True


async def used_networks(*, except_link: str = "") -> list[IPv4Network]:
    """Return every IPv4 network that this host has an address in or a route to.

    The default route is omitted, since it overlaps every network, and so is what belongs to `except_link`.
    """
    routes = json.loads(await run("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    addresses = json.loads(await run("ip", "-json", "-4", "address", "show") or "[]")
    return parse_networks(routes, addresses, except_link=except_link)


def parse_networks(
    routes: list[dict[str, Any]], addresses: list[dict[str, Any]], *, except_link: str = ""
) -> list[IPv4Network]:
    """Parse the networks in the output of `ip -json route` and `ip -json address`."""
    texts = [
        route["dst"]
        for route in routes
        if route.get("dst", "default") != "default" and route.get("dev") != except_link
    ]
    for link in addresses:
        if link.get("ifname") == except_link:
            continue
        texts += [
            f"{info['local']}/{info['prefixlen']}" for info in link.get("addr_info", []) if "local" in info
        ]
    networks = {IPv4Network(text, strict=False) for text in texts}
    return sorted(network for network in networks if network.prefixlen)


async def uplink_mtu() -> int | None:
    """Return the MTU of the link of the default route, in bytes; None without a default route."""
    routes = json.loads(await run("ip", "-json", "-4", "route", "show", "default") or "[]")
    for route in routes:
        mtu = _NET / str(route.get("dev", "")) / "mtu"
        if route.get("dev") and mtu.is_file():
            return int(mtu.read_text())
    return None


_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST = 253


class HostnameError(HostError):
    """Raised when the host name or the override is not a valid node name."""


def node_name(override: str = "") -> str:
    """Return this node's name; `override` is `--hostname-override`.

    Raises HostnameError if it is empty or not a DNS subdomain.
    """
    if override:
        return decide_node_name(override, "--hostname-override")
    try:
        name = socket.gethostname()
    except OSError as err:
        raise HostnameError(
            f"the host name cannot be read ({err.strerror}): give --hostname-override"
        ) from err
    return decide_node_name(name, "the machine's host name")


def decide_node_name(name: str, source: str) -> str:
    """Return the node name for a host name; `source` names its origin in errors. Raises HostnameError."""
    node = name.strip().lower()
    if not node:
        raise HostnameError(f"{source} is empty, and a node needs a name: give one with --hostname-override")
    if len(node) > _LONGEST:
        raise HostnameError(
            f"{source} has {len(node)} characters, and a node's name at most {_LONGEST}: "
            "give a shorter one with --hostname-override"
        )
    if not _SUBDOMAIN.fullmatch(node):
        raise HostnameError(
            f"{source} {node!r} cannot be a node's name, which has only a-z, 0-9, '-' and '.', "
            f"and a letter or digit at each end: give another with --hostname-override{_suggestion(node)}"
        )
    return node


def _suggestion(name: str) -> str:
    labels = [re.sub(r"[^a-z0-9]+", "-", label).strip("-") for label in name.split(".")]
    suggestion = ".".join(label for label in labels if label)
    return f", such as {suggestion}" if suggestion else ""
