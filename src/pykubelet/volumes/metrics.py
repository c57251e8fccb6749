"""Metrics of volume operations, with upstream's names, and the volumes of pods that they count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram

from pykubelet.util.metrics import SECONDS

DURATION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0)
_NAMES_WITHOUT_DIRECTORY = {"hostPath": "kubernetes.io/host-path", "image": "kubernetes.io/image"}
"""Names of volume types whose plugins have no directory."""


class VolumeCount:
    """Desired and mounted volumes of pods, with the names of their plugins."""

    def __init__(self) -> None:
        self._desired: dict[str, dict[str, str]] = {}
        self._mounted: dict[str, set[str]] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._desired

    def is_mounted(self, uid: str, volume: str) -> bool:
        """Return whether a volume of a pod is mounted."""
        return volume in self._mounted.get(uid, ())

    def record(self, uid: str, volume: str, plugin: str, *, mounted: bool) -> None:
        """Record that a volume is desired by a pod and, with `mounted`, mounted."""
        self._desired.setdefault(uid, {})[volume] = plugin
        if mounted:
            self._mounted.setdefault(uid, set()).add(volume)

    def forget(self, uid: str) -> None:
        """Remove the volumes of a pod."""
        self._desired.pop(uid, None)
        self._mounted.pop(uid, None)

    def totals(self) -> Mapping[tuple[str, str], int]:
        """Return the number of volumes by plugin and state (`desired_state_of_world`, `actual_…`)."""
        found: Counter[tuple[str, str]] = Counter()
        for uid, volumes in self._desired.items():
            for volume, plugin in volumes.items():
                found[plugin, "desired_state_of_world"] += 1
                if self.is_mounted(uid, volume):
                    found[plugin, "actual_state_of_world"] += 1
        return found


class SELinuxMetrics:
    """Volumes with a SELinux label and label conflicts, on hosts with SELinux; gauges as upstream's."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"volume_manager_selinux_{name}_total", text, labels, registry=registry)

        in_pod = "Pods whose containers use one volume with different SELinux labels"
        in_volume = "Pods that use a volume with another SELinux label than other pods on the node"
        retried = "they are retried, and each attempt counts."
        ignored = "ignored for the volume's access mode."
        shared = ("volume_plugin", "access_mode")
        self.pod_errors = gauge("pod_context_mismatch_errors", f"{in_pod}; {retried}", "access_mode")
        self.pod_warnings = gauge("pod_context_mismatch_warnings", f"{in_pod}; {ignored}", "access_mode")
        self.volume_errors = gauge("volume_context_mismatch_errors", f"{in_volume}; {retried}", *shared)
        self.volume_warnings = gauge("volume_context_mismatch_warnings", f"{in_volume}; {ignored}", *shared)
        self.admitted = gauge(
            "volumes_admitted", "Volumes with one SELinux label for all containers.", *shared
        )


class VolumeMetrics:
    """Histograms of volume operations; without a registry they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.count = VolumeCount()
        self.se_linux = SELinuxMetrics(registry)
        self._operations = Histogram(
            "storage_operation_duration_seconds",
            "Duration of volume operations in seconds.",
            ["volume_plugin", "operation_name", "status", "migrated"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._overall = Histogram(
            "volume_operation_total_seconds",
            "Seconds from the first request for a volume until it is mounted.",
            ["plugin_name", "operation_name"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._measurements = Histogram(
            "kubelet_volume_metric_collection_duration_seconds",
            "Duration in seconds to calculate volume stats",
            ["metric_source"],
            buckets=SECONDS,
            registry=registry,
        )
        self._calls = Histogram(
            "csi_operations_seconds",
            "Duration of calls to CSI drivers in seconds.",
            ["driver_name", "method_name", "grpc_status_code", "migrated"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )

    def record_operation(
        self, plugin: str, operation: str, seconds: float, *, succeeded: bool = True
    ) -> None:
        """Record an operation on a volume: `volume_mount`, `volume_unmount`, `map_volume`…"""
        status = "success" if succeeded else "fail-unknown"
        self._operations.labels(plugin, operation, status, "false").observe(seconds)

    def record_mount(
        self,
        uid: str,
        volume: str,
        plugin: str,
        seconds: float,
        waited: float,
        *,
        block: bool,
        succeeded: bool,
    ) -> None:
        """Record an attempt to mount a volume; `waited` is in seconds since the pod first required it."""
        self.record_operation(plugin, "map_volume" if block else "volume_mount", seconds, succeeded=succeeded)
        if succeeded and not self.count.is_mounted(uid, volume):
            self._overall.labels(plugin, "overall_volume_mount").observe(waited)
        self.count.record(uid, volume, plugin, mounted=succeeded)

    def record_measurement(self, source: str, seconds: float) -> None:
        """Record a measurement of a volume's usage, by `du`, `statfs`, `block` or a CSI driver's name."""
        self._measurements.labels(source).observe(seconds)

    def record_csi_call(self, driver: str, method: str, code: str, seconds: float) -> None:
        """Record a call to a CSI driver: `method` is the full path, `code` is spelled as `NotFound`."""
        self._calls.labels(driver, method, code, "false").observe(seconds)


def plugin_name(kind: str, plugin_dir: str, source: Any = None) -> str:
    """Return a plugin's name in metrics: `kubernetes.io/empty-dir`, `kubernetes.io/csi:<driver>`."""
    name = plugin_dir.replace("~", "/") or _NAMES_WITHOUT_DIRECTORY.get(kind, f"kubernetes.io/{kind.lower()}")
    driver = getattr(source, "driver", "") if name == "kubernetes.io/csi" else ""
    return f"{name}:{driver}" if driver else name
