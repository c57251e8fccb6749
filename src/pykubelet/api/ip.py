"""IP addresses and networks, parsed as leniently as Kubernetes does.

Old configurations contain IPv4 addresses with leading zeros (`010.0.0.1`), which Kubernetes still parses as
decimal and Python rejects; addresses with a zone (`fe80::1%eth0`) are not valid in Kubernetes.
"""

import ipaddress
import re
from collections.abc import Sequence

from pykubelet.util.text import quoted

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_LEADING_ZEROS = re.compile(r"(?<![0-9A-Fa-f:])0+(?=[0-9])", re.ASCII)


def parse_ip(text: str) -> IPAddress:
    """Parse an address. Raises ValueError with one line that shows examples."""
    try:
        if "%" not in text:
            return ipaddress.ip_address(_without_leading_zeros(text))
    except ValueError:
        pass
    raise ValueError(f"{quoted(text)} is not an IP address: write one such as 10.96.0.10 or fd00::10")


def parse_cidr(text: str) -> IPNetwork:
    """Parse a network with its prefix length; host bits may be set (`10.0.0.1/24`). Raises ValueError."""
    try:
        address, slash, length = text.partition("/")
        if slash and "%" not in text and re.fullmatch(r"[0-9]{1,3}", length, re.ASCII):
            return ipaddress.ip_network(f"{_without_leading_zeros(address)}/{length}", strict=False)
    except ValueError:
        pass
    raise ValueError(f"{quoted(text)} is not a network: write one such as 10.244.0.0/24 or fd00::/64")


def by_family(ips: Sequence[str], like: str = "") -> list[str]:
    """Return at most one pod IP per family, first the one of the family of `like`.

    `like` is the node's own address; without one, IPv4 comes first. A single address is returned unchanged.
    """
    if len(ips) < 2:
        return list(ips)
    first = ":" in like
    chosen = (next((ip for ip in ips if (":" in ip) == family), None) for family in (first, not first))
    return [ip for ip in chosen if ip is not None]


def _without_leading_zeros(address: str) -> str:
    return _LEADING_ZEROS.sub("", address) if "." in address else address
