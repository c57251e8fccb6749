"""Network links and routes of this machine, as far as the pod network touches them."""

import json
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from pykubelet.host.processes import CommandError, run

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
