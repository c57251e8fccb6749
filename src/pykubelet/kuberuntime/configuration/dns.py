"""DNS config of pods: from the DNS policy, `dnsConfig`, the cluster DNS and the host's resolv.conf.

Resolvers ignore or fail on entries above their limits (three nameservers, 32 search domains, 2048
characters), so these are omitted, with a warning that becomes an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pykubelet.api.ip import parse_ip
from pykubelet.api.pod import DNSOption, Pod
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.errors import ContainerConfigError

MAX_SERVERS = 3
MAX_SEARCHES = 32
MAX_SEARCH_LINE = 2048
MAX_DOMAIN = 253
_CLUSTER_OPTIONS = ("ndots:5",)


@dataclass(frozen=True, slots=True)
class DNSWarning:
    """An event of type Warning about the pod, and about the node as well if `node_message` is set."""

    reason: str
    message: str
    node_message: str = ""


@dataclass(frozen=True, slots=True)
class PodDNS:
    """DNS config of a pod, with warnings about omitted entries."""

    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    warnings: tuple[DNSWarning, ...] = ()

    def to_message(self) -> cri.DNSConfig:
        """Return it as a CRI DNSConfig."""
        return cri.DNSConfig(servers=self.servers, searches=self.searches, options=self.options)


def pod_dns(pod: Pod, node: RuntimeNodeOptions, resolv_conf: str | None) -> PodDNS:
    """Return a pod's DNS config; `resolv_conf` is the content of the host's file, None without one.

    Raises ContainerConfigError for a malformed file.
    """
    base = PodDNS() if resolv_conf is None else parse_resolv_conf(resolv_conf)
    warnings: list[DNSWarning] = []
    policy = pod.spec.dns_policy
    from_host = policy == "Default" or (policy == "ClusterFirst" and pod.spec.host_network)
    if policy == "None":
        base = PodDNS()
    elif not from_host and node.cluster_dns:
        searches = _cluster_searches(pod.metadata.namespace, node.cluster_domain, base.searches)
        base = PodDNS(node.cluster_dns, searches, _CLUSTER_OPTIONS)
    else:
        if not from_host:
            warnings.append(_missing_cluster_dns(pod))
        if resolv_conf is None:
            base = _local_only(node.host_ips)
    if dns_config := pod.spec.dns_config:
        base = PodDNS(
            _unique((*base.servers, *dns_config.nameservers)),
            _unique((*base.searches, *dns_config.searches)),
            _merged_options(base.options, dns_config.options),
        )
    return _within_limits(base, warnings)


def parse_resolv_conf(text: str) -> PodDNS:
    """Parse a resolv.conf: nameservers accumulate, the last search line counts, options by name.

    Raises ContainerConfigError for a `nameserver` line without an address.
    """
    servers: list[str] = []
    searches: tuple[str, ...] = ()
    options: dict[str, str] = {}
    for line in text.split("\n"):
        keyword, *values = line.split() or [""]
        if keyword == "nameserver":
            if not values:
                raise ContainerConfigError("the host's resolv.conf has a nameserver line without an address")
            servers.append(values[0])
        elif keyword == "search":
            # Without the trailing dot, so that duplicates are recognized; the root domain is skipped.
            searches = tuple(value.removesuffix(".") for value in values if value != ".")
        elif keyword == "options":
            options |= {value.partition(":")[0]: value for value in values}
    return PodDNS(tuple(servers), searches, tuple(options.values()))


def check_resolv_conf(path: Path, cluster_domain: str) -> str:
    """Return the message of the node's CheckLimitsForResolvConf event, "" if the host's file is valid."""
    try:
        return resolv_conf_problem(path.read_text(errors="replace"), str(path), cluster_domain)
    except OSError as err:
        return f"open {path}: {(err.strerror or str(err)).lower()}"
    except ContainerConfigError as err:
        return str(err)


def resolv_conf_problem(text: str, path: str, cluster_domain: str) -> str:
    """Return which limit the search line of the host's resolv.conf exceeds, "" for none.

    Raises ContainerConfigError for a malformed file.
    """
    searches = parse_resolv_conf(text).searches
    max_searches = MAX_SEARCHES - (3 if cluster_domain else 0)
    if len(searches) > max_searches:
        return (
            f"Resolv.conf file '{path}' contains search line consisting of more than {max_searches} domains!"
        )
    if any(len(search) > MAX_DOMAIN for search in searches):
        return (
            f'Resolv.conf file "{path}" contains a search path '
            f"which length is more than allowed {MAX_DOMAIN} chars!"
        )
    if len(" ".join(searches)) > MAX_SEARCH_LINE:
        return (
            f"Resolv.conf file '{path}' contains search line "
            f"which length is more than allowed {MAX_SEARCH_LINE} chars!"
        )
    return ""


def _cluster_searches(namespace: str, domain: str, host: tuple[str, ...]) -> tuple[str, ...]:
    if not domain:
        return host
    return _unique((f"{namespace}.svc.{domain}", f"svc.{domain}", domain, *host))


def _missing_cluster_dns(pod: Pod) -> DNSWarning:
    meta = pod.metadata
    message = (
        "kubelet does not have ClusterDNS IP configured "
        'and cannot create Pod using "ClusterFirst" policy. Falling back to "Default" policy.'
    )
    return DNSWarning(
        "MissingClusterDNS", f'pod: "{meta.name}_{meta.namespace}({meta.uid})". {message}', message
    )


def _local_only(host_ips: Sequence[str]) -> PodDNS:
    """Return a config that does not use the host's DNS: a nameserver on the pod's loopback."""
    servers = tuple("::1" if parse_ip(address).version == 6 else "127.0.0.1" for address in host_ips)
    return PodDNS(servers or ("127.0.0.1",), (".",))


def _merged_options(base: tuple[str, ...], overrides: Iterable[DNSOption]) -> tuple[str, ...]:
    options = {name: value for name, _, value in (option.partition(":") for option in base)}
    options |= {option.name: option.value or "" for option in overrides}
    return tuple(f"{name}:{value}" if value else name for name, value in options.items())


def _within_limits(dns: PodDNS, warnings: list[DNSWarning]) -> PodDNS:
    servers = dns.servers[:MAX_SERVERS]
    if servers != dns.servers:
        line = " ".join(servers)
        warnings.append(
            DNSWarning(
                "DNSConfigForming",
                "Nameserver limits were exceeded, some nameservers have been omitted, "
                f"the applied nameserver line is: {line}",
            )
        )
    # Some resolvers abort on a search domain that is too long.
    searches = tuple(search for search in dns.searches[:MAX_SEARCHES] if len(search) <= MAX_DOMAIN)
    while len(line := " ".join(searches)) > MAX_SEARCH_LINE:
        searches = searches[:-1]
    if searches != dns.searches:
        warnings.append(
            DNSWarning(
                "DNSConfigForming",
                "Search Line limits were exceeded, some search paths have been omitted, "
                f"the applied search line is: {line}",
            )
        )
    return PodDNS(servers, searches, dns.options, tuple(warnings))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
