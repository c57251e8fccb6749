"""Settings that exist only as flags: they differ between nodes or are needed before the configuration file.

Every attribute is the flag of the same name (`--cert-dir` is `cert_dir`). Settings that nodes can share are
in `KubeletConfiguration` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from pykubelet.api.duration import Duration
from pykubelet.api.ip import parse_ip
from pykubelet.api.names import dns_subdomain_problem, label_value_problem, qualified_name_problem
from pykubelet.api.quantity import Quantity
from pykubelet.config.errors import Problem
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs.setup import LogOptions
from pykubelet.util.text import quoted

_OWN_LABELS = (
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
)
_OWN_NAMESPACES = ("kubelet.kubernetes.io", "node.kubernetes.io")
_RESERVED_NAMESPACES = ("kubernetes.io", "k8s.io")
_TEN_SECONDS = Duration.from_seconds(10)
_ONE_MINUTE = Duration.from_seconds(60)
_NO_TIME = Duration(0)
MAX_PORT = 65535
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletFlags:
    """Flags that are not fields of the configuration file, with their defaults."""

    help: bool = False
    version: str = "false"
    """`false`, `true`, `raw`, or the version to report instead of pykubelet's."""

    config: str = ""
    config_dir: str = ""
    watch_config: bool = False
    """Whether a change of the configuration files is applied without a request."""
    use_last_good_config: bool = False
    """Whether a start with invalid files uses the last valid configuration; implied by `watch_config`."""
    root_dir: str = "/var/lib/kubelet"
    cert_dir: str = "/var/lib/kubelet/pki"
    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Independent of `root_dir`: device plugins mount this path."""
    lock_file: str = ""
    exit_on_lock_contention: bool = False

    kubeconfig: str = ""
    """Empty: standalone."""
    bootstrap_kubeconfig: str = ""
    pod_checkpoint_dir: str = ""
    """Empty: pods of the API server are not stored on disk."""
    drain_on_stop: bool = False
    """Whether all pods are terminated when the kubelet is stopped by a signal."""
    hostname_override: str = ""
    node_ip: str = ""
    """Value of `--node-ip`; `node_ips` has it as addresses."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    cloud_provider: str = ""
    """Empty or `external`."""
    register_schedulable: bool = True
    """False: register as unschedulable, in addition to the taints of `registerWithTaints`."""

    image_credential_provider_config: str = ""
    image_credential_provider_bin_dir: str = ""
    runtime_cgroups: str = ""
    pod_infra_container_image: str = "registry.k8s.io/pause:3.8"
    maximum_dead_containers: int = -1
    maximum_dead_containers_per_container: int = 1
    minimum_container_ttl_duration: Duration = _NO_TIME
    keep_terminated_pod_volumes: bool = False
    experimental_mounter_path: str = ""
    experimental_allocatable_ignore_eviction: bool = False

    page_port: int = 0
    """0: the page for operators is not served."""
    page_address: str = "127.0.0.1"

    housekeeping_interval: Duration = _TEN_SECONDS
    global_housekeeping_interval: Duration = _ONE_MINUTE
    container_hints: str = "/etc/cadvisor/container_hints.json"
    """JSON file with mount points of cgroups; it need not exist."""
    enable_load_reader: bool = False
    log_cadvisor_usage: bool = False
    machine_id_file: str = "/etc/machine-id,/var/lib/dbus/machine-id"
    boot_id_file: str = "/proc/sys/kernel/random/boot_id"

    logtostderr: bool = True
    alsologtostderr: bool = False
    stderrthreshold: int = 2
    """Severity: 0 info, 1 warning, 2 error, 3 fatal."""
    log_file: str = ""
    log_dir: str = ""
    log_file_max_size: int = 1800
    """Megabytes."""
    skip_headers: bool = False
    add_dir_header: bool = False

    @property
    def standalone(self) -> bool:
        """Whether the kubelet runs without an API server."""
        return not self.kubeconfig

    @property
    def node_ips(self) -> tuple[str, ...]:
        """Addresses of `--node-ip`: none, one, or an IPv4 and an IPv6 one."""
        return tuple(part.strip() for part in self.node_ip.split(",") if part.strip())


def log_options(flags: KubeletFlags, config: KubeletConfiguration) -> LogOptions:
    """Return the settings of the kubelet's own logs from flags and configuration."""
    logs = config.logging
    routing = logs.options.json if logs.format == "json" else logs.options.text
    return LogOptions(
        format=logs.format,
        verbosity=logs.verbosity,
        vmodule=[(item.file_pattern, item.verbosity) for item in logs.vmodule],
        split_stream=routing.split_stream,
        info_buffer_bytes=int(Quantity.parse(routing.info_buffer_size)),
        flush_seconds=logs.flush_frequency.seconds,
        to_stderr=flags.logtostderr,
        also_to_stderr=flags.alsologtostderr,
        stderr_threshold=_LEVELS[flags.stderrthreshold],
        file=flags.log_file,
        directory=flags.log_dir,
        file_max_megabytes=flags.log_file_max_size,
        headers=not flags.skip_headers,
        directory_header=flags.add_dir_header,
    )


def check_flags(flags: KubeletFlags, config: KubeletConfiguration) -> list[Problem]:
    """Return all problems of the flags alone and of flags and configuration in combination."""
    problems = [Problem("--node-labels", fault) for fault in _label_faults(flags.node_labels)]
    if fault := _node_ip_fault(flags.node_ips):
        problems.append(Problem("--node-ip", fault))
    if fault := _hostname_fault(flags.hostname_override):
        problems.append(Problem("--hostname-override", fault))
    has_periods = config.shutdown_grace_period > 0 or config.shutdown_grace_period_by_pod_priority
    if flags.drain_on_stop and not has_periods:
        message = "there is no time to terminate pods in: set shutdownGracePeriod too, such as 30s"
        problems.append(Problem("--drain-on-stop", message))
    if flags.exit_on_lock_contention and not flags.lock_file:
        problems.append(
            Problem("--exit-on-lock-contention", "there is no lock to watch: set --lock-file too")
        )
    providers = flags.image_credential_provider_config, flags.image_credential_provider_bin_dir
    if any(providers) and not all(providers):
        name = "image-credential-provider-" + ("bin-dir" if providers[0] else "config")
        problems.append(
            Problem(f"--{name}", "credential providers need configuration and programs: set it too")
        )
    if not 0 <= flags.page_port <= MAX_PORT:
        message = f"{flags.page_port} is not a port: write a number from 1 to {MAX_PORT}, or 0 for no page"
        problems.append(Problem("--page-port", message))
    for name in ("housekeeping-interval", "global-housekeeping-interval"):
        if getattr(flags, name.replace("-", "_")) <= 0:
            problems.append(Problem(f"--{name}", "it must be longer than 0s, such as 10s"))
    if config.run_once and flags.kubeconfig:
        problems.append(
            Problem(
                "--runonce", "it runs pods of files and URLs without an API server: leave out --kubeconfig"
            )
        )
    return problems


def _label_faults(labels: Mapping[str, str]) -> list[str]:
    faults = []
    for key, value in sorted(labels.items()):
        namespace = key.rpartition("/")[0]
        if fault := qualified_name_problem(key):
            faults.append(f"the key {quoted(key)} {fault}")
        elif _within(namespace, _RESERVED_NAMESPACES) and not (
            key in _OWN_LABELS or _within(namespace, _OWN_NAMESPACES)
        ):
            faults.append(
                f"{quoted(key)} is in a namespace that a node may not set itself: below kubernetes.io and "
                f"k8s.io use {' or '.join(_OWN_NAMESPACES)}, or one of {', '.join(_OWN_LABELS)}"
            )
        if fault := label_value_problem(value):
            faults.append(f"the value {quoted(value)} of {quoted(key)} {fault}")
    return faults


def _within(namespace: str, suffixes: tuple[str, ...]) -> bool:
    return any(namespace == suffix or namespace.endswith(f".{suffix}") for suffix in suffixes)


def _node_ip_fault(texts: tuple[str, ...]) -> str:
    try:
        addresses = [parse_ip(text) for text in texts]
    except ValueError as fault:
        return str(fault)
    versions = [address.version for address in addresses]
    if len(set(versions)) != len(versions):
        return f"{quoted(','.join(texts))} is neither one address nor an IPv4 and an IPv6 one: leave some out"
    if len(addresses) > 1 and any(address.is_unspecified for address in addresses):
        return "0.0.0.0 and :: can only stand alone: write the addresses themselves"
    return ""


def _hostname_fault(name: str) -> str:
    fault = dns_subdomain_problem(name.strip().lower()) if name else None
    return f"{quoted(name)} cannot be a node's name: it {fault}" if fault else ""
