"""Inputs of sandbox and container configs other than the pod: node, volumes, devices, CPUs and lookups.

The builders (`config.py`) use only the pod and these options, so any config can be reproduced in a test, and
compared with a recording of the upstream kubelet's. `RuntimeNodeOptions` is gathered once per process;
`RunSandboxOptions` and `RunContainerOptions` per request.

It also contains capabilities of runtimes that CRI does not report, known by name and version, and the
interface `CpusetAssigner`, which the resource allocator of `podsync` implements with the CPU and memory
managers. Without these managers, containers are unrestricted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.capacity import allocatable, node_capacity, read_page_sizes, unreserved
from pykubelet.cm.devices.run_options import NO_DEVICE_OPTIONS, DeviceNode, DeviceRunOptions
from pykubelet.cm.qos import DEFAULT_PERIOD
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.linux.cgroupfs import can_bound_swap
from pykubelet.linux.kernel import FS, has_selinux
from pykubelet.podconfig.defaults import default_pull_policy
from pykubelet.volumes.plugin import MountedVolume as MountedVolume

ConfigMapLookup = Callable[[str], Mapping[str, str]]
"""Returns the data of a configMap of the pod's namespace. Raises MissingSource if it does not exist."""
SecretLookup = Callable[[str], Mapping[str, bytes]]
"""Returns the data of a secret of the pod's namespace. Raises MissingSource if it does not exist."""
EnvFileReader = Callable[[str, str, str], str]
"""Returns a variable of an environment file, by volume, path and key. Raises OSError and ValueError."""


def no_config_maps(name: str) -> Mapping[str, str]:
    """Raise ContainerConfigError: there is no API server."""
    raise ContainerConfigError(f"couldn't get configMap {name}: this node has no API server to ask")


def no_secrets(name: str) -> Mapping[str, bytes]:
    """Raise ContainerConfigError: there is no API server."""
    raise ContainerConfigError(f"couldn't get secret {name}: this node has no API server to ask")


def no_env_files(volume: str, path: str, key: str) -> str:
    """Raise FileNotFoundError: there are no environment files."""
    raise FileNotFoundError(f"{path} in volume {volume}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeNodeOptions:
    """Properties of the host and settings of the kubelet; the same for every pod."""

    cluster_dns: tuple[str, ...] = ()
    cluster_domain: str = ""
    host_ips: Sequence[str] = ()
    """IP addresses of the node, the preferred family first; they may change."""
    pod_logs_dir: str = "/var/log/pods"
    seccomp_root: str = "/var/lib/kubelet/seccomp"
    """Directory of `Localhost` seccomp profiles."""
    seccomp_default: bool = False
    """Whether containers without a profile get the runtime's default one."""
    masked_paths: tuple[str, ...] = ()
    """Masked paths in addition to the default ones: existing `thermal_throttle` directories of CPUs."""
    selinux: bool = False
    recursive_handlers: Callable[[], frozenset[str]] = frozenset
    """Returns the runtime handlers that support recursive read-only mounts; the default one is ""."""
    cgroup_v2: bool = False
    cpu_quota: bool = True
    """Whether CPU limits are enforced (`cpuCFSQuota`)."""
    cpu_period: int = DEFAULT_PERIOD
    """Microseconds (`cpuCFSQuotaPeriod`); used with the feature gate `CustomCPUCFSQuotaPeriod`."""
    memory_capacity: int = 0
    """Bytes."""
    swap_capacity: int = 0
    """Bytes."""
    swap_controller: bool = False
    """Whether the kernel can limit swap per cgroup."""
    swap_behavior: str = ""
    """`memorySwap.swapBehavior`: "", `NoSwap` or `LimitedSwap`."""
    single_process_oom_kill: bool = True
    """Whether the OOM killer kills one process instead of all of the container (cgroup v2)."""
    memory_throttling_factor: float = 0.9
    memory_reservation_policy: str = "None"
    """`None` or `TieredReservation`."""
    page_size: int = 4096
    huge_page_sizes: tuple[str, ...] = ()
    """Huge page sizes as in the names of cgroup files: `2MB`, `1GB`."""
    allocatable: Resources = field(default_factory=dict)
    """Allocatable resources, as in the node's status."""
    unreserved_memory: int = 0
    """Bytes that all pods together may use: eviction starts below, the cgroup limit applies above."""
    gates: FeatureGates = field(default_factory=FeatureGates)

    @property
    def quota_period(self) -> int:
        """Effective CFS quota period in microseconds."""
        return self.cpu_period if self.gates.enabled("CustomCPUCFSQuotaPeriod") else DEFAULT_PERIOD

    @property
    def pod_level(self) -> bool:
        """Whether pod-level resources are enabled."""
        return self.gates.enabled("PodLevelResources")


@dataclass(frozen=True, slots=True)
class IdRange:
    """Mapping of `length` IDs, from `container_id` in the pod to `host_id` on the host."""

    container_id: int
    host_id: int
    length: int


@dataclass(frozen=True, slots=True)
class IdMappings:
    """ID mappings of a pod's user namespace."""

    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSandboxOptions:
    """Options of one sandbox config."""

    node: RuntimeNodeOptions
    attempt: int = 0
    cgroup_parent: str = ""
    """Cgroup of the pod in the syntax of the runtime's cgroup driver."""
    resolv_conf: str | None = None
    """Content of the host's resolv.conf; None when `resolvConf` is empty."""
    id_mappings: IdMappings | None = None
    """ID mappings for pods with `hostUsers: false`, if the runtime supports them."""
    extra_groups: tuple[int, ...] = ()
    """Supplemental groups required by the pod's volumes."""
    exclusive_cpus: bool = False
    """Whether a container of the pod has exclusive CPUs, which need no quota."""


@dataclass(frozen=True, slots=True)
class CpusetAssignment:
    """CPUs and NUMA nodes assigned to a container."""

    cpus: str = ""
    """CPU list (`0-3,5`); empty: unrestricted."""
    memory_nodes: str = ""
    """NUMA nodes for memory; empty: unrestricted."""
    exclusive: bool = False
    """Whether the CPUs are exclusive to the container."""


UNRESTRICTED = CpusetAssignment()
NO_IMAGE = PresentImage("", 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContainerOptions:
    """Options of one container config."""

    node: RuntimeNodeOptions
    attempt: int = 0
    """Number of previous starts of the container."""
    image: PresentImage = NO_IMAGE
    pod_ips: tuple[str, ...] = ()
    """IP addresses of the sandbox, the preferred family first."""
    id_mappings: IdMappings | None = None
    """ID mappings of its sandbox."""
    extra_groups: tuple[int, ...] = ()
    target_id: str = ""
    """ID of the container whose PID namespace an ephemeral container joins."""
    cpuset: CpusetAssignment = UNRESTRICTED
    device_options: DeviceRunOptions = NO_DEVICE_OPTIONS

    hosts_file: str = ""
    """Host path of the pod's /etc/hosts."""
    termination_log: str = ""
    """Host path of the termination message file of this attempt."""
    volumes: Mapping[str, MountedVolume] = field(default_factory=dict)
    block_volumes: Mapping[str, DeviceNode] = field(default_factory=dict)
    """Devices by volume name; the path in the container is in `volumeDevices`."""
    image_volumes: Mapping[str, cri.ImageSpec] = field(default_factory=dict)
    sub_paths: Mapping[int, str] = field(default_factory=dict)
    """Verified host paths of the mounts with a sub-path, by index of the mount."""
    recursive_read_only: bool = False
    """Whether the runtime handler supports recursive read-only mounts."""

    service_env: Mapping[str, str] | None = field(default_factory=dict)
    """Environment variables of the services visible to the pod; None when they are not synced yet."""
    config_map: ConfigMapLookup = no_config_maps
    secret: SecretLookup = no_secrets
    env_file: EnvFileReader = no_env_files


def gather_node_options(
    config: KubeletConfiguration,
    gates: FeatureGates,
    root_dir: Path,
    host_ips: Sequence[str],
    *,
    cgroup_v2: bool,
    ignore_eviction: bool = False,
    selinux_fs: Path = FS,
) -> RuntimeNodeOptions:
    """Read the properties of the host; they are constant for the process, except `host_ips`.

    `ignore_eviction` is `--experimental-allocatable-ignore-eviction`; `selinux_fs` is the mount point of
    selinuxfs.
    """
    memory = parse_meminfo(Path("/proc/meminfo").read_text())
    capacity = node_capacity(config, root_dir)
    return RuntimeNodeOptions(
        cluster_dns=tuple(config.cluster_dns),
        cluster_domain=config.cluster_domain,
        host_ips=host_ips,
        pod_logs_dir=config.pod_logs_dir,
        seccomp_root=str(root_dir / "seccomp"),
        seccomp_default=config.seccomp_default,
        selinux=has_selinux(selinux_fs),
        masked_paths=tuple(
            sorted(map(str, Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle")))
        ),
        cgroup_v2=cgroup_v2,
        cpu_quota=config.cpu_cfs_quota,
        cpu_period=config.cpu_cfs_quota_period // 1000,
        memory_capacity=memory.get("MemTotal", 0),
        swap_capacity=memory.get("SwapTotal", 0),
        swap_controller=can_bound_swap(unified=cgroup_v2),
        swap_behavior=config.memory_swap.swap_behavior,
        single_process_oom_kill=not cgroup_v2 or bool(config.single_process_oom_kill),
        memory_throttling_factor=config.memory_throttling_factor,
        memory_reservation_policy=config.memory_reservation_policy,
        page_size=os.sysconf("SC_PAGE_SIZE"),
        huge_page_sizes=read_page_sizes(),
        allocatable=allocatable(capacity, config, ignore_eviction=ignore_eviction),
        unreserved_memory=int(unreserved(capacity, config)["memory"]),
        gates=gates,
    )


def with_settings(
    options: RuntimeNodeOptions, config: KubeletConfiguration, capacity: Resources, *, ignore_eviction: bool
) -> RuntimeNodeOptions:
    """Return the options with the settings of the configuration that can change at run time."""
    return replace(
        options,
        cluster_dns=tuple(config.cluster_dns),
        cluster_domain=config.cluster_domain,
        allocatable=allocatable(capacity, config, ignore_eviction=ignore_eviction),
        unreserved_memory=int(unreserved(capacity, config)["memory"]),
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo to bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdecimal():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def block_volumes(volumes: Mapping[str, MountedVolume]) -> dict[str, DeviceNode]:
    """Return the block volumes by name; read-only ones get the permission to read only."""
    return {
        name: DeviceNode(volume.device, "", "r" if volume.read_only else "mrw")
        for name, volume in volumes.items()
        if volume.device
    }


def extra_groups(pod: Pod, volumes: Iterable[MountedVolume]) -> tuple[int, ...]:
    """Return the groups required by volumes that are not in the pod's `supplementalGroups`."""
    required = {volume.group for volume in volumes if volume.group is not None}
    return tuple(sorted(required - set(pod.spec.security_context.supplemental_groups)))


def mounted_image_volumes(
    pod: Pod, container: Container, volumes: Mapping[str, MountedVolume]
) -> dict[str, tuple[str, str]]:
    """Return image and pull policy of the image volumes that a container mounts, by volume name."""
    names = {mount.name for mount in container.volume_mounts}
    policies = {
        volume.name: volume.image.pull_policy for volume in pod.spec.volumes if volume.image is not None
    }
    return {
        name: (volume.image, policies.get(name) or default_pull_policy(volume.image))
        for name, volume in volumes.items()
        if volume.image and name in names
    }


class CpusetAssigner(Protocol):
    """Source of cpuset assignments; no method blocks."""

    def has_exclusive(self, uid: str) -> bool:
        """Return whether a container of this pod has exclusive CPUs."""
        ...

    def assignment_for(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Return the assignment of a container that is about to be created."""
        ...

    def on_container_created(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Record that the runtime has created a container with these CPUs."""
        ...


class UnrestrictedAssigner:
    """Assigner without a CPU or memory manager: all containers are unrestricted."""

    def has_exclusive(self, uid: str) -> bool:
        """Return False."""
        return False

    def assignment_for(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Return the unrestricted assignment."""
        return UNRESTRICTED

    def on_container_created(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Ignore the container."""
