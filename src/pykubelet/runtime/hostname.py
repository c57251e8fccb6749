"""A pod's host name: what it calls itself, and what the kernel is told.

The name is the pod's, or what the spec says instead; with a subdomain the pod also has a full name
in the cluster's domain. A name that is too long for the kernel is cut, because pod names may be
longer than host names; a full name that is too long is refused, because a cut one would be wrong.
"""

from __future__ import annotations

from pykubelet.api.names import dns_label_problem, dns_subdomain_problem
from pykubelet.api.pod import Pod
from pykubelet.runtime.problems import InvalidHostname

LONGEST_NAME = 63
LONGEST_FULL_NAME = 64


def pod_hostname(pod: Pod, cluster_domain: str, *, override: bool = True) -> tuple[str, str]:
    """Give a pod's host name and its domain ("" when it has none).

    `override` is the gate `HostnameOverride`. Raises InvalidHostname.
    """
    spec = pod.spec
    if override and spec.hostname_override is not None:
        if problem := dns_subdomain_problem(spec.hostname_override):
            raise InvalidHostname(
                f'pod HostnameOverride "{spec.hostname_override}" is not a valid DNS subdomain: {problem}'
            )
        return _cut(pod, spec.hostname_override), ""
    if spec.hostname and (problem := dns_label_problem(spec.hostname)):
        raise InvalidHostname(f'pod Hostname "{spec.hostname}" is not a valid DNS label: {problem}')
    hostname = _cut(pod, spec.hostname or pod.metadata.name)
    if not spec.subdomain:
        return hostname, ""
    if problem := dns_label_problem(spec.subdomain):
        raise InvalidHostname(f'pod Subdomain "{spec.subdomain}" is not a valid DNS label: {problem}')
    return hostname, f"{spec.subdomain}.{pod.metadata.namespace}.svc.{cluster_domain}"


def kernel_hostname(pod: Pod, cluster_domain: str, *, override: bool = True) -> str:
    """Give the name that the pod's kernel namespace gets: the full one if the spec says so.

    Raises InvalidHostname.
    """
    hostname, domain = pod_hostname(pod, cluster_domain, override=override)
    if not (domain and pod.spec.set_hostname_as_fqdn):
        return hostname
    full = f"{hostname}.{domain}"
    if len(full) > LONGEST_FULL_NAME:
        raise InvalidHostname(
            f"failed to construct FQDN from pod hostname and cluster domain, FQDN {full} is too long "
            f"({LONGEST_FULL_NAME} characters is the max, {len(full)} characters requested)"
        )
    return full


def _cut(pod: Pod, hostname: str) -> str:
    if len(hostname) <= LONGEST_NAME:
        return hostname
    cut = hostname[:LONGEST_NAME].rstrip("-.")
    if not cut:
        raise InvalidHostname(f'hostname for pod "{pod.metadata.name}" was invalid: "{hostname}"')
    return cut
