"""Settings of the node's registration, status and lease, collected from flags and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pykubelet.api.node import Taint
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.types import Taint as ConfiguredTaint
from pykubelet.linux.network import IPAddress, parse_node_ip


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationSettings:
    """Settings of the Node object as the kubelet registers it."""

    enabled: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    schedulable: bool = True
    provider_id: str = ""
    attach_detach: bool = True
    """Whether the attach/detach controller attaches volumes, not the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of the Node object and its reporting; times in seconds."""

    name: str
    hostname: str
    """Value of the node's Hostname address and `kubernetes.io/hostname` label."""
    ips: tuple[IPAddress, ...] = ()
    """Addresses of `--node-ip`: none, one (unspecified to select only a family), or a dual-stack pair."""
    external_cloud: bool = False
    """Whether a cloud controller manager sets the node's addresses, zone and instance type."""
    registration: RegistrationSettings = field(default_factory=RegistrationSettings)
    port: int = 10250
    max_images: int = 50
    update_seconds: float = 10.0
    report_seconds: float = 300.0
    lease_seconds: int = 40
    config: KubeletConfiguration = field(default_factory=KubeletConfiguration)
    """Source of the reservations and of the maximum number of pods."""
    ignore_eviction: bool = False
    gates: FeatureGates = field(default_factory=FeatureGates)


def node_settings(
    flags: KubeletFlags, config: KubeletConfiguration, gates: FeatureGates, name: str
) -> NodeSettings:
    """Return the settings of the node `name`. Raises NodeIPError for an invalid `--node-ip`."""
    return NodeSettings(
        name=name,
        hostname=name,
        ips=parse_node_ip(flags.node_ip).addresses,
        external_cloud=flags.cloud_provider == "external",
        registration=RegistrationSettings(
            enabled=config.register_node,
            labels=flags.node_labels,
            taints=tuple(map(_taint, config.register_with_taints)),
            schedulable=flags.register_schedulable,
            provider_id=config.provider_id,
            attach_detach=config.enable_controller_attach_detach,
        ),
        port=config.port,
        max_images=config.node_status_max_images,
        update_seconds=config.node_status_update_frequency.seconds,
        report_seconds=config.node_status_report_frequency.seconds,
        lease_seconds=config.node_lease_duration_seconds,
        config=config,
        ignore_eviction=flags.experimental_allocatable_ignore_eviction,
        gates=gates,
    )


def _taint(taint: ConfiguredTaint) -> Taint:
    added = datetime.fromisoformat(taint.time_added) if taint.time_added else None
    return Taint(key=taint.key, value=taint.value, effect=taint.effect, time_added=added)
