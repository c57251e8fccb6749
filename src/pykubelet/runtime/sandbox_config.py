"""The request for a pod's sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from pykubelet.api.pod import Container, ContainerPort, Pod
from pykubelet.api.sysctl import normal_name
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.runtime.dns import pod_dns
from pykubelet.runtime.facts import SandboxFacts
from pykubelet.runtime.hostname import kernel_hostname
from pykubelet.runtime.labels import sandbox_annotations, sandbox_labels
from pykubelet.runtime.linux_resources import overhead_resources, sandbox_resources
from pykubelet.runtime.names import pod_log_dir
from pykubelet.runtime.problems import ConfigProblem
from pykubelet.runtime.security import sandbox_security

_PROTOCOLS = {"UDP": cri.UDP, "SCTP": cri.SCTP}


def make_sandbox_config(pod: Pod, facts: SandboxFacts) -> cri.PodSandboxConfig:
    """Make the request; the same pod and facts always give the same one.

    What of the pod's DNS wishes was left out, `pod_dns` tells. Raises ConfigProblem.
    """
    meta, node = pod.metadata, facts.node
    try:
        return cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(
                name=meta.name, namespace=meta.namespace, uid=meta.uid, attempt=facts.attempt
            ),
            hostname=_hostname(pod, facts),
            log_directory=pod_log_dir(node.pod_logs_dir, meta.namespace, meta.name, meta.uid),
            dns_config=pod_dns(pod, node, facts.resolv_conf).to_message(),
            port_mappings=[
                mapping for container in pod.spec.containers for mapping in port_mappings(container)
            ],
            labels=sandbox_labels(pod),
            annotations=sandbox_annotations(pod),
            linux=cri.LinuxPodSandboxConfig(
                cgroup_parent=facts.cgroup_parent,
                security_context=sandbox_security(pod, facts),
                sysctls={normal_name(s.name): s.value for s in pod.spec.security_context.sysctls},
                overhead=overhead_resources(pod, node),
                resources=sandbox_resources(pod, facts),
            ),
        )
    except UnicodeEncodeError as err:
        raise ConfigProblem(f"the pod holds text that cannot be sent: {err.reason}") from err


def port_mappings(container: Container) -> Iterator[cri.PortMapping]:
    """Give a container's ports, each once."""
    seen: set[str | tuple[str, str, int, int]] = set()
    for port in container.ports:
        key = port.name or _identity(port)
        if key not in seen:
            seen.add(key)
            yield cri.PortMapping(
                protocol=_PROTOCOLS.get(port.protocol, cri.TCP),
                container_port=port.container_port,
                host_port=port.host_port,
                host_ip=port.host_ip,
            )


def _hostname(pod: Pod, facts: SandboxFacts) -> str:
    if pod.spec.host_network:
        return ""
    node = facts.node
    return kernel_hostname(pod, node.cluster_domain, override=node.gates.enabled("HostnameOverride"))


def _identity(port: ContainerPort) -> tuple[str, str, int, int]:
    """Tell ports without a name apart; the same port may be published once per address."""
    return port.protocol, port.host_ip, port.container_port, port.host_port
