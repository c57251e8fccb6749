"""All that a request to the runtime depends on besides the pod.

The makers of requests (`sandbox_config.py`, `container_config.py`) look at nothing but the pod and
these facts, so any request can be made again in a test, and a recording of another agent's requests
can be compared with ours. `NodeFacts` is gathered once; the other two are gathered per request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pykubelet.api.meta import Resources
from pykubelet.config.gates import FeatureGates
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.resources.grants import NOTHING, DeviceGrants, DeviceNode
from pykubelet.resources.qos import DEFAULT_PERIOD
from pykubelet.runtime.problems import ConfigProblem
from pykubelet.volumes.mounted import MountedVolume as MountedVolume

ConfigMapLookup = Callable[[str], Mapping[str, str]]
"""Gives the data of a configMap of the pod's namespace; raises MissingSource when there is none."""
SecretLookup = Callable[[str], Mapping[str, bytes]]
"""Gives the data of a secret of the pod's namespace; raises MissingSource when there is none."""
EnvFileReader = Callable[[str, str, str], str]
"""Returns a variable of an environment file, by volume, path and key. Raises OSError and ValueError."""


def no_config_maps(name: str) -> Mapping[str, str]:
    """Look up configMaps where there is no API server."""
    raise ConfigProblem(f"couldn't get configMap {name}: this node has no API server to ask")


def no_secrets(name: str) -> Mapping[str, bytes]:
    """Look up secrets where there is no API server."""
    raise ConfigProblem(f"couldn't get secret {name}: this node has no API server to ask")


def no_env_files(volume: str, path: str, key: str) -> str:
    """Read environment files where volumes hold none."""
    raise FileNotFoundError(f"{path} in volume {volume}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
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
class SandboxFacts:
    """What the request for one sandbox depends on."""

    node: NodeFacts
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
class ContainerFacts:
    """What the request for one container depends on."""

    node: NodeFacts
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
    grants: DeviceGrants = NOTHING

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
