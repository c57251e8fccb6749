"""The pods' network: which addresses, and the CNI configuration that hands them out.

One bridge per private runtime with a /24 of its own; pods reach the outside under the node's
address, and host ports lead to them. IPv4 only: a private node is a node for one machine.
"""

import json
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network

from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance

_SIZE = 256
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
_FIRST = IPv4Address("10.85.0.0")
"""Where the search starts: the range that CNI's own examples use for pods."""


def choose_subnet(used: Iterable[IPv4Network]) -> IPv4Network:
    """Give the first /24, from 10.85.0.0 on, that overlaps none of the used networks.

    Raises EmbeddedError when every private address is in use.
    """
    taken = sorted(used)
    for first, last in _spans():
        at = first
        while at <= last:
            candidate = IPv4Network((at, 24))
            clash = next((network for network in taken if network.overlaps(candidate)), None)
            if clash is None:
                return candidate
            at = (int(clash.broadcast_address) // _SIZE + 1) * _SIZE
    raise EmbeddedError(
        "no private /24 network is free for pods: every one overlaps a route of this machine (see 'ip route')"
    )


def conflist(instance: Instance, subnet: IPv4Network, mtu: int | None = None) -> str:
    """Write the CNI configuration list of the pods' network."""
    bridge: dict[str, object] = {
        "type": "bridge",
        "bridge": instance.bridge,
        "isGateway": True,
        "ipMasq": True,
        # A pod must be able to reach itself through its own host port.
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(subnet)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(instance.cni_leases),
        },
    }
    if mtu is not None:
        bridge["mtu"] = mtu
    document = {
        # The newest version that the plugins of every supported distribution speak.
        "cniVersion": "0.4.0",
        "name": instance.name,
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _spans() -> Iterator[tuple[int, int]]:
    for text in _PRIVATE:
        network = IPv4Network(text)
        first = (
            max(int(network.network_address), int(_FIRST))
            if _FIRST in network
            else int(network.network_address)
        )
        yield first, int(network.broadcast_address)
