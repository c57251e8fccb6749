"""KubeletConfiguration v1beta1: every field of the node's configuration file, with its default.

The names are Kubernetes' own in snake_case (`api.casing` gives the JSON name), the defaults are
those of the reference v1.36, with one deliberate difference: `fail_cgroup_v1` is false, because
the nodes we serve are still cgroup v1; the agent warns instead.

`Pointer[...]` marks the fields that the reference keeps as pointers. It matters for one thing
only: an explicit zero (`0`, `0s`, `""`, `false`) in a pointer field is obeyed, while in any other
field it means "not set" and becomes the default. An empty list or map that is written out is a
value everywhere. Defaults that depend on other fields are filled in by `defaults.py`.

The defaults that depend on other fields, on gates, or on there being a file at all.

All other defaults are in `types.py`, next to their fields.
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
    """The values that an integer field can hold on the wire."""

    low: int
    high: int


class PointerMark(msgspec.Struct, frozen=True):
    """Marks a field whose explicit zero is a value and not an absence."""


class QuantityMark(msgspec.Struct, frozen=True):
    """Marks a text that is a quantity: kept in canonical form, and also read from a bare number."""


class NanosecondsMark(msgspec.Struct, frozen=True):
    """Marks a duration that may also be written as a number of nanoseconds."""


Int32 = Annotated[int, IntRange(-(2**31), 2**31 - 1)]
Int64 = Annotated[int, IntRange(-(2**63), 2**63 - 1)]
UInt32 = Annotated[int, IntRange(0, 2**32 - 1)]
QuantityText = Annotated[str, QuantityMark()]
Pointer = Annotated[T, PointerMark()]


def _span(text: str) -> Duration:
    return Duration.parse(text)


class ConfigStruct(msgspec.Struct, kw_only=True, rename=wire_name):
    """Common shape of everything in the configuration file."""


class X509Authentication(ConfigStruct):
    """Clients that show a certificate."""

    client_ca_file: str = ""


class WebhookAuthentication(ConfigStruct):
    """Clients that show a bearer token, checked by the API server."""

    enabled: Pointer[bool] = True
    cache_ttl: Duration = _span("2m")


class AnonymousAuthentication(ConfigStruct):
    """Clients that show nothing."""

    enabled: Pointer[bool] = False


class Authentication(ConfigStruct):
    """Who may speak to the agent's API."""

    x509: X509Authentication = field(default_factory=X509Authentication)
    webhook: WebhookAuthentication = field(default_factory=WebhookAuthentication)
    anonymous: AnonymousAuthentication = field(default_factory=AnonymousAuthentication)


class WebhookAuthorization(ConfigStruct):
    """How long the API server's answers are remembered."""

    cache_authorized_ttl: Duration = _span("5m")
    cache_unauthorized_ttl: Duration = _span("30s")


class Authorization(ConfigStruct):
    """What an authenticated client may do: `AlwaysAllow` or `Webhook`."""

    mode: str = "Webhook"
    webhook: WebhookAuthorization = field(default_factory=WebhookAuthorization)


class MemorySwap(ConfigStruct):
    """How much swap workloads get: "", `NoSwap` or `LimitedSwap`."""

    swap_behavior: str = ""


class OutputRouting(ConfigStruct):
    """Where a log format sends its lines."""

    split_stream: bool = False
    info_buffer_size: QuantityText = "0"


class LogFormats(ConfigStruct):
    """Options per log format."""

    text: OutputRouting = field(default_factory=OutputRouting)
    json: OutputRouting = field(default_factory=OutputRouting)


class VModuleItem(ConfigStruct):
    """A verbosity for the files that match a pattern."""

    file_pattern: str = ""
    verbosity: UInt32 = 0


class Logging(ConfigStruct):
    """The agent's own logging: `text` or `json`."""

    format: str = "text"
    flush_frequency: Annotated[Duration, NanosecondsMark()] = _span("5s")
    verbosity: UInt32 = 0
    vmodule: list[VModuleItem] = []
    options: LogFormats = field(default_factory=LogFormats)


class ShutdownGracePeriodByPodPriority(ConfigStruct):
    """Seconds that pods of at least this priority get when the machine shuts down."""

    priority: Int32 = 0
    shutdown_grace_period_seconds: Int64 = 0


class CrashLoopBackOff(ConfigStruct):
    """How long the pause before restarting a crashing container may grow."""

    max_container_restart_period: Pointer[Duration | None] = None


class MemoryReservation(ConfigStruct):
    """Memory of one NUMA node that pods do not get."""

    numa_node: Int32 = 0
    limits: dict[str, QuantityText] = {}


class Taint(ConfigStruct):
    """A taint that the node registers with."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: Pointer[str | None] = None


class Tracing(ConfigStruct):
    """Where OpenTelemetry spans go."""

    endpoint: Pointer[str | None] = None
    sampling_rate_per_million: Pointer[Int32 | None] = None


class UserNamespaces(ConfigStruct):
    """How many ids each pod with its own user namespace gets."""

    ids_per_pod: Pointer[Int64 | None] = None


class KubeletConfiguration(ConfigStruct):
    """The node's configuration, as in the file and at `/configz`."""

    kind: str = KIND
    api_version: str = API_VERSION

    # What the agent takes pods from, and what it serves.
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

    # Images, events and the debugging surfaces.
    registry_pull_qps: Pointer[Int32] = 5
    registry_burst: Int32 = 10
    image_pull_credentials_verification_policy: str = "NeverVerifyPreloadedImages"
    preloaded_images_verification_allowlist: list[str] = []
    event_record_qps: Pointer[Int32] = 50
    event_burst: Int32 = 100
    enable_debugging_handlers: Pointer[bool] = True
    enable_contention_profiling: bool = False

    # Health, identity on the network, and reporting.
    healthz_port: Pointer[Int32] = 10248
    healthz_bind_address: str = "127.0.0.1"
    oom_score_adj: Pointer[Int32] = -999
    cluster_domain: str = ""
    cluster_dns: list[str] = []
    streaming_connection_idle_timeout: Duration = _span("4h")
    node_status_update_frequency: Duration = _span("10s")
    node_status_report_frequency: Duration = _span("5m")
    node_lease_duration_seconds: Int32 = 40

    # Images and volumes kept and collected.
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

    # Pods and the runtime.
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

    # The API server.
    content_type: str = "application/vnd.kubernetes.protobuf"
    kube_api_qps: Pointer[Int32] = 50
    kube_api_burst: Int32 = 100

    # Pulling images.
    serialize_image_pulls: Pointer[bool] = True
    max_parallel_image_pulls: Pointer[Int32 | None] = None

    # Keeping the machine alive.
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

    # Gates, swap, logs of containers.
    feature_gates: dict[str, bool] = {}
    fail_swap_on: Pointer[bool] = True
    memory_swap: MemorySwap = field(default_factory=MemorySwap)
    container_log_max_size: str = "10Mi"
    container_log_max_files: Pointer[Int32] = 5
    container_log_max_workers: Pointer[Int32] = 1
    container_log_monitor_interval: Pointer[Duration] = _span("10s")
    # field(): next to "secret", a bare text looks like a password to the linter.
    config_map_and_secret_change_detection_strategy: str = field(default="Watch")

    # What is reserved for the system, and enforced.
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

    # The agent's own logs, and shutting down with the machine.
    logging: Logging = field(default_factory=Logging)
    enable_system_log_handler: Pointer[bool] = True
    enable_system_log_query: Pointer[bool] = False
    shutdown_grace_period: Duration = Duration(0)
    shutdown_grace_period_critical_pods: Duration = Duration(0)
    shutdown_grace_period_by_pod_priority: list[ShutdownGracePeriodByPodPriority] = []
    crash_loop_back_off: CrashLoopBackOff = field(default_factory=CrashLoopBackOff)
    reserved_memory: list[MemoryReservation] = []

    # Everything newer.
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
    fail_cgroup_v1: Pointer[bool] = False  # the reference says True; see the module docstring
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
"""Fields whose default exists only while a gate is on."""


def complete(
    config: KubeletConfiguration, explicit: Container[str], gate_enabled: Callable[[str], bool]
) -> None:
    """Fill in what follows from the rest; `explicit` has the JSON names of the fields that were set.

    A field that was set is left alone, with one exception: any negative `podPidsLimit` means -1.
    """
    if "nodeStatusReportFrequency" not in explicit and "nodeStatusUpdateFrequency" in explicit:
        # Whoever chose how often the status is computed wants it reported as often.
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
    """Give what a node that has no configuration file starts from.

    The reference keeps the old, open defaults there, because command lines from before the file
    existed rely on them.
    """
    config = KubeletConfiguration(read_only_port=10255)
    config.authentication.anonymous.enabled = True
    config.authentication.webhook.enabled = False
    config.authorization.mode = "AlwaysAllow"
    return config
