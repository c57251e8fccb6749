import asyncio
from ipaddress import ip_address

import pytest

import pykubelet.node.addresses
from pykubelet.api.node import NodeAddress
from pykubelet.linux.network import IPAddress, NodeIPError
from pykubelet.node.addresses import HostIPs, pod_host_ips
from pykubelet.node.settings import NodeSettings
from pykubelet.util.tasks import TaskScope
from tests.support.node_status import settings

pytestmark = pytest.mark.looptime


def addresses(*pairs: tuple[str, str]) -> list[NodeAddress]:
    return [NodeAddress(type=kind, address=text) for kind, text in pairs]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), []),
        ((("Hostname", "vm"), ("InternalDNS", "10.0.0.9")), []),
        ((("ExternalIP", "9.9.9.9"), ("InternalIP", "10.0.0.1")), ["10.0.0.1"]),
        ((("ExternalIP", "9.9.9.9"),), ["9.9.9.9"]),
        ((("InternalIP", "10.0.0.1"), ("InternalIP", "10.0.0.2")), ["10.0.0.1"]),
        ((("InternalIP", "fd00::1"), ("InternalIP", "10.0.0.1")), ["fd00::1", "10.0.0.1"]),
        ((("InternalIP", "10.0.0.1"), ("ExternalIP", "2001:db8::1")), ["10.0.0.1", "2001:db8::1"]),
        ((("InternalIP", "nonsense"), ("InternalIP", "010.0.0.1")), ["10.0.0.1"]),
    ],
)
def test_pod_host_ips_prefers_internal_ip_and_dual_stack(
    given: tuple[tuple[str, str], ...], told: list[str]
) -> None:
    assert pod_host_ips(addresses(*given)) == told


class Machine:
    """A machine whose addresses a test sets; None: it has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ip: IPAddress | None = None
        self.asked = 0
        monkeypatch.setattr(pykubelet.node.addresses, "host_ips", self.host_ips)

    async def host_ips(self, given: NodeSettings) -> list[IPAddress]:
        self.asked += 1
        await asyncio.sleep(0.1)
        if self.ip is None:
            raise NodeIPError("no default route")
        return [self.ip]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


async def test_host_ips_discovered_late_then_lost_keeps_last_known(machine: Machine) -> None:
    known, changes = HostIPs(settings()), []
    held = known.ips
    known.add_listener(lambda: changes.append(list(held)))
    await known.discover()
    assert held == []
    async with TaskScope() as scope:
        scope.start(known.run(), name="addresses")
        await asyncio.sleep(20)
        machine.ip = ip_address("192.0.2.7")
        await asyncio.sleep(6)
        assert held == ["192.0.2.7"]
        asked = machine.asked
        machine.ip = None
        await asyncio.sleep(70)
        assert held == ["192.0.2.7"], "the last one known is better than none"
        assert machine.asked - asked <= 2
        machine.ip = ip_address("192.0.2.8")
        await asyncio.sleep(70)
    assert held == ["192.0.2.8"]
    assert changes == [["192.0.2.7"], ["192.0.2.8"]]


async def test_host_ips_node_status_overrides_discovered(machine: Machine) -> None:
    known = HostIPs(settings())
    machine.ip = ip_address("192.0.2.7")
    await known.discover()
    known.set_from_node_status(addresses(("Hostname", "vm")))
    assert known.ips == ["192.0.2.7"], "a cloud that has not spoken yet"
    async with asyncio.TaskGroup() as group:
        group.create_task(known.discover())
        await asyncio.sleep(0.05)
        known.set_from_node_status(addresses(("InternalIP", "10.0.0.1"), ("InternalIP", "fd00::1")))
    assert known.ips == ["10.0.0.1", "fd00::1"], "also while the machine is being asked"
    await known.discover()
    known.set_from_node_status([])
    assert known.ips == ["10.0.0.1", "fd00::1"]
    assert machine.asked == 2
