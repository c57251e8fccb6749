"""Flags about the node itself: its configuration, its name, its cluster, its clients."""

from pykubelet.api.text import quoted
from pykubelet.config.flag_rows import group, here, in_both, in_file, old
from pykubelet.config.flag_types import (
    BOOL,
    DURATION,
    GATES,
    INT,
    INT32,
    IP,
    LABELS,
    STRING,
    STRINGS,
    TAINTS,
    VERSION,
    Kind,
)


def _cloud_provider(text: str) -> str:
    if text not in ("", "external"):
        raise ValueError(
            f"the built-in provider {quoted(text)} does not exist any more: write external and run the "
            "provider's own controller, or leave the flag out"
        )
    return text


CLOUD_PROVIDER = Kind("string", _cloud_provider)

ROWS = (
    *group(
        "General",
        here("help", BOOL, "Show this help and exit.", short="h"),
        here("version", VERSION, "Show the version and exit; --version=raw shows every detail."),
        here("config", STRING, "Configuration file (KubeletConfiguration, YAML or JSON). Flags win over it."),
        here("config-dir", STRING, "Directory of *.conf drop-ins, merged over --config in lexical order."),
        in_file(
            "feature-gates", GATES, "feature_gates", "Turn features on or off, such as EventedPLEG=true."
        ),
        here("root-dir", STRING, "Directory for everything the agent keeps: pods, volumes, checkpoints."),
        here(
            "device-plugin-dir",
            STRING,
            "Directory of kubelet.sock for device plugins; they expect the default for any --root-dir.",
        ),
        here("lock-file", STRING, "File to lock, so that two agents never run at once."),
        here("exit-on-lock-contention", BOOL, "Exit when another process opens the lock file."),
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
        here("kubeconfig", STRING, "How to reach the API server. Without it the agent runs standalone."),
        here(
            "pod-checkpoint-dir",
            STRING,
            "Directory where pods of the API server are kept, to bring them back while it is unreachable.",
        ),
        here(
            "bootstrap-kubeconfig",
            STRING,
            "Credentials to request the node's own with, while --kubeconfig does not exist yet.",
        ),
        here("hostname-override", STRING, "Name of the node, instead of the machine's host name."),
        here("node-ip", STRING, "Address of the node, or an IPv4 and an IPv6 one separated by a comma."),
        here("node-labels", LABELS, "Labels to register the node with, such as role=web."),
        in_file("register-node", BOOL, "register_node", "Register with the API server."),
        in_file(
            "register-with-taints",
            TAINTS,
            "register_with_taints",
            "Taints to register with, key=value:effect.",
        ),
        here("cloud-provider", CLOUD_PROVIDER, "`external` when a cloud controller initializes the node."),
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
        old(
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
        in_file("healthz-bind-address", IP, "healthz_bind_address", "Address of the health endpoint."),
        in_file("healthz-port", INT32, "healthz_port", "Port of the health endpoint; 0: none."),
        in_file(
            "enable-debugging-handlers",
            BOOL,
            "enable_debugging_handlers",
            "Serve logs, exec, attach and forward.",
        ),
        in_file("contention-profiling", BOOL, "enable_contention_profiling", "Profile waits on locks."),
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
        here("cert-dir", STRING, "Directory for certificates that the agent makes or requests itself."),
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
