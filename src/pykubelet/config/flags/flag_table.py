"""Table of all flags: those of v1.36, and those of v1.25 that existing nodes still pass.

The rows are grouped by topic, in the order of the help: the node (configuration, name, cluster, clients),
pods (sources, containers, images, volumes), resources (cgroups, CPUs, memory, reservations, eviction,
statistics), the kubelet's own logs, and flags accepted only for compatibility. A row defines the target of
a flag, and the target the default; no other code contains either.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pykubelet.api.meta import wire_name
from pykubelet.config.flags.flag import (
    BOOL,
    DURATION,
    GATES,
    HEADERS,
    INT,
    INT32,
    IP,
    LABELS,
    LEVEL,
    MAP,
    OPTION,
    QUANTITY,
    RESERVED_MEMORY,
    SEVERITY,
    STRING,
    STRINGS,
    TAINTS,
    THRESHOLDS,
    TRACE_LOCATION,
    UINT,
    VERSION,
    VMODULE,
    Flag,
    FlagType,
    deprecated,
    flag_only,
    group,
    in_both,
    in_file,
    without_effect,
)
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.util.text import quoted


def _cloud_provider(text: str) -> str:
    if text not in ("", "external"):
        raise ValueError(
            f"the built-in provider {quoted(text)} does not exist any more: write external and run the "
            "provider's own controller, or leave the flag out"
        )
    return text


CLOUD_PROVIDER = FlagType("string", _cloud_provider)
NODE_FLAGS = (
    *group(
        "General",
        flag_only("help", BOOL, "Show this help and exit.", short="h"),
        flag_only("version", VERSION, "Show the version and exit; --version=raw shows every detail."),
        flag_only(
            "config", STRING, "Configuration file (KubeletConfiguration, YAML or JSON). Flags win over it."
        ),
        flag_only(
            "config-dir", STRING, "Directory of *.conf drop-ins, merged over --config in lexical order."
        ),
        flag_only("watch-config", BOOL, "Apply changes of --config and --config-dir when the files change."),
        flag_only(
            "use-last-good-config",
            BOOL,
            "Start with the last valid configuration if the files are invalid; implied by --watch-config.",
        ),
        in_file(
            "feature-gates", GATES, "feature_gates", "Turn features on or off, such as EventedPLEG=true."
        ),
        flag_only(
            "root-dir", STRING, "Directory for everything the agent keeps: pods, volumes, checkpoints."
        ),
        flag_only(
            "device-plugin-dir",
            STRING,
            "Directory of kubelet.sock for device plugins; they expect the default for any --root-dir.",
        ),
        flag_only("lock-file", STRING, "File to lock, so that two agents never run at once."),
        flag_only("exit-on-lock-contention", BOOL, "Exit when another process opens the lock file."),
        in_file("runonce", BOOL, "run_once", "Start the pods of files and URLs, then exit."),
        in_file("oom-score-adj", INT32, "oom_score_adj", "The agent's own OOM score, from -1000 to 1000."),
        in_file("max-open-files", INT, "max_open_files", "How many files the agent may have open."),
        in_file("fail-swap-on", BOOL, "fail_swap_on", "Refuse to start while swap is on."),
        in_both("fail-cgroupv1", BOOL, "fail_cgroup_v1", "Refuse to start on a machine with cgroup v1."),
        in_file(
            "protect-kernel-defaults",
            BOOL,
            "protect_kernel_defaults",
            "Refuse to start when kernel settings differ from what is needed, instead of changing them.",
        ),
    ),
    *group(
        "The node in its cluster",
        flag_only("kubeconfig", STRING, "How to reach the API server. Without it the agent runs standalone."),
        flag_only(
            "pod-checkpoint-dir",
            STRING,
            "Directory where pods of the API server are kept, to bring them back while it is unreachable.",
        ),
        flag_only(
            "drain-on-stop",
            BOOL,
            "Terminate all pods within shutdownGracePeriod when the agent is stopped by SIGTERM or SIGINT.",
        ),
        flag_only(
            "bootstrap-kubeconfig",
            STRING,
            "Credentials to request the node's own with, while --kubeconfig does not exist yet.",
        ),
        flag_only("hostname-override", STRING, "Name of the node, instead of the machine's host name."),
        flag_only("node-ip", STRING, "Address of the node, or an IPv4 and an IPv6 one separated by a comma."),
        flag_only("node-labels", LABELS, "Labels to register the node with, such as role=web."),
        in_file("register-node", BOOL, "register_node", "Register with the API server."),
        in_file(
            "register-with-taints",
            TAINTS,
            "register_with_taints",
            "Taints to register with, key=value:effect.",
        ),
        flag_only(
            "cloud-provider", CLOUD_PROVIDER, "`external` when a cloud controller initializes the node."
        ),
        in_both("provider-id", STRING, "provider_id", "The machine's identity at its cloud provider."),
        in_file(
            "node-status-update-frequency",
            DURATION,
            "node_status_update_frequency",
            "How often the node's status is computed, and reported if it changed.",
        ),
        in_file(
            "node-status-max-images",
            INT32,
            "node_status_max_images",
            "Images to list in the node's status; -1: all.",
        ),
        in_file("kube-api-qps", INT32, "kube_api_qps", "Requests a second to the API server."),
        in_file("kube-api-burst", INT32, "kube_api_burst", "Requests to the API server in a burst."),
        in_file("kube-api-content-type", STRING, "content_type", "Encoding of requests to the API server."),
        in_file("event-qps", INT32, "event_record_qps", "Events a second."),
        in_file("event-burst", INT32, "event_burst", "Events in a burst."),
        deprecated(
            "register-schedulable",
            BOOL,
            "Register the node so that pods are scheduled to it at once.",
            "use --register-with-taints=node.kubernetes.io/unschedulable=:NoSchedule",
        ),
    ),
    *group(
        "API and security",
        in_file("enable-server", BOOL, "enable_server", "Serve the agent's API."),
        in_file("address", IP, "address", "Address to serve on; 0.0.0.0 or :: for all."),
        in_file("port", INT32, "port", "Port of the API."),
        in_file("read-only-port", INT32, "read_only_port", "Port without authentication; 0: none."),
        flag_only("page-port", INT32, "Port of the page for operators, 4194 by convention; 0: none."),
        flag_only(
            "page-address", IP, "Address of the page; other than loopback: TLS and authorization as the API."
        ),
        Flag(
            "cadvisor-port",
            INT32,
            "Port of the page for operators.",
            "deprecated",
            attribute="page_port",
            note="use --page-port",
        ),
        in_file("healthz-bind-address", IP, "healthz_bind_address", "Address of the health endpoint."),
        in_file("healthz-port", INT32, "healthz_port", "Port of the health endpoint; 0: none."),
        in_file(
            "enable-debugging-handlers",
            BOOL,
            "enable_debugging_handlers",
            "Serve logs, exec, attach and forward.",
        ),
        in_file(
            "contention-profiling",
            BOOL,
            "enable_contention_profiling",
            "Profile what tasks wait for (/debug/pprof/block).",
        ),
        in_file(
            "streaming-connection-idle-timeout",
            DURATION,
            "streaming_connection_idle_timeout",
            "How long an exec, attach or forward may be silent; 0: for ever.",
        ),
        in_file(
            "anonymous-auth", BOOL, "authentication.anonymous.enabled", "Let clients in that show nothing."
        ),
        in_file(
            "authentication-token-webhook",
            BOOL,
            "authentication.webhook.enabled",
            "Have the API server check bearer tokens.",
        ),
        in_file(
            "authentication-token-webhook-cache-ttl",
            DURATION,
            "authentication.webhook.cache_ttl",
            "How long checked tokens are remembered.",
        ),
        in_file("authorization-mode", STRING, "authorization.mode", "AlwaysAllow or Webhook."),
        in_file(
            "authorization-webhook-cache-authorized-ttl",
            DURATION,
            "authorization.webhook.cache_authorized_ttl",
            "How long a permission is remembered.",
        ),
        in_file(
            "authorization-webhook-cache-unauthorized-ttl",
            DURATION,
            "authorization.webhook.cache_unauthorized_ttl",
            "How long a refusal is remembered.",
        ),
        in_file(
            "client-ca-file",
            STRING,
            "authentication.x509.client_ca_file",
            "Authorities whose client certificates count.",
        ),
        flag_only("cert-dir", STRING, "Directory for certificates that the agent makes or requests itself."),
        in_file(
            "tls-cert-file", STRING, "tls_cert_file", "Certificate to serve with, with its intermediates."
        ),
        in_file("tls-private-key-file", STRING, "tls_private_key_file", "Private key of --tls-cert-file."),
        in_file("tls-cipher-suites", STRINGS, "tls_cipher_suites", "Cipher suites to serve with."),
        in_file(
            "tls-min-version",
            STRING,
            "tls_min_version",
            "VersionTLS10, VersionTLS11, VersionTLS12 or VersionTLS13.",
        ),
        in_file(
            "rotate-certificates",
            BOOL,
            "rotate_certificates",
            "Renew the client certificate before it expires.",
        ),
        in_file(
            "rotate-server-certificates",
            BOOL,
            "server_tls_bootstrap",
            "Request the serving certificate from the API server, and renew it.",
        ),
    ),
)
_BY_EVICTION = "set --eviction-hard or --eviction-soft instead"
POD_FLAGS = (
    *group(
        "Where pods come from",
        in_file("pod-manifest-path", STRING, "static_pod_path", "Directory or file of static pods."),
        in_file(
            "file-check-frequency", DURATION, "file_check_frequency", "How often that directory is read anew."
        ),
        in_file("manifest-url", STRING, "static_pod_url", "URL of static pods."),
        in_file(
            "manifest-url-header",
            HEADERS,
            "static_pod_url_header",
            "Headers for that URL, name:value.",
            secret=True,
        ),
        in_file("http-check-frequency", DURATION, "http_check_frequency", "How often that URL is read anew."),
        in_file(
            "sync-frequency", DURATION, "sync_frequency", "How often a pod is looked at when nothing happens."
        ),
        in_file("max-pods", INT32, "max_pods", "Pods that the node takes."),
        in_file(
            "pods-per-core",
            INT32,
            "pods_per_core",
            "Pods that the node takes for each core; 0: no such limit.",
        ),
    ),
    *group(
        "Runtime and containers",
        in_file(
            "container-runtime-endpoint", STRING, "container_runtime_endpoint", "Socket of the runtime (CRI)."
        ),
        in_file(
            "image-service-endpoint",
            STRING,
            "image_service_endpoint",
            "Socket of the image service, if another one.",
        ),
        in_file(
            "runtime-request-timeout",
            DURATION,
            "runtime_request_timeout",
            "How long one call to the runtime may take; pulls, logs, exec and attach have no limit.",
        ),
        in_file(
            "container-log-max-size",
            STRING,
            "container_log_max_size",
            "Size at which a container's log is rotated.",
        ),
        in_file(
            "container-log-max-files", INT32, "container_log_max_files", "Log files kept for a container."
        ),
        in_both(
            "seccomp-default", BOOL, "seccomp_default", "Run everything under the runtime's seccomp profile."
        ),
        in_file(
            "allowed-unsafe-sysctls",
            STRINGS,
            "allowed_unsafe_sysctls",
            "Unsafe sysctls that pods may set; a trailing * matches any ending.",
        ),
        in_file("pod-max-pids", INT, "pod_pids_limit", "Processes of one pod; -1: no limit of its own."),
        deprecated(
            "maximum-dead-containers",
            INT32,
            "Dead containers kept on the whole node; negative: no limit.",
            _BY_EVICTION,
        ),
        deprecated(
            "maximum-dead-containers-per-container",
            INT32,
            "Dead instances kept for each container.",
            _BY_EVICTION,
        ),
        deprecated(
            "minimum-container-ttl-duration",
            DURATION,
            "How long a dead container is kept at least.",
            _BY_EVICTION,
        ),
        deprecated(
            "pod-infra-container-image",
            STRING,
            "Image that image collection spares: the one pods' sandboxes are made of.",
            "configure the sandbox image in the container runtime, which also protects it",
        ),
    ),
    *group(
        "Images",
        in_file("serialize-image-pulls", BOOL, "serialize_image_pulls", "Pull one image at a time."),
        in_file("registry-qps", INT32, "registry_pull_qps", "Pulls a second; 0: no limit."),
        in_file("registry-burst", INT32, "registry_burst", "Pulls in a burst."),
        flag_only(
            "image-credential-provider-config",
            STRING,
            "Credential provider configuration: a file, or a directory of such files.",
        ),
        flag_only(
            "image-credential-provider-bin-dir", STRING, "Directory of the credential providers' programs."
        ),
        in_file(
            "image-gc-high-threshold",
            INT32,
            "image_gc_high_threshold_percent",
            "Disk usage, in percent, at which unused images are collected.",
        ),
        in_file(
            "image-gc-low-threshold",
            INT32,
            "image_gc_low_threshold_percent",
            "Disk usage, in percent, down to which they are collected.",
        ),
        in_file(
            "minimum-image-ttl-duration",
            DURATION,
            "image_minimum_gc_age",
            "Age below which an unused image is kept.",
        ),
    ),
    *group(
        "Volumes",
        in_file("volume-plugin-dir", STRING, "volume_plugin_dir", "Directory of FlexVolume plugins."),
        in_file(
            "volume-stats-agg-period",
            DURATION,
            "volume_stats_agg_period",
            "How often the disk usage of volumes is measured; negative: never.",
        ),
        in_file(
            "enable-controller-attach-detach",
            BOOL,
            "enable_controller_attach_detach",
            "Leave attaching volumes to the controller manager.",
        ),
        in_file(
            "local-storage-capacity-isolation",
            BOOL,
            "local_storage_capacity_isolation",
            "Enforce limits of ephemeral storage.",
        ),
        deprecated(
            "keep-terminated-pod-volumes",
            BOOL,
            "Keep the volumes of finished pods mounted, for debugging.",
            "it will be removed; nothing replaces it",
        ),
        deprecated(
            "experimental-mounter-path",
            STRING,
            "Program to mount with, instead of mount.",
            "use a CSI driver instead",
        ),
    ),
    *group(
        "Network",
        in_file("cluster-dns", STRINGS, "cluster_dns", "Name servers that pods use."),
        in_file("cluster-domain", STRING, "cluster_domain", "The cluster's domain, which pods search."),
        in_file("resolv-conf", STRING, "resolv_conf", "Resolver configuration that pods' DNS is based on."),
        in_file("pod-cidr", STRING, "pod_cidr", "Addresses for pods, in standalone mode."),
        in_file("hairpin-mode", STRING, "hairpin_mode", "promiscuous-bridge, hairpin-veth or none."),
        in_file(
            "make-iptables-util-chains", BOOL, "make_iptables_util_chains", "Keep the node's iptables chains."
        ),
        in_file(
            "iptables-masquerade-bit", INT32, "iptables_masquerade_bit", "Mark bit for packets to masquerade."
        ),
        in_file("iptables-drop-bit", INT32, "iptables_drop_bit", "Mark bit for packets to drop."),
    ),
)
RESOURCE_FLAGS = (
    *group(
        "Cgroups, CPUs and memory",
        in_file("cgroup-driver", STRING, "cgroup_driver", "cgroupfs or systemd."),
        in_file("cgroup-root", STRING, "cgroup_root", "Cgroup that all pods are under."),
        in_file("cgroups-per-qos", BOOL, "cgroups_per_qos", "Keep a cgroup for each QoS class and pod."),
        in_file("kubelet-cgroups", STRING, "kubelet_cgroups", "Cgroup that the agent itself runs in."),
        in_file("system-cgroups", STRING, "system_cgroups", "Cgroup for processes that have none."),
        flag_only("runtime-cgroups", STRING, "Cgroup that the container runtime runs in."),
        in_file("cpu-cfs-quota", BOOL, "cpu_cfs_quota", "Enforce CPU limits."),
        in_file(
            "cpu-cfs-quota-period", DURATION, "cpu_cfs_quota_period", "Period over which CPU limits hold."
        ),
        in_file("cpu-manager-policy", STRING, "cpu_manager_policy", "none or static."),
        in_file(
            "cpu-manager-policy-options",
            OPTION,
            "cpu_manager_policy_options",
            "An option of that policy, name=value; repeat the flag for more.",
        ),
        in_file(
            "cpu-manager-reconcile-period",
            DURATION,
            "cpu_manager_reconcile_period",
            "How often the containers' CPU sets are put right.",
        ),
        in_file("memory-manager-policy", STRING, "memory_manager_policy", "None or Static."),
        in_file(
            "reserved-memory",
            RESERVED_MEMORY,
            "reserved_memory",
            "Memory of NUMA nodes that pods do not get, such as 0:memory=1Gi;1:memory=1Gi.",
        ),
        in_file(
            "topology-manager-policy",
            STRING,
            "topology_manager_policy",
            "none, best-effort, restricted or single-numa-node.",
        ),
        in_file(
            "topology-manager-policy-options",
            MAP,
            "topology_manager_policy_options",
            "Options of that policy.",
        ),
        in_file("topology-manager-scope", STRING, "topology_manager_scope", "container or pod."),
        in_file(
            "qos-reserved", MAP, "qos_reserved", "Part of requests kept for higher QoS, such as memory=50%."
        ),
    ),
    *group(
        "Reservations",
        in_file(
            "system-reserved", MAP, "system_reserved", "What the system keeps, such as cpu=200m,memory=500Mi."
        ),
        in_file("kube-reserved", MAP, "kube_reserved", "What Kubernetes' own daemons keep."),
        in_file(
            "system-reserved-cgroup", STRING, "system_reserved_cgroup", "Cgroup of the system's daemons."
        ),
        in_file("kube-reserved-cgroup", STRING, "kube_reserved_cgroup", "Cgroup of Kubernetes' own daemons."),
        in_file("reserved-cpus", STRING, "reserved_system_cpus", "CPUs kept from pods, such as 0-1,4."),
        in_file(
            "enforce-node-allocatable",
            STRINGS,
            "enforce_node_allocatable",
            "Reservations to enforce: pods, system-reserved, kube-reserved, or none.",
        ),
        deprecated(
            "experimental-allocatable-ignore-eviction",
            BOOL,
            "Leave the hard eviction thresholds out of what is allocatable.",
            "it will be removed; reserve less instead",
        ),
    ),
    *group(
        "Eviction",
        in_file(
            "eviction-hard", THRESHOLDS, "eviction_hard", "Evict at once below these, memory.available<100Mi."
        ),
        in_file("eviction-soft", THRESHOLDS, "eviction_soft", "Evict after a grace period below these."),
        in_file(
            "eviction-soft-grace-period",
            MAP,
            "eviction_soft_grace_period",
            "That grace period, such as memory.available=1m30s.",
        ),
        in_file(
            "eviction-max-pod-grace-period",
            INT32,
            "eviction_max_pod_grace_period",
            "Seconds that a softly evicted pod gets at most; negative: what it asks for.",
        ),
        in_file(
            "eviction-minimum-reclaim",
            MAP,
            "eviction_minimum_reclaim",
            "How far to go above a threshold, such as imagefs.available=2Gi.",
        ),
        in_file(
            "eviction-pressure-transition-period",
            DURATION,
            "eviction_pressure_transition_period",
            "How long a pressure condition stays after the pressure is gone.",
        ),
        in_file(
            "kernel-memcg-notification",
            BOOL,
            "kernel_memcg_notification",
            "Have the kernel say when memory is short, instead of looking.",
        ),
    ),
    *group(
        "Measuring",
        flag_only("housekeeping-interval", DURATION, "How often containers are measured."),
        deprecated(
            "global-housekeeping-interval",
            DURATION,
            "Interval of the search for cgroups below those of containers.",
            "it will be removed; nothing replaces it",
        ),
        deprecated(
            "container-hints",
            STRING,
            "File with mount points of cgroups, whose file systems are reported for them.",
            "it will be removed; nothing replaces it",
        ),
        deprecated(
            "enable-load-reader",
            BOOL,
            "Measure the load of containers, on cgroup v1 (container_cpu_load_average_10s).",
            "it will be removed; nothing replaces it",
        ),
        deprecated(
            "log-cadvisor-usage",
            BOOL,
            "Log the usage of the kubelet's cgroup, with a --housekeeping-interval of at most 2s.",
            "it will be removed; the Summary API has the usage",
        ),
        deprecated(
            "machine-id-file",
            STRING,
            "Files to look for the machine's id in, the first that exists counts.",
            "it will be removed; nothing replaces it",
        ),
        deprecated(
            "boot-id-file",
            STRING,
            "Files to look for the boot's id in, the first that exists counts.",
            "it will be removed; nothing replaces it",
        ),
    ),
)
_STDERR = "send standard error to where the logs should go"
_APPLICATION_METRICS = (
    "differs from upstream: no metrics that labels of images define (io.cadvisor.metric) are collected, "
    "because an image could make the kubelet request any URL; v1.37 has removed the flag"
)
_CONTAINERD = (
    "differs from upstream: labels of containers in metrics come from --container-runtime-endpoint, not from "
    "a second connection; v1.37 has removed the flag"
)
_CONTAINERD_NAMESPACE = (
    "differs from upstream: labels of containers in metrics come over CRI, whose namespace is fixed; "
    "v1.37 has removed the flag"
)
_STORAGE_DRIVER = "statistics are kept in memory only; the upstream kubelet has no storage driver, too"
_CADVISOR_EVENTS = (
    "no events of containers are stored; the upstream kubelet stores them and serves them nowhere"
)


def _runtime(text: str) -> str:
    if text != "remote":
        raise ValueError(
            f"the built-in runtime {quoted(text)} does not exist any more: leave the flag out and name a "
            "CRI socket with --container-runtime-endpoint"
        )
    return text


CONTAINER_RUNTIME = FlagType("string", _runtime)
LOG_FLAGS = (
    *group(
        "Logging",
        in_both(
            "v", LEVEL, "logging.verbosity", "How much to say; 2 is usual, 4 is for debugging.", short="v"
        ),
        in_both(
            "vmodule", VMODULE, "logging.vmodule", "Verbosity of single files, such as loop=4,cgroup*=6."
        ),
        in_file("logging-format", STRING, "logging.format", "text or json."),
        in_both(
            "log-flush-frequency",
            DURATION,
            "logging.flush_frequency",
            "How long to hold buffered lines.",
        ),
        in_file(
            "log-text-split-stream",
            BOOL,
            "logging.options.text.split_stream",
            "In text format, information to standard output and errors to standard error.",
        ),
        in_file(
            "log-text-info-buffer-size",
            QUANTITY,
            "logging.options.text.info_buffer_size",
            "In text format with split streams, bytes of information to hold back. A full buffer blocks.",
        ),
        in_file(
            "log-json-split-stream",
            BOOL,
            "logging.options.json.split_stream",
            "In JSON format, information to standard output and errors to standard error.",
        ),
        in_file(
            "log-json-info-buffer-size",
            QUANTITY,
            "logging.options.json.info_buffer_size",
            "In JSON format with split streams, bytes of information to hold back. A full buffer blocks.",
        ),
        deprecated("logtostderr", BOOL, "Log to standard error instead of files.", _STDERR),
        deprecated("alsologtostderr", BOOL, "Log to standard error as well as files.", _STDERR),
        deprecated(
            "stderrthreshold",
            SEVERITY,
            "When logging to files, send this severity to standard error too.",
            _STDERR,
        ),
        deprecated("log-file", STRING, "File to log to, with --logtostderr=false.", _STDERR),
        deprecated("log-dir", STRING, "Directory to make a log file in, with --logtostderr=false.", _STDERR),
        deprecated(
            "log-file-max-size", UINT, "Megabytes at which --log-file starts over; 0: never.", _STDERR
        ),
        deprecated(
            "skip-headers", BOOL, "Leave time, process and file out of the lines.", "it will be removed"
        ),
        deprecated("add-dir-header", BOOL, "Show the file's directory in the lines.", "it will be removed"),
    ),
    *group(
        "Accepted without effect",
        without_effect("one-output", BOOL, "", "a log file always has every severity once"),
        without_effect("skip-log-headers", BOOL, "", "log files have no opening lines to leave out"),
        without_effect("log-backtrace-at", TRACE_LOCATION, ":0", "raise -v or --vmodule instead"),
        without_effect("container-runtime", CONTAINER_RUNTIME, "remote", "every runtime is reached over CRI"),
        without_effect(
            "cloud-config", STRING, "", "cloud providers run outside, see --cloud-provider=external"
        ),
        without_effect(
            "master-service-namespace", STRING, "default", "the API server's service is always in default"
        ),
        without_effect(
            "azure-container-registry-config",
            STRING,
            "",
            "Azure's credential provider replaces it, see --image-credential-provider-config",
        ),
        without_effect(
            "application-metrics-count-limit",
            INT,
            "100",
            _APPLICATION_METRICS,
        ),
        without_effect(
            "containerd",
            STRING,
            "/run/containerd/containerd.sock",
            _CONTAINERD,
        ),
        without_effect("containerd-namespace", STRING, "k8s.io", _CONTAINERD_NAMESPACE),
        without_effect("event-storage-age-limit", STRING, "default=0", _CADVISOR_EVENTS),
        without_effect("event-storage-event-limit", STRING, "default=0", _CADVISOR_EVENTS),
        without_effect("storage-driver-buffer-duration", DURATION, "1m0s", _STORAGE_DRIVER),
        without_effect("storage-driver-db", STRING, "cadvisor", _STORAGE_DRIVER),
        without_effect("storage-driver-host", STRING, "localhost:8086", _STORAGE_DRIVER),
        without_effect("storage-driver-password", STRING, "root", _STORAGE_DRIVER, secret=True),
        without_effect("storage-driver-secure", BOOL, "", _STORAGE_DRIVER),
        without_effect("storage-driver-table", STRING, "stats", _STORAGE_DRIVER),
        without_effect("storage-driver-user", STRING, "root", _STORAGE_DRIVER),
    ),
)
FLAGS: tuple[Flag, ...] = (*NODE_FLAGS, *POD_FLAGS, *RESOURCE_FLAGS, *LOG_FLAGS)
BY_NAME: Mapping[str, Flag] = MappingProxyType({flag.name: flag for flag in FLAGS})


def get_field(config: KubeletConfiguration, path: str) -> Any:
    """Return a field by its path of Python names."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def set_field(config: KubeletConfiguration, path: str, value: Any) -> None:
    """Set a field by its path of Python names."""
    *parents, last = path.split(".")
    target: Any = get_field(config, ".".join(parents)) if parents else config
    setattr(target, last, value)


def field_path(path: str) -> str:
    """Return the JSON path of a path of Python names: `authentication.x509.clientCAFile`."""
    return ".".join(map(wire_name, path.split(".")))


def default_text(flag: Flag, config: KubeletConfiguration) -> str:
    """Return a flag's default as the help shows it, "" for a zero value; `config` has no flags applied."""
    if not (flag.field or flag.attribute):
        return flag.default
    value = _default(flag, config)
    # Zero values are not shown; that of a quantity is a string.
    return flag.kind.show(value) if value not in ("", "0") and value and flag.attribute != "version" else ""


def flag_default(flag: Flag, config: KubeletConfiguration) -> str:
    """Return a flag's default as text, zero values included; `config` has no flags applied."""
    if not (flag.field or flag.attribute):
        return flag.default or (flag.kind.show(False) if flag.kind.name == "bool" else "")
    return flag.kind.show(_default(flag, config))


def _default(flag: Flag, config: KubeletConfiguration) -> Any:
    return get_field(config, flag.field) if flag.field else getattr(KubeletFlags(), flag.attribute)
