"""Links and routes: what `ip` says is read right, and links come and go."""

import subprocess
from ipaddress import IPv4Network
from typing import Any

import pytest

from pykubelet.linux.network import (
    bridge_ports,
    delete_link,
    link_exists,
    parse_networks,
    uplink_mtu,
    used_networks,
)
from pykubelet.linux.processes import CommandError

ROUTES: list[dict[str, Any]] = [
    {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
    {"dst": "192.0.2.0/24", "dev": "eth0"},
    {"dst": "10.85.0.0/24", "dev": "ours"},
    {"type": "local", "dst": "198.51.100.7", "dev": "eth0", "table": "local"},
    {"type": "blackhole", "dst": "10.9.0.0/16"},
    {"dst": "0.0.0.0/0", "dev": "tun0"},
]
ADDRESSES: list[dict[str, Any]] = [
    {"ifname": "eth0", "addr_info": [{"local": "192.0.2.2", "prefixlen": 24}]},
    {"ifname": "down0", "addr_info": [{"local": "172.20.3.4", "prefixlen": 16}]},
    {"ifname": "ours", "addr_info": [{"local": "10.85.0.1", "prefixlen": 24}]},
    {"ifname": "bare"},
]


def test_parse_networks_returns_networks_of_routes_and_addresses() -> None:
    found = parse_networks(ROUTES, ADDRESSES, except_link="ours")
    assert found == [
        IPv4Network("10.9.0.0/16"),
        IPv4Network("172.20.0.0/16"),
        IPv4Network("192.0.2.0/24"),
        IPv4Network("198.51.100.7/32"),
    ]
    assert IPv4Network("10.85.0.0/24") in parse_networks(ROUTES, ADDRESSES)


@pytest.mark.machine
async def test_used_networks_and_uplink_mtu_on_host_are_plausible() -> None:
    assert IPv4Network("127.0.0.0/8") in await used_networks()
    mtu = await uplink_mtu()
    assert mtu is None or 576 <= mtu <= 65536


@pytest.mark.machine
async def test_delete_link_existing_and_missing_links_reported() -> None:
    bridge, port = "pykt-br", "pykt-port"
    try:
        subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
        subprocess.run(["ip", "link", "add", port, "type", "veth", "peer", "name", "pykt-peer"], check=True)
        subprocess.run(["ip", "link", "set", port, "master", bridge], check=True)
        assert link_exists(bridge)
        assert bridge_ports(bridge) == [port]
        assert await delete_link(port) is True
        assert await delete_link(bridge) is True
    finally:
        for name in (port, bridge):
            subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)
    assert not link_exists(bridge)
    assert bridge_ports(bridge) == []
    assert await delete_link(bridge) is False
    with pytest.raises(CommandError, match="ip link delete dev lo failed"):
        await delete_link("lo")
