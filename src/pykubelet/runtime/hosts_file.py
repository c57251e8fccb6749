"""The /etc/hosts that every container of a pod sees.

The first line tells other tools (and the next agent) that the file is managed; below it come the
usual local names, the pod's own addresses and the author's aliases. A pod on the host's network
gets a copy of the host's file instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pykubelet.api.pod import HostAlias, Pod
from pykubelet.runtime.hostname import pod_hostname

HEADER = "# Kubernetes-managed hosts file.\n"
HOST_NETWORK_HEADER = "# Kubernetes-managed hosts file (host network).\n"

_LOCAL = (
    "127.0.0.1\tlocalhost\n"
    "::1\tlocalhost ip6-localhost ip6-loopback\n"
    "fe00::0\tip6-localnet\n"
    "fe00::0\tip6-mcastprefix\n"
    "fe00::1\tip6-allnodes\n"
    "fe00::2\tip6-allrouters\n"
)


def wants_hosts_file(pod: Pod, pod_ips: Sequence[str]) -> bool:
    """Whether there is something to say: not before the pod has an address."""
    return bool(pod_ips) or pod.spec.host_network


def hosts_file(
    pod: Pod, pod_ips: Sequence[str], cluster_domain: str, node_hosts: str, *, override: bool = True
) -> str:
    """Give the file's text; `node_hosts` is the host's own file, for pods on its network.

    `override` is the gate `HostnameOverride`. Raises InvalidHostname.
    """
    aliases = _alias_lines(pod.spec.host_aliases)
    if pod.spec.host_network:
        return HOST_NETWORK_HEADER + node_hosts + aliases
    hostname, domain = pod_hostname(pod, cluster_domain, override=override)
    names = f"{hostname}.{domain}\t{hostname}" if domain else hostname
    return HEADER + _LOCAL + "".join(f"{address}\t{names}\n" for address in pod_ips) + aliases


def _alias_lines(aliases: Iterable[HostAlias]) -> str:
    lines = ["\t".join((alias.ip, *alias.hostnames)) + "\n" for alias in aliases]
    return "".join(["\n# Entries added by HostAliases.\n", *lines]) if lines else ""
