"""Node addresses in the node status, and the host IPs in the status of pods.

Precedence for the node status: `--node-ip`, else the hostname if it is an IP address, else an address of
this host that the node name resolves to, else the host's default address. With an external cloud provider
the addresses that it wrote are kept; before that only the hostname and addresses that `--node-ip` requests
are reported.

`HostIPs` owns the host IPs. They may be missing at boot (no network yet) and may change (cloud provider,
DHCP); neither stops the kubelet, and pods that do not use the host IP start without it. Once the node status
has addresses, they take precedence, so that pods and the other clients of the API see the same.
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
"""Annotation that passes `--node-ip` to an external cloud provider."""
LOOKUP_TIMEOUT_SECONDS = 5.0


def named_ips(settings: NodeSettings) -> tuple[IPAddress, ...]:
    """Return the specific addresses of `--node-ip`; 0.0.0.0 and :: select only a family."""
    return tuple(ip for ip in settings.ips if not ip.is_unspecified)


def needs_own_address(settings: NodeSettings) -> bool:
    """Return whether an address has to be discovered, since none is configured."""
    if named_ips(settings) or parse_address(settings.hostname) is not None:
        return False
    return bool(settings.ips) or not settings.external_cloud


def provided_ip(settings: NodeSettings) -> str:
    """Return the value of the `PROVIDED_IP` annotation; empty if it must not exist."""
    return ",".join(map(str, named_ips(settings))) if settings.external_cloud else ""


def next_addresses(
    old: Sequence[NodeAddress], settings: NodeSettings, own: IPAddress | None
) -> list[NodeAddress]:
    """Return the node's addresses; `own` is the result of `find_own_address`, if it was needed.

    If no address is known, the old addresses are returned.
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


def choose_resolved(found: Iterable[IPAddress], interfaces: list[Interface], prefer: int) -> IPAddress | None:
    """Return the first resolved address that belongs to this host, of the preferred family if possible."""
    usable = [ip for ip in found if node_ip_problem(ip, interfaces) is None]
    return next((ip for ip in usable if ip.version == prefer), usable[0] if usable else None)


async def find_own_address(settings: NodeSettings) -> IPAddress:
    """Return the host address that the node name resolves to, else the default one. Raises NodeIPError."""
    prefer = settings.ips[0].version if settings.ips else 4
    interfaces = read_interfaces()
    resolved = await _resolve(settings.name)
    return choose_resolved(resolved, interfaces, prefer) or choose_host_address(
        interfaces, read_default_routes(), prefer
    )


async def host_ips(settings: NodeSettings) -> list[IPAddress]:
    """Return the host IPs for the status of pods. Raises NodeIPError.

    These are the addresses of the node status; with an external cloud provider, the host's own address
    until the provider has set the status.
    """
    check_named_ips(settings)
    if named := named_ips(settings):
        return list(named)
    return [parse_address(settings.hostname) or await find_own_address(settings)]


def check_named_ips(settings: NodeSettings) -> None:
    """Check that the addresses of `--node-ip` belong to this host. Raises NodeIPError."""
    check_node_ips(NodeIPs(settings.ips))


async def _resolve(name: str) -> list[IPAddress]:
    loop = asyncio.get_running_loop()
    try:
        # A hanging resolver must not delay the node status.
        async with asyncio.timeout(LOOKUP_TIMEOUT_SECONDS):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return []
    parsed = (parse_address(str(entry[4][0])) for entry in found)
    return list(dict.fromkeys(ip for ip in parsed if ip is not None))


MISSING_RETRY_SECONDS = 5.0
"""Seconds between discoveries while no address is known; `DISCOVERY_SECONDS` otherwise."""
DISCOVERY_SECONDS = 60.0


class HostIPs:
    """Current host IPs; `ips` is updated in place, so that its users see each change."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._error_log = ErrorLogLimiter(log, "Failed to find the host IPs, pods start without them")
        self._from_node_status = False
        self.ips: list[str] = []
        """Empty while unknown, one address, or one per family; the same list for the process lifetime."""
        self._listeners: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener, called after a change: pod statuses contain the addresses, and pods wait for them.

        It must not block.
        """
        self._listeners.append(listener)

    async def discover(self) -> None:
        """Discover the host's own address, unless the node status has addresses; a failure is only logged."""
        if self._from_node_status:
            return
        clock = asyncio.get_running_loop().time
        try:
            found = await host_ips(self._settings)
        except (HostError, OSError) as err:
            self._error_log.failed(err, clock())
            return
        self._error_log.succeeded(clock())
        # `set_from_node_status` may have been called concurrently.
        if not self._from_node_status:
            self._set([str(ip) for ip in found])

    def set_from_node_status(self, addresses: Iterable[NodeAddress]) -> None:
        """Set the host IPs from the addresses of the node status, unless none of them is usable."""
        if found := pod_host_ips(addresses):
            self._from_node_status = True
            self._set(found)

    async def run(self) -> NoReturn:
        """Discover the address periodically until cancelled."""
        while True:
            await asyncio.sleep(DISCOVERY_SECONDS if self.ips else MISSING_RETRY_SECONDS)
            await self.discover()

    def _set(self, ips: list[str]) -> None:
        if ips == self.ips:
            return
        if self.ips:
            log.info("Host IPs changed", before=list(self.ips), now=ips)
        self.ips[:] = ips
        for listener in self._listeners:
            listener()


def pod_host_ips(addresses: Iterable[NodeAddress]) -> list[str]:
    """Return the first address, InternalIP before ExternalIP, and the first one of the other family."""
    order = {"InternalIP": 0, "ExternalIP": 1}
    usable = sorted(
        (address for address in addresses if address.type in order), key=lambda address: order[address.type]
    )
    parsed = [ip for address in usable if (ip := parse_address(address.address)) is not None]
    other = next((ip for ip in parsed if ip.version != parsed[0].version), None)
    return [str(ip) for ip in (*parsed[:1], other) if ip is not None]
