"""Metrics of volume operations, numbers of volumes and usage of claimed volumes, with upstream's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.api.pod import Pod

if TYPE_CHECKING:
    from pykubelet.volumes.usage import VolumeStats

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


class VolumeMetrics:
    """Histograms of volume operations; without a registry they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.count = VolumeCount()
        self._operations = Histogram(
            "storage_operation_duration_seconds",
            "How long what was done to a volume took.",
            ["volume_plugin", "operation_name", "status", "migrated"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._overall = Histogram(
            "volume_operation_total_seconds",
            "How long it took from the first wish for a volume until it was there.",
            ["plugin_name", "operation_name"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._calls = Histogram(
            "csi_operations_seconds",
            "How long calls to CSI drivers took.",
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

    def record_csi_call(self, driver: str, method: str, code: str, seconds: float) -> None:
        """Record a call to a CSI driver: `method` is the full path, `code` is spelled as `NotFound`."""
        self._calls.labels(driver, method, code, "false").observe(seconds)


class VolumeNumbers(Collector):
    """Collector of the number of volumes and of the usage of claimed volumes, at each scrape."""

    def __init__(
        self,
        count: VolumeCount,
        pods: Callable[[], Iterable[Pod]],
        usage: Callable[[str], Mapping[str, VolumeStats]],
    ) -> None:
        """Initialize; `usage` returns the latest stats of a pod's volumes (by the pod's uid), by name."""
        self._count = count
        self._pods = pods
        self._usage = usage

    def describe(self) -> Iterable[Metric]:
        """Return no metrics in advance: their names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        volumes = GaugeMetricFamily(
            "volume_manager_total_volumes",
            "Volumes that pods want, and that they have.",
            labels=["plugin_name", "state"],
        )
        for labels, number in sorted(self._count.totals().items()):
            volumes.add_metric(labels, number)
        yield volumes
        claimed = {
            (pod.metadata.namespace, claim): usage
            for pod in self._pods()
            for volume, usage in self._usage(pod.uid).items()
            if (claim := claim_of(pod, volume))
        }
        for name, what, amount in _STATS:
            family = GaugeMetricFamily(
                f"kubelet_volume_stats_{name}", what, labels=["namespace", "persistentvolumeclaim"]
            )
            for (namespace, claim), usage in sorted(claimed.items(), key=lambda pair: pair[0]):
                family.add_metric([namespace, claim], amount(usage))
            yield family


_STATS: tuple[tuple[str, str, Callable[[VolumeStats], int]], ...] = (
    ("capacity_bytes", "Size of a claimed volume, in bytes.", lambda usage: usage.capacity),
    ("available_bytes", "What is left of a claimed volume, in bytes.", lambda usage: usage.available),
    ("used_bytes", "What is used of a claimed volume, in bytes.", lambda usage: usage.used),
    ("inodes", "Inodes of a claimed volume.", lambda usage: usage.inodes),
    ("inodes_free", "Inodes that are left of a claimed volume.", lambda usage: usage.inodes_free),
    ("inodes_used", "Inodes that are used of a claimed volume.", lambda usage: usage.inodes_used),
)


def claim_of(pod: Pod, name: str) -> str:
    """Return the name of the claim behind a pod's volume; empty if it has no claim."""
    for volume in pod.spec.volumes:
        if volume.name == name:
            if volume.persistent_volume_claim is not None:
                return volume.persistent_volume_claim.claim_name
            return f"{pod.metadata.name}-{name}" if volume.ephemeral is not None else ""
    return ""


def plugin_name(kind: str, plugin_dir: str, source: Any = None) -> str:
    """Return a plugin's name in metrics: `kubernetes.io/empty-dir`, `kubernetes.io/csi:<driver>`."""
    name = plugin_dir.replace("~", "/") or _NAMES_WITHOUT_DIRECTORY.get(kind, f"kubernetes.io/{kind.lower()}")
    driver = getattr(source, "driver", "") if name == "kubernetes.io/csi" else ""
    return f"{name}:{driver}" if driver else name
