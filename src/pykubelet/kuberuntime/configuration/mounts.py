"""Mounts and devices of containers, /etc/hosts, and hostnames.

Volumes are already mounted on the host; `container_mounts` only decides how each appears in the container.
Sub-paths are different: the pod's author chooses them inside a volume that others may write to, so the caller
must open them safely before (`sub_path` returns the path) and passes the result in the options.

The first line of /etc/hosts marks it as managed, for other tools and for the next kubelet process; it is
followed by the local names, the pod's own IP addresses and the `hostAliases`. A pod with hostNetwork gets a
copy of the host's file instead.

A pod's hostname is its name, or that of the spec; with a subdomain the pod also has an FQDN in the cluster
domain. A name that is too long for the kernel is truncated, because pod names may be longer than hostnames;
an FQDN that is too long is rejected, because a truncated one would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pykubelet.api.downward_api import expand_with
from pykubelet.api.names import dns_label_problem, dns_subdomain_problem
from pykubelet.api.pod import Container, HostAlias, Pod, VolumeMount
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.options import IdMappings, RunContainerOptions
from pykubelet.kuberuntime.configuration.security import id_messages
from pykubelet.kuberuntime.errors import ContainerConfigError, InvalidHostname, convert_expansion_errors
from pykubelet.util.text import readable

LONGEST_NAME = 63
LONGEST_FULL_NAME = 64


def pod_hostname(pod: Pod, cluster_domain: str, *, override: bool = True) -> tuple[str, str]:
    """Return a pod's hostname and its domain ("" when it has none).

    `override` is the feature gate `HostnameOverride`. Raises InvalidHostname.
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
    """Return the hostname of the pod's UTS namespace: the FQDN with `setHostnameAsFQDN`.

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
    truncated = hostname[:LONGEST_NAME].rstrip("-.")
    if not truncated:
        raise InvalidHostname(f'hostname for pod "{pod.metadata.name}" was invalid: "{hostname}"')
    return truncated


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


def should_mount_hosts_file(pod: Pod, pod_ips: Sequence[str]) -> bool:
    """Return whether the pod needs a hosts file: not before it has an IP address."""
    return bool(pod_ips) or pod.spec.host_network


def hosts_file(
    pod: Pod, pod_ips: Sequence[str], cluster_domain: str, node_hosts: str, *, override: bool = True
) -> str:
    """Return the content of the hosts file; `node_hosts` is the host's file, for pods with hostNetwork.

    `override` is the feature gate `HostnameOverride`. Raises InvalidHostname.
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


HOSTS_PATH = "/etc/hosts"
_PROPAGATION = {
    None: cri.PROPAGATION_PRIVATE,
    "None": cri.PROPAGATION_PRIVATE,
    "HostToContainer": cri.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": cri.PROPAGATION_BIDIRECTIONAL,
}


def container_mounts(
    pod: Pod, container: Container, env: Mapping[str, str], options: RunContainerOptions
) -> list[cri.Mount]:
    """Return a container's mounts, in the order of its spec. Raises ContainerConfigError."""
    mounts = [
        cri.Mount(
            host_path=device_mount.host_path,
            container_path=device_mount.container_path,
            readonly=device_mount.read_only,
        )
        for device_mount in options.device_options.mounts
    ]
    mounts += [
        _volume_mount(container, index, mount, env, options)
        for index, mount in enumerate(container.volume_mounts)
    ]
    covered = any(mount.mount_path == HOSTS_PATH for mount in container.volume_mounts)
    if options.hosts_file and not covered and should_mount_hosts_file(pod, options.pod_ips):
        mounts.append(_own_file(options.hosts_file, HOSTS_PATH, options))
    if options.termination_log and container.termination_message_path:
        mounts.append(
            _own_file(options.termination_log, absolute_path(container.termination_message_path), options)
        )
    if options.id_mappings is not None and pod.spec.host_users is False:
        _map_ids(mounts, options.id_mappings)
    return mounts


def container_devices(container: Container, options: RunContainerOptions) -> list[cri.Device]:
    """Return a container's devices: allocated ones and block volumes. Raises ContainerConfigError."""
    devices = [
        cri.Device(host_path=d.host_path, container_path=d.container_path, permissions=d.permissions)
        for d in options.device_options.devices
    ]
    for volume_device in container.volume_devices:
        if not volume_device.device_path.startswith("/"):
            raise ContainerConfigError(
                f"error DevicePath `{volume_device.device_path}` must be an absolute path"
            )
        volume = options.block_volumes.get(volume_device.name)
        if volume is None:
            raise ContainerConfigError(
                f'cannot find volume "{volume_device.name}" to pass into container "{container.name}"'
            )
        devices.append(
            cri.Device(
                host_path=volume.host_path,
                container_path=volume_device.device_path,
                permissions=volume.permissions,
            )
        )
    return devices


def sub_path(mount: VolumeMount, env: Mapping[str, str]) -> str:
    """Return the path inside the volume that is mounted, "" for the whole volume.

    Raises ContainerConfigError when a variable in it has no value or it leads out of the volume.
    """
    path = _expanded(mount.sub_path_expr, env) if mount.sub_path_expr else mount.sub_path
    if path.startswith("/"):
        raise ContainerConfigError(f"error SubPath `{readable(path)}` must not be an absolute path")
    if ".." in path.split("/"):
        raise ContainerConfigError(f"unable to provision SubPath `{readable(path)}`: must not contain '..'")
    return path


def _expanded(expression: str, env: Mapping[str, str]) -> str:
    missing: set[str] = set()

    def value(name: str) -> str:
        if not env.get(name):
            missing.add(name)
        return env.get(name, "")

    with convert_expansion_errors():
        path = expand_with(expression, value)
    if missing:
        raise ContainerConfigError(f"missing value for {', '.join(sorted(missing))}")
    return path


def _volume_mount(
    container: Container, index: int, mount: VolumeMount, env: Mapping[str, str], options: RunContainerOptions
) -> cri.Mount:
    path_in_volume = sub_path(mount, env)
    message = cri.Mount(
        container_path=absolute_path(mount.mount_path),
        readonly=mount.read_only,
        propagation=_propagation(mount),
        recursive_read_only=_recursive_read_only(mount, options.recursive_read_only),
    )
    if image := options.image_volumes.get(mount.name):
        message.image.CopyFrom(image)
        message.image_sub_path = path_in_volume
        message.readonly = True
        return message
    volume = options.volumes.get(mount.name)
    if volume is None:
        raise ContainerConfigError(
            f'cannot find volume "{mount.name}" to mount into container "{container.name}"'
        )
    host_path = options.sub_paths.get(index) if path_in_volume else volume.path
    if host_path is None:
        raise ContainerConfigError(
            f'failed to prepare subPath for volumeMount "{mount.name}" of container "{container.name}"'
        )
    message.host_path = host_path
    message.readonly = mount.read_only or volume.read_only
    message.selinux_relabel = volume.relabel and options.node.selinux
    return message


def _own_file(host_path: str, container_path: str, options: RunContainerOptions) -> cri.Mount:
    return cri.Mount(host_path=host_path, container_path=container_path, selinux_relabel=options.node.selinux)


def _map_ids(mounts: list[cri.Mount], mappings: IdMappings) -> None:
    """Add the pod's ID mappings to each mount."""
    for mount in mounts:
        mount.uidMappings.extend(id_messages(mappings.uids))
        mount.gidMappings.extend(id_messages(mappings.gids))


def absolute_path(path: str) -> str:
    """Return the path of a mount in the container, which a manifest may give without the first slash."""
    return path if path.startswith("/") else f"/{path}"


def _propagation(mount: VolumeMount) -> cri.MountPropagation:
    if mount.mount_propagation not in _PROPAGATION:
        raise ContainerConfigError(f'invalid MountPropagation mode: "{mount.mount_propagation}"')
    return _PROPAGATION[mount.mount_propagation]


def _recursive_read_only(mount: VolumeMount, supported: bool) -> bool:
    mode = mount.recursive_read_only
    if mode in (None, "Disabled"):
        return False
    problem = ""
    if not mount.read_only:
        problem = "it is not read-only"
    elif mount.mount_propagation not in (None, "None"):
        problem = f'it is not compatible with propagation "{mount.mount_propagation}"'
    elif mode not in ("IfPossible", "Enabled"):
        problem = f'the mode "{mode}" is not known'
    elif mode == "Enabled" and not supported:
        problem = "it is not supported by the runtime"
    if problem:
        raise ContainerConfigError(
            "failed to resolve recursive read-only mode: "
            f'volume "{mount.name}" requested recursive read-only mode, but {problem}'
        )
    return supported
