"""KubeletConfiguration v1beta1: every field of the kubelet's configuration file, with its default.

Field names are those of Kubernetes in snake_case (`wire_name` returns the JSON name). The defaults are
upstream's of v1.36, with one deliberate difference: `fail_cgroup_v1` is false, because cgroup v1 nodes are
supported; the kubelet logs a warning instead. `complete` fills in defaults that depend on other fields or
on gates, and `legacy_defaults` returns those of a command line without a file.

`Pointer[...]` marks fields that are pointers upstream. It matters for one thing only: an explicit zero
(`0`, `0s`, `""`, `false`) is a value in a pointer field, while in any other field it means "not set" and
becomes the default. An explicit empty list or map is a value everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import field

from pykubelet.api.duration import Duration
from pykubelet.api.meta import wire_name

API_VERSION = "kubelet.config.k8s.io/v1beta1"
KIND = "KubeletConfiguration"
T = TypeVar("T")


class IntRange(msgspec.Struct, frozen=True):
    """Range of an integer field's type on the wire."""

    low: int
    high: int


class PointerMark(msgspec.Struct, frozen=True):
    """Marker of a field in which an explicit zero counts as set."""


class QuantityMark(msgspec.Struct, frozen=True):
    """Marker of a string that is a quantity: stored in canonical form, and also decoded from a number."""


class NanosecondsMark(msgspec.Struct, frozen=True):
    """Marker of a duration that may also be a number of nanoseconds."""


Int32 = Annotated[int, IntRange(-(2**31), 2**31 - 1)]
Int64 = Annotated[int, IntRange(-(2**63), 2**63 - 1)]
UInt32 = Annotated[int, IntRange(0, 2**32 - 1)]
QuantityText = Annotated[str, QuantityMark()]
Pointer = Annotated[T, PointerMark()]


def _span(text: str) -> Duration:
    return Duration.parse(text)


class ConfigStruct(msgspec.Struct, kw_only=True, rename=wire_name):
    """Base class of all structs of the configuration file."""


class X509Authentication(ConfigStruct):
    """Authentication by client certificate."""

    client_ca_file: str = ""


class WebhookAuthentication(ConfigStruct):
    """Authentication by bearer token, verified with TokenReview."""

    enabled: Pointer[bool] = True
    cache_ttl: Duration = _span("2m")


class AnonymousAuthentication(ConfigStruct):
    """Requests without credentials."""

    enabled: Pointer[bool] = False


class Authentication(ConfigStruct):
    """Authentication of clients of the kubelet's API."""

    x509: X509Authentication = field(default_factory=X509Authentication)
    webhook: WebhookAuthentication = field(default_factory=WebhookAuthentication)
    anonymous: AnonymousAuthentication = field(default_factory=AnonymousAuthentication)


class WebhookAuthorization(ConfigStruct):
    """Cache lifetimes of SubjectAccessReview results."""

    cache_authorized_ttl: Duration = _span("5m")
    cache_unauthorized_ttl: Duration = _span("30s")


class Authorization(ConfigStruct):
    """Authorization of clients of the kubelet's API: `AlwaysAllow` or `Webhook`."""

    mode: str = "Webhook"
    webhook: WebhookAuthorization = field(default_factory=WebhookAuthorization)


class MemorySwap(ConfigStruct):
    """Swap available to workloads: "", `NoSwap` or `LimitedSwap`."""

    swap_behavior: str = ""


class OutputRouting(ConfigStruct):
    """Output options of a log format."""

    split_stream: bool = False
    info_buffer_size: QuantityText = "0"


class LogFormats(ConfigStruct):
    """Options per log format."""

    text: OutputRouting = field(default_factory=OutputRouting)
    json: OutputRouting = field(default_factory=OutputRouting)


class VModuleItem(ConfigStruct):
    """Verbosity for source files that match a pattern."""

    file_pattern: str = ""
    verbosity: UInt32 = 0


class Logging(ConfigStruct):
    """The kubelet's own logs, in format `text` or `json`."""

    format: str = "text"
    flush_frequency: Annotated[Duration, NanosecondsMark()] = _span("5s")
    verbosity: UInt32 = 0
    vmodule: list[VModuleItem] = []
    options: LogFormats = field(default_factory=LogFormats)


class ShutdownGracePeriodByPodPriority(ConfigStruct):
    """Grace period in seconds of pods with at least this priority at node shutdown."""

    priority: Int32 = 0
    shutdown_grace_period_seconds: Int64 = 0


class CrashLoopBackOff(ConfigStruct):
    """Maximum back-off delay before restarting a crashing container."""

    max_container_restart_period: Pointer[Duration | None] = None


class MemoryReservation(ConfigStruct):
    """Memory of one NUMA node that is reserved from pods."""

    numa_node: Int32 = 0
    limits: dict[str, QuantityText] = {}


class Taint(ConfigStruct):
    """Taint to register the node with."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: Pointer[str | None] = None


class Tracing(ConfigStruct):
    """Export of OpenTelemetry spans."""

    endpoint: Pointer[str | None] = None
    sampling_rate_per_million: Pointer[Int32 | None] = None


class UserNamespaces(ConfigStruct):
    """Number of user and group IDs of each pod with a user namespace."""

    ids_per_pod: Pointer[Int64 | None] = None


class KubeletConfiguration(ConfigStruct):
    """The kubelet's configuration, as in the file and at `/configz`."""

    kind: str = KIND
    api_version: str = API_VERSION

    # Pod sources and servers.
    enable_server: Pointer[bool] = True
    static_pod_path: str = ""
    pod_logs_dir: str = "/var/log/pods"
    sync_frequency: Duration = _span("1m")
    file_check_frequency: Duration = _span("20s")
    http_check_frequency: Duration = _span("20s")
    static_pod_url: str = ""
    static_pod_url_header: dict[str, list[str]] = {}
    address: str = "0.0.0.0"
    port: Int32 = 10250
    read_only_port: Int32 = 0
    tls_cert_file: str = ""
    tls_private_key_file: str = ""
    tls_cipher_suites: list[str] = []
    tls_curve_preferences: list[Int32] = []
    tls_min_version: str = ""
    rotate_certificates: bool = False
    server_tls_bootstrap: bool = False
    authentication: Authentication = field(default_factory=Authentication)
    authorization: Authorization = field(default_factory=Authorization)

    # Image pulls, events and debugging endpoints.
    registry_pull_qps: Pointer[Int32] = 5
    registry_burst: Int32 = 10
    image_pull_credentials_verification_policy: str = "NeverVerifyPreloadedImages"
    preloaded_images_verification_allowlist: list[str] = []
    event_record_qps: Pointer[Int32] = 50
    event_burst: Int32 = 100
    enable_debugging_handlers: Pointer[bool] = True
    enable_contention_profiling: bool = False

    # Health, DNS and node status.
    healthz_port: Pointer[Int32] = 10248
    healthz_bind_address: str = "127.0.0.1"
    oom_score_adj: Pointer[Int32] = -999
    cluster_domain: str = ""
    cluster_dns: list[str] = []
    streaming_connection_idle_timeout: Duration = _span("4h")
    node_status_update_frequency: Duration = _span("10s")
    node_status_report_frequency: Duration = _span("5m")
    node_lease_duration_seconds: Int32 = 40

    # Garbage collection of images, and volume statistics.
    image_minimum_gc_age: Duration = _span("2m")
    image_maximum_gc_age: Duration = Duration(0)
    image_gc_high_threshold_percent: Pointer[Int32] = 85
    image_gc_low_threshold_percent: Pointer[Int32] = 80
    volume_stats_agg_period: Duration = _span("1m")

    # Cgroups, CPUs, memory and topology.
    kubelet_cgroups: str = ""
    system_cgroups: str = ""
    cgroup_root: str = ""
    cgroups_per_qos: Pointer[bool] = True
    cgroup_driver: str = "cgroupfs"
    cpu_manager_policy: str = "none"
    single_process_oom_kill: Pointer[bool | None] = None
    cpu_manager_policy_options: dict[str, str] = {}
    cpu_manager_reconcile_period: Duration = _span("10s")
    memory_manager_policy: str = "None"
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"
    topology_manager_policy_options: dict[str, str] = {}
    qos_reserved: dict[str, str] = {}

    # Pods and the container runtime.
    runtime_request_timeout: Duration = _span("2m")
    hairpin_mode: str = "promiscuous-bridge"
    max_pods: Int32 = 110
    pod_cidr: str = ""
    pod_pids_limit: Pointer[Int64] = -1
    resolv_conf: Pointer[str] = "/etc/resolv.conf"
    run_once: bool = False
    cpu_cfs_quota: Pointer[bool] = True
    cpu_cfs_quota_period: Pointer[Duration] = _span("100ms")
    node_status_max_images: Pointer[Int32] = 50
    max_open_files: Int64 = 1000000

    # Client of the API server.
    content_type: str = "application/vnd.kubernetes.protobuf"
    kube_api_qps: Pointer[Int32] = 50
    kube_api_burst: Int32 = 100

    # Parallel image pulls.
    serialize_image_pulls: Pointer[bool] = True
    max_parallel_image_pulls: Pointer[Int32 | None] = None

    # Eviction.
    eviction_hard: dict[str, str] = {}
    eviction_soft: dict[str, str] = {}
    eviction_soft_grace_period: dict[str, str] = {}
    eviction_pressure_transition_period: Duration = _span("5m")
    eviction_max_pod_grace_period: Int32 = 0
    eviction_minimum_reclaim: dict[str, str] = {}
    merge_default_eviction_settings: Pointer[bool] = False

    # Node limits and the network.
    pods_per_core: Int32 = 0
    enable_controller_attach_detach: Pointer[bool] = True
    protect_kernel_defaults: bool = False
    make_iptables_util_chains: Pointer[bool] = True
    iptables_masquerade_bit: Pointer[Int32] = 14
    iptables_drop_bit: Pointer[Int32] = 15

    # Feature gates, swap, container logs.
    feature_gates: dict[str, bool] = {}
    fail_swap_on: Pointer[bool] = True
    memory_swap: MemorySwap = field(default_factory=MemorySwap)
    container_log_max_size: str = "10Mi"
    container_log_max_files: Pointer[Int32] = 5
    container_log_max_workers: Pointer[Int32] = 1
    container_log_monitor_interval: Pointer[Duration] = _span("10s")
    # field(): the linter takes a string literal next to "secret" for a password.
    config_map_and_secret_change_detection_strategy: str = field(default="Watch")

    # Reserved resources and their enforcement.
    system_reserved: dict[str, str] = {}
    kube_reserved: dict[str, str] = {}
    reserved_system_cpus: str = ""
    show_hidden_metrics_for_version: str = ""
    system_reserved_cgroup: str = ""
    kube_reserved_cgroup: str = ""
    enforce_node_allocatable: list[str] = field(default_factory=lambda: ["pods"])
    allowed_unsafe_sysctls: list[str] = []
    volume_plugin_dir: str = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/"
    provider_id: str = ""
    kernel_memcg_notification: bool = False

    # The kubelet's own logs, and node shutdown.
    logging: Logging = field(default_factory=Logging)
    enable_system_log_handler: Pointer[bool] = True
    enable_system_log_query: Pointer[bool] = False
    shutdown_grace_period: Duration = Duration(0)
    shutdown_grace_period_critical_pods: Duration = Duration(0)
    shutdown_grace_period_by_pod_priority: list[ShutdownGracePeriodByPodPriority] = []
    crash_loop_back_off: CrashLoopBackOff = field(default_factory=CrashLoopBackOff)
    reserved_memory: list[MemoryReservation] = []

    # Newer fields.
    enable_profiling_handler: Pointer[bool] = True
    enable_debug_flags_handler: Pointer[bool] = True
    seccomp_default: Pointer[bool] = False
    memory_throttling_factor: Pointer[float] = 0.9
    memory_reservation_policy: str = "None"
    register_with_taints: list[Taint] = []
    register_node: Pointer[bool] = True
    tracing: Pointer[Tracing | None] = None
    local_storage_capacity_isolation: Pointer[bool] = True
    container_runtime_endpoint: str = "unix:///run/containerd/containerd.sock"
    image_service_endpoint: str = ""
    fail_cgroup_v1: Pointer[bool] = False  # upstream: True; see the module docstring
    user_namespaces: Pointer[UserNamespaces | None] = None


DEFAULT_EVICTION_HARD: Mapping[str, str] = {
    "memory.available": "100Mi",
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
}
LONGEST_RESTART_PAUSE = Duration.parse("5m")
GATED_FIELDS = ("crashLoopBackOff", "imagePullCredentialsVerificationPolicy")
"""Fields that have a default only if a feature gate is enabled."""


def complete(
    config: KubeletConfiguration, explicit: Container[str], gate_enabled: Callable[[str], bool]
) -> None:
    """Fill in defaults that depend on other fields; `explicit` has the JSON names of the fields that are set.

    A field that is set keeps its value, with one exception: any negative `podPidsLimit` becomes -1.
    """
    if "nodeStatusReportFrequency" not in explicit and "nodeStatusUpdateFrequency" in explicit:
        # A configured update frequency also applies to reports.
        config.node_status_report_frequency = config.node_status_update_frequency
    if "serializeImagePulls" not in explicit:
        config.serialize_image_pulls = (config.max_parallel_image_pulls or 1) < 2
    if config.pod_pids_limit < 0:
        config.pod_pids_limit = -1
    if "evictionHard" not in explicit:
        config.eviction_hard = dict(DEFAULT_EVICTION_HARD)
    elif config.merge_default_eviction_settings:
        config.eviction_hard = {**DEFAULT_EVICTION_HARD, **config.eviction_hard}
    back_off = config.crash_loop_back_off
    if back_off.max_container_restart_period is None and gate_enabled("KubeletCrashLoopBackOffMax"):
        back_off.max_container_restart_period = LONGEST_RESTART_PAUSE
    policy_set = "imagePullCredentialsVerificationPolicy" in explicit
    if not policy_set and not gate_enabled("KubeletEnsureSecretPulledImages"):
        config.image_pull_credentials_verification_policy = ""


def legacy_defaults() -> KubeletConfiguration:
    """Return the defaults of a node without a configuration file.

    As upstream, these are the old, permissive defaults, because command lines from before the file existed
    rely on them.
    """
    config = KubeletConfiguration(read_only_port=10255)
    config.authentication.anonymous.enabled = True
    config.authentication.webhook.enabled = False
    config.authorization.mode = "AlwaysAllow"
    return config
