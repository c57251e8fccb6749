"""Flags of the upstream kubelet v1.3 to v1.24 that do not exist any more.

A command line with such a flag is rejected with the version that removed the flag and its replacement. Flags
that v1.25 still had are accepted: they are rows of the flag table, as is --cadvisor-port, whose page exists
again. The module is imported only when a command line contains an unknown flag. `docs/flags.md` contains the
table; `scripts/flags` generates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class RemovedFlag(NamedTuple):
    """A flag that upstream has removed."""

    name: str
    removed_in: str
    """First minor version without the flag."""
    replacement: str
    """What to do instead, as an instruction."""

    @property
    def problem(self) -> str:
        """Sentence for the error message."""
        return f"it was removed in {self.removed_in}: {self.replacement}"


_LEAVE_OUT = "leave it out; nothing replaces it"
_CRI = "leave it out; every runtime is used over CRI, set --container-runtime-endpoint"
_RUNTIME_CNI = "configure CNI in the container runtime"
_RUNTIME_DOCKER = "leave it out; Docker is used over CRI with cri-dockerd, set --container-runtime-endpoint"
_ADMISSION = "use Pod Security admission, which restricts host namespaces and privileged containers"


def _removed(version: str, rows: Mapping[str, str]) -> tuple[RemovedFlag, ...]:
    return tuple(RemovedFlag(name, version, replacement) for name, replacement in rows.items())


REMOVED_FLAGS: tuple[RemovedFlag, ...] = (
    *_removed(
        "v1.5",
        {
            "configure-cbr0": _RUNTIME_CNI,
            "experimental-flannel-overlay": "install flannel's CNI plugin",
        },
    ),
    *_removed(
        "v1.6",
        {
            "auth-path": "use --kubeconfig",
            "experimental-cgroups-per-qos": "use --cgroups-per-qos",
            "experimental-nvidia-gpus": "install NVIDIA's device plugin or DRA driver",
            "reconcile-cidr": _LEAVE_OUT,
            "resource-container": "use --kubelet-cgroups",
            "system-container": "use --system-cgroups",
        },
    ),
    *_removed(
        "v1.7",
        {
            "babysit-daemons": "let systemd restart the runtime and the kubelet",
            "enable-cri": _CRI,
            "experimental-cri": _CRI,
        },
    ),
    *_removed(
        "v1.8",
        {
            "api-servers": "use --kubeconfig",
            "low-diskspace-threshold-mb": "use --eviction-hard with nodefs.available",
            "outofdisk-transition-frequency": "use --eviction-pressure-transition-period",
        },
    ),
    *_removed(
        "v1.9",
        {
            "docker-exec-handler": _RUNTIME_DOCKER,
            "network-plugin-dir": _RUNTIME_CNI,
        },
    ),
    *_removed(
        "v1.10",
        {
            "cloud-provider-gce-lb-src-cidrs": "set it for the cloud controller manager",
            "init-config-dir": "use --config",
            "require-kubeconfig": "use --kubeconfig, which is sufficient",
        },
    ),
    *_removed(
        "v1.11",
        {
            "enable-custom-metrics": "let Prometheus scrape the containers' metrics",
            "experimental-allowed-unsafe-sysctls": "use --allowed-unsafe-sysctls",
            "experimental-qos-reserved": "use --qos-reserved",
            "rkt-api-endpoint": _CRI,
            "rkt-path": _CRI,
            "rkt-stage1-image": _CRI,
        },
    ),
    *_removed(
        "v1.12",
        {
            "docker-disable-shared-pid": "set shareProcessNamespace in the pods",
        },
    ),
    *_removed("v1.13", {"google-json-key": "use --image-credential-provider-config or pull secrets"}),
    *_removed("v1.14", {"experimental-fail-swap-on": "use --fail-swap-on"}),
    *_removed(
        "v1.15",
        {
            "allow-privileged": _ADMISSION,
            "host-ipc-sources": _ADMISSION,
            "host-network-sources": _ADMISSION,
            "host-pid-sources": _ADMISSION,
        },
    ),
    *_removed("v1.16", {"containerized": "run the kubelet as a service of the host"}),
    *_removed(
        "v1.19",
        {
            "bootstrap-checkpoint-path": "use --pod-checkpoint-dir",
            "experimental-dockershim": _RUNTIME_DOCKER,
        },
    ),
    *_removed("v1.21", {"enable-cadvisor-json-endpoints": "use /stats/summary or /metrics/cadvisor"}),
    *_removed(
        "v1.22",
        {
            "chaos-chance": _LEAVE_OUT,
            "experimental-logging-sanitization": "leave it out; secrets are always masked in logs",
            "redirect-container-streaming": "leave it out; streams always pass through the kubelet",
        },
    ),
    *_removed(
        "v1.23",
        {
            "experimental-bootstrap-kubeconfig": "use --bootstrap-kubeconfig",
            "seccomp-profile-root": "put the profiles into the directory seccomp below --root-dir",
        },
    ),
    *_removed(
        "v1.24",
        {
            "cni-bin-dir": _RUNTIME_CNI,
            "cni-cache-dir": _RUNTIME_CNI,
            "cni-conf-dir": _RUNTIME_CNI,
            "docker": _RUNTIME_DOCKER,
            "docker-endpoint": "use --container-runtime-endpoint; for Docker install cri-dockerd",
            "docker-env-metadata-whitelist": _LEAVE_OUT,
            "docker-only": _LEAVE_OUT,
            "docker-root": _LEAVE_OUT,
            "docker-tls": _RUNTIME_DOCKER,
            "docker-tls-ca": _RUNTIME_DOCKER,
            "docker-tls-cert": _RUNTIME_DOCKER,
            "docker-tls-key": _RUNTIME_DOCKER,
            "dynamic-config-dir": "use --config with --watch-config, which applies a changed file",
            "experimental-check-node-capabilities-before-mount": "use CSI drivers",
            "experimental-dockershim-root-directory": _RUNTIME_DOCKER,
            "image-pull-progress-deadline": "configure the time limit of pulls in the container runtime",
            "network-plugin": _RUNTIME_CNI,
            "network-plugin-mtu": _RUNTIME_CNI,
            "non-masquerade-cidr": "configure masquerading in the CNI plugin or with ip-masq-agent",
            "really-crash-for-testing": _LEAVE_OUT,
        },
    ),
    *_removed("v1.25", {"experimental-kernel-memcg-notification": "use --kernel-memcg-notification"}),
)
REMOVED_BY_NAME: Mapping[str, RemovedFlag] = MappingProxyType({flag.name: flag for flag in REMOVED_FLAGS})
