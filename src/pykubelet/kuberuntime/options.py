"""All that a request to the runtime depends on besides the pod.

The makers of requests (`sandbox_config.py`, `container_config.py`) look at nothing but the pod and
these facts, so any request can be made again in a test, and a recording of another agent's requests
can be compared with ours. `RuntimeNodeOptions` is gathered once; the other two are gathered per request.

Gathers what every request to the runtime depends on: the machine, and the agent's settings.

What mounted volumes mean for containers beyond their mounts: devices, images, groups of processes.

What runtimes can do that CRI does not let one ask for: known by their names and versions.

Which CPUs and whose memory a container may use, as the makers of requests are told it.

Who gives them is above this room; here is only what is asked when a container is made. On most nodes the
answer is always the same: all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.capacity import allocatable, machine_amounts, read_page_sizes, unreserved
from pykubelet.cm.devices.run_options import NOTHING, DeviceNode, DeviceRunOptions
from pykubelet.cm.qos import DEFAULT_PERIOD
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.linux.cgroupfs import can_bound_swap
from pykubelet.linux.kernel import FS, has_selinux
from pykubelet.podconfig.defaults import default_pull_policy
from pykubelet.volumes.plugin import MountedVolume as MountedVolume

ConfigMapLookup = Callable[[str], Mapping[str, str]]
"""Gives the data of a configMap of the pod's namespace; raises MissingSource when there is none."""
SecretLookup = Callable[[str], Mapping[str, bytes]]
"""Gives the data of a secret of the pod's namespace; raises MissingSource when there is none."""
EnvFileReader = Callable[[str, str, str], str]
"""Returns a variable of an environment file, by volume, path and key. Raises OSError and ValueError."""


def no_config_maps(name: str) -> Mapping[str, str]:
    """Look up configMaps where there is no API server."""
    raise ContainerConfigError(f"couldn't get configMap {name}: this node has no API server to ask")


def no_secrets(name: str) -> Mapping[str, bytes]:
    """Look up secrets where there is no API server."""
    raise ContainerConfigError(f"couldn't get secret {name}: this node has no API server to ask")


def no_env_files(volume: str, path: str, key: str) -> str:
    """Read environment files where volumes hold none."""
    raise FileNotFoundError(f"{path} in volume {volume}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeNodeOptions:
    """The machine and the agent's settings; the same for every pod."""

    cluster_dns: tuple[str, ...] = ()
    cluster_domain: str = ""
    host_ips: Sequence[str] = ()
    """The node's addresses, the preferred family first; they may change."""
    pod_logs_dir: str = "/var/log/pods"
    seccomp_root: str = "/var/lib/kubelet/seccomp"
    """Where `Localhost` profiles are."""
    seccomp_default: bool = False
    """Whether containers that name no profile get the runtime's."""
    masked_paths: tuple[str, ...] = ()
    """Paths to hide besides the usual: the cpus' `thermal_throttle` folders, where they exist."""
    selinux: bool = False
    recursive_handlers: frozenset[str] = frozenset()
    """The runtime's handlers that can make mounts read-only all the way down; the default one is ""."""
    cgroup_v2: bool = False
    cpu_quota: bool = True
    """Whether cpu limits are enforced (`cpuCFSQuota`)."""
    cpu_period: int = DEFAULT_PERIOD
    """Microseconds (`cpuCFSQuotaPeriod`); heeded where the gate `CustomCPUCFSQuotaPeriod` is on."""
    memory_capacity: int = 0
    """Bytes."""
    swap_capacity: int = 0
    """Bytes."""
    swap_controller: bool = False
    """Whether the kernel can bound swap per cgroup."""
    swap_behavior: str = ""
    """`memorySwap.swapBehavior`: "", `NoSwap` or `LimitedSwap`."""
    single_process_oom_kill: bool = True
    """Whether the OOM killer takes one process instead of the container's all (cgroup v2)."""
    memory_throttling_factor: float = 0.9
    memory_reservation_policy: str = "None"
    """`None` or `TieredReservation`."""
    page_size: int = 4096
    huge_page_sizes: tuple[str, ...] = ()
    """As the kernel's cgroup files write them: `2MB`, `1GB`."""
    allocatable: Resources = field(default_factory=dict)
    """What pods may ask for together, as the node's status tells it."""
    unreserved_memory: int = 0
    """Bytes that pods may use together: eviction begins below that, the kernel steps in above."""
    gates: FeatureGates = field(default_factory=FeatureGates)

    @property
    def quota_period(self) -> int:
        """Microseconds over which quotas are measured."""
        return self.cpu_period if self.gates.enabled("CustomCPUCFSQuotaPeriod") else DEFAULT_PERIOD

    @property
    def pod_level(self) -> bool:
        """Whether resources of the whole pod count."""
        return self.gates.enabled("PodLevelResources")


@dataclass(frozen=True, slots=True)
class IdRange:
    """`length` ids beginning with `container_id` in the pod are those beginning with `host_id` outside."""

    container_id: int
    host_id: int
    length: int


@dataclass(frozen=True, slots=True)
class IdMappings:
    """A pod's user namespace."""

    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSandboxOptions:
    """What the request for one sandbox depends on."""

    node: RuntimeNodeOptions
    attempt: int = 0
    cgroup_parent: str = ""
    """The pod's cgroup as the runtime's cgroup driver writes it."""
    resolv_conf: str | None = None
    """The text of the host's resolv.conf; None when the setting `resolvConf` is empty."""
    id_mappings: IdMappings | None = None
    """Given for pods with `hostUsers: false` where the runtime can do it."""
    extra_groups: tuple[int, ...] = ()
    """Groups that the pod's volumes ask for."""
    exclusive_cpus: bool = False
    """Whether a container of the pod has cpus of its own: its quota would only hurt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContainerOptions:
    """What the request for one container depends on."""

    node: RuntimeNodeOptions
    attempt: int = 0
    """How often the container was started before."""
    image_id: str = ""
    """The runtime's reference of the image that is there."""
    image_uid: int | None = 0
    """The image's own user by number; None when it is known by `image_username` only."""
    image_username: str = ""
    pod_ips: tuple[str, ...] = ()
    """The sandbox's addresses, the preferred family first."""
    id_mappings: IdMappings | None = None
    """The same as its sandbox has."""
    extra_groups: tuple[int, ...] = ()
    target_id: str = ""
    """The container whose processes an ephemeral container shall see."""
    exclusive_cpus: bool = False
    """Whether this container has cpus of its own."""
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    grants: DeviceRunOptions = NOTHING

    hosts_file: str = ""
    """The pod's /etc/hosts on the host."""
    termination_log: str = ""
    """The file on the host, made for this attempt, that the termination message is written to."""
    volumes: Mapping[str, MountedVolume] = field(default_factory=dict)
    block_volumes: Mapping[str, DeviceNode] = field(default_factory=dict)
    """By the volume's name; the container's path is taken from its `volumeDevices`."""
    image_volumes: Mapping[str, cri.ImageSpec] = field(default_factory=dict)
    sub_paths: Mapping[int, str] = field(default_factory=dict)
    """Safe paths on the host of the mounts that have a sub-path, by the mount's index."""
    recursive_read_only: bool = False
    """Whether the runtime's handler can make mounts read-only all the way down."""

    service_env: Mapping[str, str] | None = field(default_factory=dict)
    """Variables of the services that the pod sees; None when they are not known yet."""
    config_map: ConfigMapLookup = no_config_maps
    secret: SecretLookup = no_secrets
    env_file: EnvFileReader = no_env_files


def gather_node_facts(
    config: KubeletConfiguration,
    gates: FeatureGates,
    root_dir: Path,
    host_ips: Sequence[str],
    *,
    cgroup_v2: bool,
    ignore_eviction: bool = False,
    selinux_fs: Path = FS,
) -> RuntimeNodeOptions:
    """Read the machine once; none of this changes while the agent runs, but `host_ips` may.

    `ignore_eviction` is `--experimental-allocatable-ignore-eviction`; `selinux_fs` is where the kernel
    tells of SELinux.
    """
    memory = parse_meminfo(Path("/proc/meminfo").read_text())
    capacity = machine_amounts(config, root_dir)
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


def recursive_handlers(runtime: pb.StatusResponse) -> frozenset[str]:
    """Give the runtime's handlers that can make mounts read-only all the way down."""
    handlers = runtime.runtime_handlers
    return frozenset(handler.name for handler in handlers if handler.features.recursive_read_only_mounts)


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo: bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdecimal():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def block_volumes(volumes: Mapping[str, MountedVolume]) -> dict[str, DeviceNode]:
    """Give the volumes that are block devices, by name; one that is read-only may only be read."""
    return {
        name: DeviceNode(volume.device, "", "r" if volume.read_only else "mrw")
        for name, volume in volumes.items()
        if volume.device
    }


def extra_groups(pod: Pod, volumes: Iterable[MountedVolume]) -> tuple[int, ...]:
    """Give the groups that volumes ask for and that the pod's processes do not have anyway."""
    asked = {volume.group for volume in volumes if volume.group is not None}
    return tuple(sorted(asked - set(pod.spec.security_context.supplemental_groups)))


def wanted_images(
    pod: Pod, container: Container, volumes: Mapping[str, MountedVolume]
) -> dict[str, tuple[str, str]]:
    """Give the images that a container mounts as volumes, by the volumes' names, each with a pull policy."""
    names = {mount.name for mount in container.volume_mounts}
    policies = {
        volume.name: volume.image.pull_policy for volume in pod.spec.volumes if volume.image is not None
    }
    return {
        name: (volume.image, policies.get(name) or default_pull_policy(volume.image))
        for name, volume in volumes.items()
        if volume.image and name in names
    }


_NUMBERS = re.compile(r"v?(\d+)\.(\d+)")
_MOUNTS_IMAGES = {"containerd": (2, 1), "cri-o": (1, 31)}
_KNOWS_CDI = {"containerd": (1, 7)}


def can_mount_images(name: str, version: str) -> bool:
    """Whether a runtime mounts an image as a volume; one that is not known is taken to."""
    return _is_new_enough(name, version, _MOUNTS_IMAGES)


def knows_cdi(name: str, version: str) -> bool:
    """Whether a runtime knows devices by their CDI names; one that is not known is taken to."""
    return _is_new_enough(name, version, _KNOWS_CDI)


def _is_new_enough(name: str, version: str, table: Mapping[str, tuple[int, int]]) -> bool:
    first = table.get(name)
    found = _NUMBERS.match(version)
    if first is None or found is None:
        return True
    return (int(found[1]), int(found[2])) >= first


@dataclass(frozen=True, slots=True)
class CpusetAssignment:
    """A container's part of the machine."""

    cpus: str = ""
    """The CPUs to run on (`0-3,5`); empty: wherever the kernel puts it."""
    memory_nodes: str = ""
    """The NUMA nodes to take memory from; empty: any."""
    exclusive: bool = False
    """Whether nobody else runs on these CPUs."""


class CpusetAssigner(Protocol):
    """Who knows the shares; all answers are at hand."""

    def has_exclusive(self, uid: str) -> bool:
        """Whether a container of this pod has CPUs of its own."""
        ...

    def of(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Give the share of a container that is about to be made."""
        ...

    def made(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Take note that the runtime has made a container that runs on these CPUs."""
        ...


class UnrestrictedAssigner:
    """The shares where nothing is given out: everybody may use everything."""

    def has_exclusive(self, uid: str) -> bool:
        """Nobody has."""
        return False

    def of(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Give all there is."""
        return ALL

    def made(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Nobody has to know."""


ALL = CpusetAssignment()
