"""Under which addresses the cluster finds the node.

`--node-ip` wins; else the node's own name is looked up, in case someone gave it an address of this
machine on purpose; else the machine's default address stands for it. With an external cloud provider
the cloud has the last word: what it wrote stays, and before that only what was asked for is told.

The node's addresses as its pods are told of them, which may come late and may change.

A machine can boot before its network is there, a cloud tells its own opinion after the node has registered,
and a lease can end. Nothing of that stops the agent: pods that do not ask for the address start without it.
Once the node's status in the cluster has addresses, those count, so that pods and everybody else are told
the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from pykubelet.api.node import NodeAddress
from pykubelet.linux import HostError
from pykubelet.linux.network import (
    Interface,
    IPAddress,
    NodeIPs,
    check_node_ips,
    choose_host_address,
    node_ip_problem,
    parse_address,
    read_default_routes,
    read_interfaces,
)
from pykubelet.logs import get_logger
from pykubelet.node.settings import NodeSettings
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
PROVIDED_IP = "alpha.kubernetes.io/provided-node-ip"
"""The annotation that tells an external cloud provider what `--node-ip` says."""
LOOKUP_SECONDS = 5.0


def named_ips(settings: NodeSettings) -> tuple[IPAddress, ...]:
    """Give the addresses that `--node-ip` names; 0.0.0.0 and :: name only a family."""
    return tuple(ip for ip in settings.ips if not ip.is_unspecified)


def needs_own_address(settings: NodeSettings) -> bool:
    """Whether an address has to be found, since none was given."""
    if named_ips(settings) or parse_address(settings.hostname) is not None:
        return False
    return bool(settings.ips) or not settings.external_cloud


def provided_ip(settings: NodeSettings) -> str:
    """Give what the annotation for the external cloud provider says; empty: it must not be there."""
    return ",".join(map(str, named_ips(settings))) if settings.external_cloud else ""


def next_addresses(
    old: Sequence[NodeAddress], settings: NodeSettings, own: IPAddress | None
) -> list[NodeAddress]:
    """Give the node's addresses; `own` is what `find_own_address` found, if it had to.

    Without any, the old ones stay.
    """
    if settings.external_cloud and old:
        return list(old)
    hostname = NodeAddress(type="Hostname", address=settings.hostname)
    if settings.external_cloud and not settings.ips:
        return [hostname]
    ips: Sequence[IPAddress] = named_ips(settings)
    if not ips:
        found = parse_address(settings.hostname) or own
        ips = [found] if found is not None else []
    return [*(NodeAddress(type="InternalIP", address=str(ip)) for ip in ips), hostname] if ips else list(old)


def choose_looked_up(
    found: Iterable[IPAddress], interfaces: list[Interface], prefer: int
) -> IPAddress | None:
    """Choose among the addresses of the node's name: this machine's, the preferred family first."""
    usable = [ip for ip in found if node_ip_problem(ip, interfaces) is None]
    return next((ip for ip in usable if ip.version == prefer), usable[0] if usable else None)


async def find_own_address(settings: NodeSettings) -> IPAddress:
    """Find the address that stands for this machine; raises NodeIPError when it has none."""
    prefer = settings.ips[0].version if settings.ips else 4
    interfaces = read_interfaces()
    looked_up = await _look_up(settings.name)
    return choose_looked_up(looked_up, interfaces, prefer) or choose_host_address(
        interfaces, read_default_routes(), prefer
    )


async def host_ips(settings: NodeSettings) -> list[IPAddress]:
    """Give the node's addresses as its pods are told of them; raises NodeIPError.

    They are those that the cluster is told; where a cloud tells them, the machine's own until then.
    """
    check_named(settings)
    if named := named_ips(settings):
        return list(named)
    return [parse_address(settings.hostname) or await find_own_address(settings)]


def check_named(settings: NodeSettings) -> None:
    """Make sure that what `--node-ip` names is still this machine's; raises NodeIPError."""
    check_node_ips(NodeIPs(settings.ips))


async def _look_up(name: str) -> list[IPAddress]:
    loop = asyncio.get_running_loop()
    try:
        # A resolver that hangs must not hold up the node's status.
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return []
    parsed = (parse_address(str(entry[4][0])) for entry in found)
    return list(dict.fromkeys(ip for ip in parsed if ip is not None))


MISSING_SECONDS = 5.0
"""How often to look while there is none."""
LOOK_SECONDS = 60.0


class HostIPs:
    """Knows the addresses; whoever holds `ips` sees each change."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._complaints = ErrorLogLimiter(log, "Failed to find the node's address, pods go without")
        self._told = False
        self.ips: list[str] = []
        """None yet, one, or one of each family; one list for the agent's life."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when they have changed: pods' statuses tell them, and pods may wait for them."""

    async def look(self) -> None:
        """Take the machine's own, unless the cluster has said more; a failure is only logged."""
        if self._told:
            return
        clock = asyncio.get_running_loop().time
        try:
            found = await host_ips(self._settings)
        except (HostError, OSError) as err:
            self._complaints.failed(err, clock())
            return
        self._complaints.succeeded(clock())
        # While the machine was asked, the cluster may have spoken.
        if not self._told:
            self._take([str(ip) for ip in found])

    def follow(self, addresses: Iterable[NodeAddress]) -> None:
        """Take the addresses in the node's status; those without any are not heeded."""
        if found := told_to_pods(addresses):
            self._told = True
            self._take(found)

    async def run(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS if self.ips else MISSING_SECONDS)
            await self.look()

    def _take(self, ips: list[str]) -> None:
        if ips == self.ips:
            return
        if self.ips:
            log.info("The node's addresses are others now", before=list(self.ips), now=ips)
        self.ips[:] = ips
        self.on_change()


def told_to_pods(addresses: Iterable[NodeAddress]) -> list[str]:
    """Choose among a node's addresses: the first, internal before external, and one of the other family."""
    order = {"InternalIP": 0, "ExternalIP": 1}
    usable = sorted((one for one in addresses if one.type in order), key=lambda one: order[one.type])
    parsed = [ip for one in usable if (ip := parse_address(one.address)) is not None]
    other = next((ip for ip in parsed if ip.version != parsed[0].version), None)
    return [str(ip) for ip in (*parsed[:1], other) if ip is not None]
