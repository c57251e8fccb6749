from ipaddress import ip_address
from typing import Any

import pytest

from pykubelet.api.node import NodeAddress
from pykubelet.linux.network import Interface, NodeIPError, read_interfaces
from pykubelet.node.addresses import (
    check_named_ips,
    choose_resolved,
    find_own_address,
    host_ips,
    needs_own_address,
    next_addresses,
    provided_ip,
)
from tests.support.node_status import settings

HOSTNAME = ("Hostname", "vm")
OWN = ip_address("192.0.2.7")


def given_ips(*texts: str) -> tuple[Any, ...]:
    return tuple(map(ip_address, texts))


@pytest.mark.parametrize(
    ("ips", "external", "hostname", "old", "addresses", "needs"),
    [
        pytest.param((), False, "vm", [], [("InternalIP", "192.0.2.7"), HOSTNAME], True, id="default"),
        pytest.param(
            ("192.0.2.2",), False, "vm", [], [("InternalIP", "192.0.2.2"), HOSTNAME], False, id="given"
        ),
        pytest.param(
            ("2001:db8::2", "192.0.2.2"),
            False,
            "vm",
            [],
            [("InternalIP", "2001:db8::2"), ("InternalIP", "192.0.2.2"), HOSTNAME],
            False,
            id="dual stack",
        ),
        pytest.param(("::",), False, "vm", [], [("InternalIP", "192.0.2.7"), HOSTNAME], True, id="family"),
        pytest.param(
            (),
            False,
            "10.0.0.1",
            [],
            [("InternalIP", "10.0.0.1"), ("Hostname", "10.0.0.1")],
            False,
            id="ip name",
        ),
        pytest.param((), True, "vm", [], [HOSTNAME], False, id="cloud, nothing given"),
        pytest.param(
            ("192.0.2.2",), True, "vm", [], [("InternalIP", "192.0.2.2"), HOSTNAME], False, id="cloud, given"
        ),
        pytest.param(
            ("0.0.0.0",), True, "vm", [], [("InternalIP", "192.0.2.7"), HOSTNAME], True, id="cloud, family"
        ),
        pytest.param(
            ("192.0.2.2",),
            True,
            "vm",
            [("ExternalIP", "9.9.9.9")],
            [("ExternalIP", "9.9.9.9")],
            False,
            id="cloud's",
        ),
        pytest.param(
            ("192.0.2.2",),
            False,
            "vm",
            [("ExternalIP", "9.9.9.9")],
            [("InternalIP", "192.0.2.2"), HOSTNAME],
            False,
            id="no cloud any more",
        ),
    ],
)
def test_next_addresses_follow_node_ip_and_cloud_provider(
    ips: tuple[str, ...],
    external: bool,
    hostname: str,
    old: list[tuple[str, str]],
    addresses: list[tuple[str, str]],
    needs: bool,
) -> None:
    made = settings(ips=given_ips(*ips), external_cloud=external, hostname=hostname)
    before = [NodeAddress(type=kind, address=address) for kind, address in old]
    found = next_addresses(before, made, OWN if needs else None)
    assert [(one.type, one.address) for one in found] == addresses
    assert needs_own_address(made) == needs


def test_next_addresses_none_found_keeps_old() -> None:
    old = [NodeAddress(type="InternalIP", address="192.0.2.1")]
    assert next_addresses(old, settings(ips=()), None) == old


@pytest.mark.parametrize(
    ("ips", "external", "told"),
    [
        (("192.0.2.2",), True, "192.0.2.2"),
        (("192.0.2.2", "2001:db8::2"), True, "192.0.2.2,2001:db8::2"),
        (("192.0.2.2",), False, ""),
        (("::",), True, ""),
        ((), True, ""),
    ],
)
def test_provided_ip_only_for_external_cloud_provider(
    ips: tuple[str, ...], external: bool, told: str
) -> None:
    assert provided_ip(settings(ips=given_ips(*ips), external_cloud=external)) == told


@pytest.mark.parametrize(
    ("found", "prefer", "chosen"),
    [
        (("192.0.2.2",), 4, "192.0.2.2"),
        (("2001:db8::2", "192.0.2.2"), 4, "192.0.2.2"),
        (("2001:db8::2", "192.0.2.2"), 6, "2001:db8::2"),
        (("2001:db8::2",), 4, "2001:db8::2"),
        (("127.0.1.1",), 4, None),
        (("203.0.113.5",), 4, None),
        ((), 4, None),
    ],
)
def test_choose_resolved_prefers_family_and_local_addresses(
    found: tuple[str, ...], prefer: int, chosen: str | None
) -> None:
    interfaces = [Interface("eth0", addresses=list(given_ips("192.0.2.2", "2001:db8::2")))]
    result = choose_resolved(given_ips(*found), interfaces, prefer)
    assert (str(result) if result else None) == chosen


async def test_host_ips_on_real_host_are_interface_addresses() -> None:
    try:
        found = await find_own_address(settings(ips=(), name="no-such-name.invalid"))
    except NodeIPError as err:
        pytest.skip(f"this machine has no address: {err}")
    assert any(found in interface.addresses for interface in read_interfaces())
    check_named_ips(settings(ips=(found,)))
    with pytest.raises(NodeIPError, match="not on an interface"):
        check_named_ips(settings(ips=given_ips("203.0.113.77")))
    for ips in ((), (found,), given_ips("0.0.0.0" if found.version == 4 else "::")):
        asked = settings(ips=ips, name="no-such-name.invalid")
        assert await host_ips(asked) == [found]
        # The cluster is told the same.
        own = found if needs_own_address(asked) else None
        assert str(found) in [address.address for address in next_addresses([], asked, own)]
    # A cloud that has not spoken yet does not leave pods without their host's address.
    assert await host_ips(settings(ips=(), name="no-such-name.invalid", external_cloud=True)) == [found]
    assert await host_ips(settings(ips=(), hostname="10.0.0.1")) == [ip_address("10.0.0.1")]
    with pytest.raises(NodeIPError, match="not on an interface"):
        await host_ips(settings(ips=given_ips("203.0.113.77")))
