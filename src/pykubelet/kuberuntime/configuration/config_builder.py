"""Builder of the CRI configs of sandboxes and containers with all their inputs.

The container starter calls `ConfigBuilder`, which gathers the inputs with I/O (files of the pod, API objects,
image volumes, sub-paths, cpusets) and passes them as options to the pure functions of `config.py`. No state
is kept. After a failure, the next start writes /etc/hosts and creates a termination log again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.devices.run_options import NO_DEVICE_OPTIONS, DeviceRunOptions
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.configuration.container_images import ContainerImages
from pykubelet.kuberuntime.configuration.cri_configs import make_container_config, make_sandbox_config
from pykubelet.kuberuntime.configuration.dns import DNSWarning, pod_dns
from pykubelet.kuberuntime.configuration.env import container_env, gather_env_sources
from pykubelet.kuberuntime.configuration.mounts import hosts_file, should_mount_hosts_file, sub_path
from pykubelet.kuberuntime.configuration.options import (
    CpusetAssigner,
    IdMappings,
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
    UnrestrictedAssigner,
    block_volumes,
)
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.objects.base import NoObjects, PodObjects
from pykubelet.objects.services import no_services
from pykubelet.volumes.plugin import MountedVolume

PrepareSubPaths = Callable[
    [Pod, Container, Mapping[str, MountedVolume], Mapping[int, str]], Awaitable[dict[int, str]]
]
"""Prepares sub-paths of volumes for a container, by index of the mount. Raises VolumeError."""
PrepareDevices = Callable[[Pod, Container], Awaitable[DeviceRunOptions]]
"""Returns the device options of a container that is about to start. Raises AllocationError."""


@dataclass(frozen=True, slots=True)
class PodStartContext:
    """Options shared by a pod's containers, gathered before the first of them starts."""

    cgroup_parent: str
    volumes: dict[str, MountedVolume]
    id_mappings: IdMappings | None = None
    extra_groups: tuple[int, ...] = ()


class ConfigBuilder:
    """Builds the configs of sandboxes and containers."""

    def __init__(
        self,
        node: RuntimeNodeOptions,
        dirs: PodDirs,
        images: ContainerImages,
        sub_paths: PrepareSubPaths,
        read_resolv_conf: Callable[[], str | None],
        *,
        objects: PodObjects | None = None,
        services: Callable[[Pod], Mapping[str, str] | None] = no_services,
        devices: PrepareDevices | None = None,
        cpusets: CpusetAssigner | None = None,
    ) -> None:
        """Initialize with the node and the sources of inputs.

        `read_resolv_conf` returns the content of the host's resolv.conf, `services` the environment variables
        of the services visible to a pod, None while they are not synced.
        """
        self._node = node
        self._dirs = dirs
        self._images = images
        self._sub_paths = sub_paths
        self._read_resolv_conf = read_resolv_conf
        self._objects = objects or NoObjects()
        self._services = services
        self._devices = devices
        self._cpusets = cpusets or UnrestrictedAssigner()

    def set_node(self, node: RuntimeNodeOptions) -> None:
        """Replace the node's options for sandboxes and containers that are created afterwards."""
        self._node = node

    def sandbox_config(self, pod: Pod, attempt: int, context: PodStartContext) -> pb.PodSandboxConfig:
        """Return the config of the pod's sandbox. Raises ContainerConfigError and OSError."""
        options = RunSandboxOptions(
            node=self._node,
            attempt=attempt,
            cgroup_parent=context.cgroup_parent,
            resolv_conf=self._read_resolv_conf(),
            id_mappings=context.id_mappings,
            extra_groups=context.extra_groups,
            exclusive_cpus=self._cpusets.has_exclusive(pod.uid),
        )
        return make_sandbox_config(pod, options)

    def dns_warnings(self, pod: Pod) -> tuple[DNSWarning, ...]:
        """Return the warnings about DNS settings that the sandbox config omits."""
        return pod_dns(pod, self._node, self._read_resolv_conf()).warnings

    async def prepare_devices(self, pod: Pod, container: Container) -> DeviceRunOptions:
        """Return the device options of a container that is about to start. Raises AllocationError."""
        return NO_DEVICE_OPTIONS if self._devices is None else await self._devices(pod, container)

    async def container_config(
        self,
        pod: Pod,
        container: Container,
        image: PresentImage,
        attempt: int,
        context: PodStartContext,
        ips: Sequence[str],
        observed: ObservedPod,
        sandbox: pb.PodSandboxConfig,
        device_options: DeviceRunOptions,
        runtime_handler: str,
    ) -> pb.ContainerConfig:
        """Return the config of a container, with its files and sub-paths prepared.

        Raises ContainerConfigError, VolumeError and OSError, and StartError if an image volume cannot be
        pulled.
        """
        self._dirs.make(pod.uid)
        hosts_path = self._write_hosts_file(pod, ips)
        termination_log = ""
        if container.termination_message_path:
            termination_log = str(self._dirs.new_termination_log(pod.uid, container.name))
        sources = await gather_env_sources(self._objects, pod, container, context.volumes)
        options = RunContainerOptions(
            node=self._node,
            attempt=attempt,
            image=image,
            pod_ips=tuple(ips),
            id_mappings=context.id_mappings,
            extra_groups=context.extra_groups,
            target_id=_target(container, observed),
            device_options=device_options,
            hosts_file=hosts_path,
            termination_log=termination_log,
            volumes=context.volumes,
            block_volumes=block_volumes(context.volumes),
            recursive_read_only=runtime_handler in self._node.recursive_handlers(),
            service_env=self._services(pod),
            config_map=sources.config_map,
            secret=sources.secret,
            env_file=sources.file_value,
        )
        image_volumes = await self._images.ensure_volumes(pod, container, context.volumes, sandbox)
        options = replace(options, image_volumes=image_volumes)
        options = replace(options, sub_paths=await self._prepare_sub_paths(pod, container, options))
        options = replace(options, cpuset=self._cpusets.assignment_for(pod, container))
        return make_container_config(pod, container, options)

    def _write_hosts_file(self, pod: Pod, ips: Sequence[str]) -> str:
        """Write the pod's /etc/hosts and return its path; "" if the pod has none."""
        if not should_mount_hosts_file(pod, ips):
            return ""
        node_hosts = _node_hosts() if pod.spec.host_network else ""
        override = self._node.gates.enabled("HostnameOverride")
        content = hosts_file(pod, ips, self._node.cluster_domain, node_hosts, override=override)
        return str(self._dirs.write_hosts(pod.uid, content))

    async def _prepare_sub_paths(
        self, pod: Pod, container: Container, options: RunContainerOptions
    ) -> dict[int, str]:
        sub_path_mounts = [
            (index, mount)
            for index, mount in enumerate(container.volume_mounts)
            if (mount.sub_path or mount.sub_path_expr) and mount.name not in options.image_volumes
        ]
        if not sub_path_mounts:
            return {}
        env = container_env(pod, container, options)
        paths = {index: sub_path(mount, env) for index, mount in sub_path_mounts}
        return await self._sub_paths(
            pod, container, options.volumes, {i: path for i, path in paths.items() if path}
        )


def _node_hosts() -> str:
    try:
        return Path("/etc/hosts").read_text()
    except FileNotFoundError:
        return ""


def _target(container: Container, observed: ObservedPod) -> str:
    """Return the target container ID of an ephemeral container. Raises ContainerConfigError without one."""
    if not container.target_container_name:
        return ""
    target = observed.latest(container.target_container_name)
    if target is None:
        raise ContainerConfigError(f"unable to find target container {container.target_container_name}")
    return target.id
