"""Flags about pods: where they come from, and how their containers, images and volumes are kept."""

from pykubelet.config.flag_rows import group, here, in_both, in_file, old
from pykubelet.config.flag_types import BOOL, DURATION, HEADERS, INT, INT32, STRING, STRINGS

_BY_EVICTION = "set --eviction-hard or --eviction-soft instead"

ROWS = (
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
        old(
            "maximum-dead-containers",
            INT32,
            "Dead containers kept on the whole node; negative: no limit.",
            _BY_EVICTION,
        ),
        old(
            "maximum-dead-containers-per-container",
            INT32,
            "Dead instances kept for each container.",
            _BY_EVICTION,
        ),
        old(
            "minimum-container-ttl-duration",
            DURATION,
            "How long a dead container is kept at least.",
            _BY_EVICTION,
        ),
        old(
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
        here(
            "image-credential-provider-config",
            STRING,
            "Credential provider configuration: a file, or a directory of such files.",
        ),
        here("image-credential-provider-bin-dir", STRING, "Directory of the credential providers' programs."),
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
        old(
            "keep-terminated-pod-volumes",
            BOOL,
            "Keep the volumes of finished pods mounted, for debugging.",
            "it will be removed; nothing replaces it",
        ),
        old(
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
