from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.network import (
    DefaultRoute,
    Interface,
    IPAddress,
    NodeIPError,
    NodeIPs,
    check_node_ips,
    choose_host_address,
    host_address,
    is_global_unicast,
    node_ip_problem,
    parse_address,
    parse_ipv4_routes,
    parse_ipv6_routes,
    parse_node_ip,
    read_default_routes,
    read_interfaces,
)


def ips(*texts: str) -> list[IPAddress]:
    return [ip_address(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "addresses", "ignored"),
    [
        ("", [], []),
        ("192.0.2.1", ["192.0.2.1"], []),
        (" 192.0.2.1 , 2001:db8::1 ", ["192.0.2.1", "2001:db8::1"], []),
        ("2001:db8::1,192.0.2.1", ["2001:db8::1", "192.0.2.1"], []),
        ("0.0.0.0", ["0.0.0.0"], []),
        ("::", ["::"], []),
        ("192.0.2.1,", ["192.0.2.1"], [""]),
        ("nonsense,2001:db8::1", ["2001:db8::1"], ["nonsense"]),
        ("::ffff:192.0.2.1", ["192.0.2.1"], []),
        ("010.001.000.09", ["10.1.0.9"], []),
    ],
)
def test_parse_node_ip_valid_returns_addresses(text: str, addresses: list[str], ignored: list[str]) -> None:
    assert parse_node_ip(text) == NodeIPs(tuple(ips(*addresses)), tuple(ignored))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("192.0.2.1,192.0.2.2", "single IP or a dual-stack pair"),
        ("2001:db8::1,2001:db8::2", "single IP or a dual-stack pair"),
        ("192.0.2.1,2001:db8::1,192.0.2.2", "single IP or a dual-stack pair"),
        ("192.0.2.1,::ffff:192.0.2.2", "single IP or a dual-stack pair"),
        ("0.0.0.0,2001:db8::1", "cannot include"),
        ("192.0.2.1,::", "cannot include"),
        ("nonsense", "not an IP address"),
        ("192.0.2.256", "not an IP address"),
        ("fe80::1%eth0", "not an IP address"),
        (",", "not an IP address"),
    ],
)
def test_parse_node_ip_invalid_raises_one_line_error(text: str, words: str) -> None:
    with pytest.raises(NodeIPError, match=words) as caught:
        parse_node_ip(text)
    assert str(caught.value).startswith(f"bad --node-ip {text!r}: ")
    assert "\n" not in str(caught.value)


@given(st.text())
def test_parse_node_ip_any_text_raises_only_node_ip_error(text: str) -> None:
    try:
        found = parse_node_ip(text)
    except NodeIPError:
        return
    assert len(found.addresses) <= 2


@given(st.ip_addresses())
def test_parse_address_any_address_round_trips(address: IPv4Address | IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert parse_address(str(address)) == (mapped or address)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("192.0.2.2", True),
        ("10.0.0.1", True),
        ("fd00::1", True),
        ("127.0.0.2", False),
        ("::1", False),
        ("169.254.1.1", False),
        ("fe80::1", False),
        ("224.0.0.1", False),
        ("ff02::1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
    ],
)
def test_is_global_unicast_classifies_addresses(text: str, verdict: bool) -> None:
    assert is_global_unicast(ip_address(text)) is verdict


ETH0 = Interface("eth0", addresses=ips("fe80::2", "192.0.2.2", "192.0.2.3", "2001:db8::2"))
LO = Interface("lo", loopback=True, addresses=ips("127.0.0.1", "::1"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.3", None),
        ("2001:db8::2", None),
        ("127.0.0.1", "loopback"),
        ("224.0.0.1", "multicast"),
        ("fe80::2", "link-local"),
        ("::", "all-zeros"),
        ("192.0.2.9", "not on an interface of this machine: it has 192.0.2.2, 192.0.2.3, 2001:db8::2"),
    ],
)
def test_node_ip_problem_unusable_address_returns_reason(address: str, words: str | None) -> None:
    problem = node_ip_problem(ip_address(address), [LO, ETH0])
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert words in problem


V4, V6 = DefaultRoute("eth0", 4), DefaultRoute("eth0", 6)
DOWN = Interface("eth1", up=False, addresses=ips("198.51.100.1"))
TUNNEL = Interface("tun0", point_to_point=True, addresses=ips("198.51.100.7"))
LINK_LOCAL = Interface("eth0", addresses=ips("fe80::2", "169.254.0.1"))
BGP_LO = Interface("lo", loopback=True, addresses=ips("127.0.0.1", "203.0.113.5", "2001:db8::5"))


@pytest.mark.parametrize(
    ("interfaces", "routes", "prefer", "chosen"),
    [
        ([LO, ETH0], [V4, V6], 4, "192.0.2.2"),
        ([LO, ETH0], [V4, V6], 6, "2001:db8::2"),
        ([LO, ETH0], [V6], 4, "2001:db8::2"),
        ([LO, ETH0], [V4], 6, "192.0.2.2"),
        # the interface of the first route is down, the second's is not
        ([LO, DOWN, ETH0], [DefaultRoute("eth1", 4), V4], 4, "192.0.2.2"),
        # a route's interface may be a tunnel, a guess without routes may not
        ([LO, TUNNEL], [DefaultRoute("tun0", 4)], 4, "198.51.100.7"),
        ([LO, TUNNEL, ETH0], None, 4, "192.0.2.2"),
        ([LO, DOWN, ETH0], None, 6, "2001:db8::2"),
        # only the loopback interface has a global address (BGP unnumbered)
        ([BGP_LO, LINK_LOCAL], [V4], 4, "203.0.113.5"),
        ([BGP_LO, LINK_LOCAL], [V6], 4, "2001:db8::5"),
        # a route through an interface that vanished meanwhile
        ([LO, ETH0], [DefaultRoute("gone", 4), V4], 4, "192.0.2.2"),
    ],
)
def test_choose_host_address_prefers_default_route_and_family(
    interfaces: list[Interface], routes: list[DefaultRoute] | None, prefer: int, chosen: str
) -> None:
    assert choose_host_address(interfaces, routes, prefer) == ip_address(chosen)


@pytest.mark.parametrize(
    ("interfaces", "routes", "words"),
    [
        ([LO, ETH0], [], "no default route"),
        ([LO, LINK_LOCAL], [V4, V6], r"no usable address on the interface of a default route \(eth0\)"),
        ([LO, DOWN, TUNNEL], None, "no interface of this machine has a global address"),
        ([], None, "no interface"),
    ],
)
def test_choose_host_address_no_candidate_raises(
    interfaces: list[Interface], routes: list[DefaultRoute] | None, words: str
) -> None:
    with pytest.raises(NodeIPError, match=words) as caught:
        choose_host_address(interfaces, routes)
    assert "--node-ip" in str(caught.value)


IPV4_ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
wlan0\t00000000\t0102000A\t0003\t0\t0\t600\t00000000\t0\t0\t0
"""
ZERO, GATEWAY = "0" * 32, "fd" + "0" * 29 + "1"
IPV6_ROUTES = f"""\
fd{"0" * 30} 40 {ZERO} 00 {ZERO} 00000100 00000001 00000000 00000001     eth0
{ZERO} 00 {ZERO} 00 {GATEWAY} 00000400 00000002 00000000 00000003     eth0
{ZERO} 00 {ZERO} 00 {ZERO} ffffffff 00000001 00000000 00200200       lo
"""


def test_parse_routes_returns_default_routes() -> None:
    assert parse_ipv4_routes(IPV4_ROUTES) == [DefaultRoute("eth0", 4), DefaultRoute("wlan0", 4)]
    assert parse_ipv4_routes("") == []
    assert parse_ipv6_routes(IPV6_ROUTES) == [DefaultRoute("eth0", 6)]
    assert parse_ipv6_routes("") == []


def test_read_default_routes_missing_files_are_skipped(tmp_path: Path) -> None:
    assert read_default_routes(tmp_path) is None
    (tmp_path / "net").mkdir()
    (tmp_path / "net/route").write_text(IPV4_ROUTES)
    assert read_default_routes(tmp_path) == [DefaultRoute("eth0", 4), DefaultRoute("wlan0", 4)]
    (tmp_path / "net/ipv6_route").write_text(IPV6_ROUTES)
    assert read_default_routes(tmp_path) == [
        DefaultRoute("eth0", 4),
        DefaultRoute("wlan0", 4),
        DefaultRoute("eth0", 6),
    ]


def test_read_interfaces_on_host_includes_loopback() -> None:
    lo = next(interface for interface in read_interfaces() if interface.loopback)
    assert lo.name == "lo"
    assert lo.up
    assert ip_address("127.0.0.1") in lo.addresses


def test_read_interfaces_on_host_matches_sysfs() -> None:
    # other tests may make and remove interfaces meanwhile
    for _ in range(200):
        names = {entry.name for entry in Path("/sys/class/net").iterdir() if entry.is_dir()}
        if names == {interface.name for interface in read_interfaces()}:
            return
    raise AssertionError("never the same")


def test_host_address_on_host_is_valid_node_ip() -> None:
    if not read_default_routes():
        pytest.skip("this machine has no default route")
    chosen = host_address()
    assert node_ip_problem(chosen, read_interfaces()) is None
    check_node_ips(parse_node_ip(str(chosen)))
    check_node_ips(parse_node_ip("0.0.0.0"))
    with pytest.raises(NodeIPError, match="not on an interface"):
        check_node_ips(parse_node_ip("203.0.113.254"))
