"""The node's IP addresses: which were asked for, which the machine has, which one stands for it.

The decisions are pure and follow the reference, since the address is what the rest of the
cluster dials: an address is taken from the interface of a default route, IPv4 before IPv6
unless the family was asked for (`--node-ip=::`), from the loopback interface where only that
has a global one (BGP to the host), and, where the kernel shows no routes, from any interface.

The machine's network interfaces with their addresses, in the kernel's order.

glibc's getifaddrs, which the standard library does not offer: it answers in one call what /proc
and /sys only hold in pieces, and in the order on which the choice of a node's address depends.

Network links and routes of this machine, as far as the pod network touches them.

The node's name: `--hostname-override`, or what the machine calls itself.

Found as the reference finds it. A name that the API server would turn down is refused here
already, where there still is someone to tell.
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


IPAddress = IPv4Address | IPv6Address
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+){3}")
_BROADCAST = IPv4Address("255.255.255.255")


class NodeIPError(HostError):
    """The node's IP address cannot be what was asked for, or cannot be found."""


@dataclass(frozen=True, slots=True)
class NodeIPs:
    """What `--node-ip` says: nothing, one address, or a dual-stack pair."""

    addresses: tuple[IPAddress, ...] = ()
    ignored: tuple[str, ...] = ()
    """Parts that are no addresses; the reference warns of them and goes on, and so do we."""


@dataclass(frozen=True, slots=True)
class DefaultRoute:
    """A route to everywhere, through an interface."""

    interface: str
    version: int


def parse_node_ip(text: str) -> NodeIPs:
    """Read `--node-ip`: "", one address, or an IPv4 and an IPv6 one separated by a comma.

    `0.0.0.0` and `::` alone ask for the default address of that family. Parts that are no
    addresses are set aside, but when nothing is left that is an error: the operator meant something.
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
    """Read an IP address as Kubernetes does, or give None.

    Leading zeros are decimal, an IPv4 address in IPv6 clothes is IPv4, and a zone is not allowed.
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
    """Say why an address cannot be this node's, or give None."""
    if address.is_loopback:
        return f"node IP {address} is a loopback address: give one that other nodes can reach"
    if address.is_multicast:
        return f"node IP {address} is a multicast address: give one of an interface of this machine"
    if address.is_link_local:
        return f"node IP {address} is a link-local address: give one that is routed"
    if address.is_unspecified:
        return f"node IP {address} is the all-zeros address: give one of an interface of this machine"
    own = [own for interface in interfaces for own in interface.addresses]
    if address not in own:
        listed = ", ".join(str(one) for one in own if is_global_unicast(one)) or "none"
        return f"node IP {address} is not on an interface of this machine: it has {listed}"
    return None


def choose_host_address(
    interfaces: list[Interface], routes: list[DefaultRoute] | None, prefer: int = 4
) -> IPAddress:
    """Choose the address that stands for the machine; `prefer` is the IP version to try first.

    `routes` is None where the kernel shows none at all. Raises NodeIPError when there is no answer.
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
    """Whether an address can be dialled from elsewhere; private networks count."""
    special = address.is_unspecified or address.is_loopback or address.is_multicast or address.is_link_local
    return not special and address != _BROADCAST


def host_address(prefer: int = 4, proc: Path = Path("/proc")) -> IPAddress:
    """Choose the address that stands for this machine.

    Raises NodeIPError when it has none that can be dialled.
    """
    return choose_host_address(read_interfaces(), read_default_routes(proc), prefer)


def check_node_ips(ips: NodeIPs) -> None:
    """Make sure that the addresses asked for are this machine's; the unspecified ones ask for none.

    Raises NodeIPError.
    """
    wanted = [address for address in ips.addresses if not address.is_unspecified]
    interfaces = read_interfaces() if wanted else []
    for address in wanted:
        if problem := node_ip_problem(address, interfaces):
            raise NodeIPError(problem)


def read_default_routes(proc: Path = Path("/proc")) -> list[DefaultRoute] | None:
    """Read the kernel's default routes, IPv4 first; None where it shows no routes.

    Machines without IPv6 have no second file, and that is fine.
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
    """Find the default routes in the text of /proc/net/route (name, destination, gateway, ...)."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return [DefaultRoute(row[0], 4) for row in rows if len(row) > 2 and int(row[1], 16) == 0]


def parse_ipv6_routes(text: str) -> list[DefaultRoute]:
    """Find the default routes in /proc/net/ipv6_route; those without a gateway are the kernel's own."""
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
    """Whether there is a network link of this name."""
    return (_NET / name).exists()


def bridge_ports(bridge: str) -> list[str]:
    """Give the links that are plugged into a bridge; none when there is no such bridge."""
    ports = _NET / bridge / "brif"
    return sorted(entry.name for entry in ports.iterdir()) if ports.is_dir() else []


async def delete_link(name: str) -> bool:
    """Remove a link; returns whether there was one. Raises CommandError when it stays."""
    try:
        await run("ip", "link", "delete", "dev", name)
    except CommandError:
        # A veth goes with its peer's namespace, at a moment of the kernel's choosing.
        if link_exists(name):
            raise
        return False
    return True


async def used_networks(*, except_link: str = "") -> list[IPv4Network]:
    """Give every IPv4 network that this machine has an address in or a route to.

    The default route is left out, since it overlaps everything, and so is what belongs to
    `except_link`.
    """
    routes = json.loads(await run("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    addresses = json.loads(await run("ip", "-json", "-4", "address", "show") or "[]")
    return parse_networks(routes, addresses, except_link=except_link)


def parse_networks(
    routes: list[dict[str, Any]], addresses: list[dict[str, Any]], *, except_link: str = ""
) -> list[IPv4Network]:
    """Read the networks out of what `ip -json route` and `ip -json address` say."""
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
    """Give the packet size of the link that leads to the outside; None when there is no default route."""
    routes = json.loads(await run("ip", "-json", "-4", "route", "show", "default") or "[]")
    for route in routes:
        mtu = _NET / str(route.get("dev", "")) / "mtu"
        if route.get("dev") and mtu.is_file():
            return int(mtu.read_text())
    return None


_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST = 253


class HostnameError(HostError):
    """The machine's name cannot be a node's."""


def node_name(override: str = "") -> str:
    """Give this node's name; `override` is `--hostname-override`.

    Raises HostnameError when it is empty or no DNS name.
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
    """Turn a host name into a node name; `source` says in errors where it came from."""
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
    better = ".".join(label for label in labels if label)
    return f", such as {better}" if better else ""
