"""The node's addresses as its pods are told of them, which may come late and may change.

A machine can boot before its network is there, a cloud tells its own opinion after the node has registered,
and a lease can end. Nothing of that stops the agent: pods that do not ask for the address start without it.
Once the node's status in the cluster has addresses, those count, so that pods and everybody else are told
the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from pykubelet.api.node import NodeAddress
from pykubelet.host import HostError
from pykubelet.host.addresses import parse_address
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger
from pykubelet.node.addresses import host_ips
from pykubelet.node.settings import NodeSettings

log = get_logger(__name__)

MISSING_SECONDS = 5.0
"""How often to look while there is none."""
LOOK_SECONDS = 60.0


class HostAddresses:
    """Knows the addresses; whoever holds `ips` sees each change."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._complaints = Complaints(log, "Failed to find the node's address, pods go without")
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
