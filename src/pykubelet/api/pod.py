"""Pod metadata and spec.

Only the fields that the kubelet reads; those of the scheduler and the API server are ignored. The defaults
are Go's zero values; `podconfig/defaults.py` sets Kubernetes' defaults for pods that did not pass through an
API server.
"""

from __future__ import annotations

from typing import Literal

from msgspec import field, structs

from pykubelet.api.meta import IntOrString, ObjectMeta, ObjectStruct, Resources
from pykubelet.api.pod_status import PodStatus
from pykubelet.api.selector import LabelSelector, NodeSelector
from pykubelet.api.volume import ObjectFieldSelector as ObjectFieldSelector
from pykubelet.api.volume import ResourceFieldSelector as ResourceFieldSelector
from pykubelet.api.volume import Volume


class ContainerPort(ObjectStruct):
    """A port of a container, optionally published on the host."""

    name: str = ""
    container_port: int = 0
    host_port: int = 0
    protocol: str = ""
    host_ip: str = ""


class KeySelector(ObjectStruct):
    """A key of a ConfigMap or secret."""

    key: str
    name: str = ""
    optional: bool | None = None


class FileKeySelector(ObjectStruct):
    """A key of an environment file in a volume of the pod."""

    volume_name: str
    path: str
    key: str
    optional: bool | None = None


class EnvVarSource(ObjectStruct):
    """Source of a variable's value."""

    field_ref: ObjectFieldSelector | None = None
    resource_field_ref: ResourceFieldSelector | None = None
    config_map_key_ref: KeySelector | None = None
    secret_key_ref: KeySelector | None = None
    file_key_ref: FileKeySelector | None = None


class EnvVar(ObjectStruct):
    """An environment variable."""

    name: str
    value: str = ""
    value_from: EnvVarSource | None = None


class NamedRef(ObjectStruct):
    """Reference to a ConfigMap or secret by name."""

    name: str = ""
    optional: bool | None = None


class EnvFromSource(ObjectStruct):
    """All keys of a ConfigMap or secret as variables."""

    prefix: str = ""
    config_map_ref: NamedRef | None = None
    secret_ref: NamedRef | None = None


class ExecAction(ObjectStruct):
    """A command in the container."""

    command: list[str] = []


class HTTPHeader(ObjectStruct):
    """A header of a probe or hook request."""

    name: str
    value: str = ""


class HTTPGetAction(ObjectStruct):
    """An HTTP request to the pod."""

    port: IntOrString
    path: str = ""
    host: str = ""
    scheme: str = ""
    http_headers: list[HTTPHeader] = []


class TCPSocketAction(ObjectStruct):
    """A TCP connection to the pod."""

    port: IntOrString
    host: str = ""


class GRPCAction(ObjectStruct):
    """A gRPC health check."""

    port: int
    service: str | None = None


class SleepAction(ObjectStruct):
    """A sleep."""

    seconds: int


class LifecycleHandler(ObjectStruct):
    """Action of a lifecycle hook; exactly one field is set."""

    exec: ExecAction | None = None
    http_get: HTTPGetAction | None = None
    tcp_socket: TCPSocketAction | None = None
    sleep: SleepAction | None = None


class Lifecycle(ObjectStruct):
    """Lifecycle hooks, after the start and before the stop of a container, and the stop signal."""

    post_start: LifecycleHandler | None = None
    pre_stop: LifecycleHandler | None = None
    stop_signal: str | None = None


ProbeAction = ExecAction | HTTPGetAction | TCPSocketAction | GRPCAction


class ProbeHandler(ObjectStruct):
    """Action of a probe; exactly one field is set."""

    exec: ExecAction | None = None
    http_get: HTTPGetAction | None = None
    tcp_socket: TCPSocketAction | None = None
    grpc: GRPCAction | None = None


PROBE_HANDLERS = {field.name: field.encode_name for field in structs.fields(ProbeHandler)}
"""Attributes of a probe's handlers, with their names in manifests."""


def probe_handler(probe: ProbeHandler) -> tuple[str, ProbeAction] | None:
    """Return the attribute and the action of a probe's handler; None without one."""
    for name in PROBE_HANDLERS:
        if (action := getattr(probe, name)) is not None:
            return name, action
    return None


class Probe(ProbeHandler):
    """A probe; zero means the default: period 10 s, timeout 1 s, failure threshold 3, success threshold 1."""

    initial_delay_seconds: int = 0
    timeout_seconds: int = 0
    period_seconds: int = 0
    success_threshold: int = 0
    failure_threshold: int = 0
    termination_grace_period_seconds: int | None = None


class ResourceClaim(ObjectStruct):
    """A resource claim of the pod that a container uses."""

    name: str
    request: str = ""


class ResourceRequirements(ObjectStruct):
    """Resource limits, requests and claims."""

    limits: Resources = {}
    requests: Resources = {}
    claims: list[ResourceClaim] = []


class ResizePolicy(ObjectStruct):
    """Whether a resize of a resource restarts the container."""

    resource_name: str = ""
    restart_policy: str = ""


class VolumeMount(ObjectStruct):
    """Mount of a volume in a container."""

    name: str
    mount_path: str
    read_only: bool = False
    recursive_read_only: str | None = None
    sub_path: str = ""
    sub_path_expr: str = ""
    mount_propagation: str | None = None


class VolumeDevice(ObjectStruct):
    """Device of a block volume in a container."""

    name: str
    device_path: str


class Capabilities(ObjectStruct):
    """Linux capabilities added and dropped."""

    add: list[str] = []
    drop: list[str] = []


class SELinuxOptions(ObjectStruct):
    """An SELinux label."""

    user: str = ""
    role: str = ""
    type: str = ""
    level: str = ""


class Profile(ObjectStruct):
    """A seccomp or AppArmor profile: `RuntimeDefault`, `Unconfined` or `Localhost`."""

    type: str
    localhost_profile: str | None = None


class SecurityContext(ObjectStruct):
    """Privileges of one container."""

    capabilities: Capabilities | None = None
    privileged: bool | None = None
    se_linux_options: SELinuxOptions | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    read_only_root_filesystem: bool | None = None
    allow_privilege_escalation: bool | None = None
    proc_mount: str | None = None
    seccomp_profile: Profile | None = None
    app_armor_profile: Profile | None = None


class Sysctl(ObjectStruct):
    """A sysctl of the pod's namespaces."""

    name: str
    value: str


class PodSecurityContext(ObjectStruct):
    """Privileges and ids that all containers of a pod share."""

    se_linux_options: SELinuxOptions | None = None
    se_linux_change_policy: str | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    supplemental_groups: list[int] = []
    supplemental_groups_policy: str | None = None
    fs_group: int | None = None
    fs_group_change_policy: str | None = None
    sysctls: list[Sysctl] = []
    seccomp_profile: Profile | None = None
    app_armor_profile: Profile | None = None


class ExitCodes(ObjectStruct):
    """Exit codes that a restart rule matches."""

    operator: Literal["In", "NotIn"]
    values: list[int] = []


class RestartRule(ObjectStruct):
    """Action for a container that exits with certain exit codes."""

    action: str
    exit_codes: ExitCodes | None = None


class Container(ObjectStruct):
    """A container: image, process, resources, mounts, probes, privileges.

    Ephemeral containers are the same with `target_container_name`.
    """

    name: str
    image: str = ""
    command: list[str] = []
    args: list[str] = []
    working_dir: str = ""
    ports: list[ContainerPort] = []
    env_from: list[EnvFromSource] = []
    env: list[EnvVar] = []
    resources: ResourceRequirements = field(default_factory=ResourceRequirements)
    resize_policy: list[ResizePolicy] = []
    restart_policy: str | None = None
    restart_policy_rules: list[RestartRule] = []
    volume_mounts: list[VolumeMount] = []
    volume_devices: list[VolumeDevice] = []
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    startup_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    termination_message_path: str = ""
    termination_message_policy: str = ""
    image_pull_policy: str = ""
    security_context: SecurityContext | None = None
    stdin: bool = False
    stdin_once: bool = False
    tty: bool = False
    target_container_name: str = ""


def is_sidecar(container: Container) -> bool:
    """Return whether an init container is a sidecar: it keeps running alongside the containers."""
    return container.restart_policy == "Always"


class HostAlias(ObjectStruct):
    """An entry of /etc/hosts."""

    ip: str
    hostnames: list[str] = []


class DNSOption(ObjectStruct):
    """An option of resolv.conf."""

    name: str = ""
    value: str | None = None


class PodDNSConfig(ObjectStruct):
    """Additions to resolv.conf."""

    nameservers: list[str] = []
    searches: list[str] = []
    options: list[DNSOption] = []


class ReadinessGate(ObjectStruct):
    """A condition, set by another component, that is required for the pod to be ready."""

    condition_type: str


class Toleration(ObjectStruct):
    """A toleration of a taint."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class NodeAffinity(ObjectStruct):
    """Required node affinity; preferences only concern the scheduler."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(ObjectStruct):
    """Affinity of a pod; affinity to other pods only concerns the scheduler."""

    node_affinity: NodeAffinity | None = None


class PodOS(ObjectStruct):
    """The operating system of the pod's containers."""

    name: str = ""


class PodResourceClaim(ObjectStruct):
    """A claim for devices that the pod's containers refer to."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class TopologySpreadConstraint(ObjectStruct):
    """How the scheduler spreads pods over the domains of a topology; a node only validates it."""

    max_skew: int = 0
    topology_key: str = ""
    when_unsatisfiable: str = ""
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str | None = None
    node_taints_policy: str | None = None
    match_label_keys: list[str] = []


class PodSchedulingGroup(ObjectStruct):
    """The group that a pod is scheduled with."""

    pod_group_name: str | None = None


class PodSpec(ObjectStruct):
    """Spec of a pod."""

    containers: list[Container] = []
    init_containers: list[Container] = []
    ephemeral_containers: list[Container] = []
    volumes: list[Volume] = []
    restart_policy: str = ""
    termination_grace_period_seconds: int | None = None
    active_deadline_seconds: int | None = None
    dns_policy: str = ""
    dns_config: PodDNSConfig | None = None
    node_selector: dict[str, str] = {}
    service_account_name: str = ""
    service_account: str = ""
    """Deprecated alias of `service_account_name`."""
    automount_service_account_token: bool | None = None
    node_name: str = ""
    host_network: bool = False
    host_pid: bool = False
    host_ipc: bool = False
    host_users: bool | None = None
    share_process_namespace: bool | None = None
    security_context: PodSecurityContext = field(default_factory=PodSecurityContext)
    image_pull_secrets: list[NamedRef] = []
    hostname: str = ""
    hostname_override: str | None = None
    subdomain: str = ""
    set_hostname_as_fqdn: bool | None = None
    scheduler_name: str = ""
    affinity: Affinity | None = None
    tolerations: list[Toleration] = []
    topology_spread_constraints: list[TopologySpreadConstraint] = []
    host_aliases: list[HostAlias] = []
    priority_class_name: str = ""
    priority: int | None = None
    preemption_policy: str | None = None
    readiness_gates: list[ReadinessGate] = []
    runtime_class_name: str | None = None
    enable_service_links: bool | None = None
    overhead: Resources = {}
    os: PodOS | None = None
    resources: ResourceRequirements | None = None
    resource_claims: list[PodResourceClaim] = []
    scheduling_group: PodSchedulingGroup | None = None


class Pod(ObjectStruct):
    """A pod: metadata, spec and status."""

    kind: str = "Pod"
    api_version: str = "v1"
    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def full_name(self) -> str:
        """`namespace/name`, for messages."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def uid(self) -> str:
        """UID of the pod, unique over time."""
        return self.metadata.uid


class PodList(ObjectStruct):
    """A list of pods."""

    kind: str = "PodList"
    api_version: str = "v1"
    items: list[Pod] = []
