"""Builders of the CRI configs of sandboxes and containers.

Pure functions of the pod and its options: equal input yields an equal config.
"""

from __future__ import annotations

from collections.abc import Iterator

from pykubelet.api.downward_api import expand_all
from pykubelet.api.names import normal_name
from pykubelet.api.pod import Container, ContainerPort, Pod
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.dns import pod_dns
from pykubelet.kuberuntime.configuration.env import container_env
from pykubelet.kuberuntime.configuration.linux_resources import (
    container_resources,
    overhead_resources,
    sandbox_resources,
)
from pykubelet.kuberuntime.configuration.mounts import container_devices, container_mounts, kernel_hostname
from pykubelet.kuberuntime.configuration.options import RunContainerOptions, RunSandboxOptions
from pykubelet.kuberuntime.configuration.security import (
    check_run_as_non_root,
    container_security,
    sandbox_security,
)
from pykubelet.kuberuntime.errors import ContainerConfigError, convert_expansion_errors
from pykubelet.kuberuntime.labels import (
    container_annotations,
    container_labels,
    sandbox_annotations,
    sandbox_labels,
)
from pykubelet.kuberuntime.paths import container_log_path, pod_log_dir


@convert_expansion_errors()
def make_container_config(
    pod: Pod, container: Container, options: RunContainerOptions
) -> cri.ContainerConfig:
    """Return the config of a container; equal input yields an equal config.

    `container` is an ordinary, init or ephemeral container of the pod. Raises ContainerConfigError.
    """
    check_run_as_non_root(pod, container, options)
    env = container_env(pod, container, options)
    try:
        return cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=container.name, attempt=options.attempt),
            image=cri.ImageSpec(image=options.image.id, user_specified_image=container.image),
            command=expand_all(container.command, env),
            args=expand_all(container.args, env),
            working_dir=container.working_dir,
            envs=[
                cri.KeyValue(key=name, value=value.encode(errors="surrogateescape"))
                for name, value in env.items()
            ],
            mounts=container_mounts(pod, container, env, options),
            devices=container_devices(container, options),
            CDI_devices=[cri.CDIDevice(name=name) for name in options.device_options.cdi_devices],
            labels=container_labels(pod, container),
            annotations=container_annotations(
                pod, container, options.attempt, options.device_options.annotations
            ),
            log_path=container_log_path(container.name, options.attempt),
            stdin=container.stdin,
            stdin_once=container.stdin_once,
            tty=container.tty,
            stop_signal=_stop_signal(container, options),
            linux=cri.LinuxContainerConfig(
                resources=container_resources(pod, container, options),
                security_context=container_security(pod, container, options),
            ),
        )
    except UnicodeEncodeError as err:
        raise ContainerConfigError(
            f"container {container.name} holds text that cannot be sent: {err.reason}"
        ) from err


def _stop_signal(container: Container, options: RunContainerOptions) -> str:
    """Return the CRI name of the stop signal; RUNTIME_DEFAULT, the image's, for a signal unknown to CRI."""
    stop_signal = container.lifecycle.stop_signal if container.lifecycle is not None else None
    if stop_signal is None or not options.node.gates.enabled("ContainerStopSignals"):
        return "RUNTIME_DEFAULT"
    name = stop_signal.replace("+", "PLUS").replace("-", "MINUS")
    return name if name in cri.Signal.DESCRIPTOR.values_by_name else "RUNTIME_DEFAULT"


_PROTOCOLS = {"UDP": cri.UDP, "SCTP": cri.SCTP}


def make_sandbox_config(pod: Pod, options: RunSandboxOptions) -> cri.PodSandboxConfig:
    """Return the config of a pod's sandbox; equal input yields an equal config.

    `pod_dns` returns warnings for DNS settings that were omitted. Raises ContainerConfigError.
    """
    meta, node = pod.metadata, options.node
    try:
        return cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(
                name=meta.name, namespace=meta.namespace, uid=meta.uid, attempt=options.attempt
            ),
            hostname=_hostname(pod, options),
            log_directory=pod_log_dir(node.pod_logs_dir, meta.namespace, meta.name, meta.uid),
            dns_config=pod_dns(pod, node, options.resolv_conf).to_message(),
            port_mappings=[
                mapping for container in pod.spec.containers for mapping in port_mappings(container)
            ],
            labels=sandbox_labels(pod),
            annotations=sandbox_annotations(pod),
            linux=cri.LinuxPodSandboxConfig(
                cgroup_parent=options.cgroup_parent,
                security_context=sandbox_security(pod, options),
                sysctls={normal_name(s.name): s.value for s in pod.spec.security_context.sysctls},
                overhead=overhead_resources(pod, node),
                resources=sandbox_resources(pod, options),
            ),
        )
    except UnicodeEncodeError as err:
        raise ContainerConfigError(f"the pod holds text that cannot be sent: {err.reason}") from err


def port_mappings(container: Container) -> Iterator[cri.PortMapping]:
    """Yield a container's port mappings without duplicates."""
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


def _hostname(pod: Pod, options: RunSandboxOptions) -> str:
    if pod.spec.host_network:
        return ""
    node = options.node
    return kernel_hostname(pod, node.cluster_domain, override=node.gates.enabled("HostnameOverride"))


def _identity(port: ContainerPort) -> tuple[str, str, int, int]:
    """Return the key of an unnamed port; the same port may be published once per host IP."""
    return port.protocol, port.host_ip, port.container_port, port.host_port
