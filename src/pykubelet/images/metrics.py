"""Metrics of image pulls, image requests, credential providers, pull records and image garbage collection.

Names and labels are upstream's. The registry is a parameter, because two kubelets can run in one process.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pykubelet.util.metrics import SECONDS

_MIB = 1024**2
_GIB = 1024**3
_PULL_BUCKETS = [1, 5, 10, 20, 30, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600]
_SIZES = {
    10 * _MIB: "0-10MB",
    100 * _MIB: "10MB-100MB",
    500 * _MIB: "100MB-500MB",
    1 * _GIB: "500MB-1GB",
    5 * _GIB: "1GB-5GB",
    10 * _GIB: "5GB-10GB",
    20 * _GIB: "10GB-20GB",
    30 * _GIB: "20GB-30GB",
    40 * _GIB: "30GB-40GB",
    60 * _GIB: "40GB-60GB",
    100 * _GIB: "60GB-100GB",
}
_LARGEST = "GT100GB"


class ImageMetrics:
    """Image metrics of one kubelet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pulls = Histogram(
            "kubelet_image_pull_duration_seconds",
            "Duration of image pulls in seconds, including the time in the queue, by image size.",
            ["image_size_in_bytes"],
            buckets=_PULL_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "kubelet_image_manager_ensure_image_requests_total",
            "Requests for an image of a container.",
            ["pull_policy", "present_locally", "pull_required"],
            registry=registry,
        )
        self._plugin_duration = Histogram(
            "kubelet_credential_provider_plugin_duration",
            "Duration of credential provider executions in seconds.",
            ["plugin_name"],
            buckets=SECONDS,
            registry=registry,
        )
        self._plugin_errors = Counter(
            "kubelet_credential_provider_plugin_errors_total",
            "Failed credential provider executions.",
            ["plugin_name"],
            registry=registry,
        )

    def observe_pull(self, size_bytes: int, seconds: float) -> None:
        """Observe a successful pull: size in bytes, duration in seconds."""
        self._pulls.labels(size_label(size_bytes)).observe(seconds)

    def count_request(self, policy: str, present: bool | None, pull: bool | None) -> None:
        """Count a request for an image: whether it was present and had to be pulled (None: unknown)."""
        self._requests.labels(policy.lower(), _label_value(present), _label_value(pull)).inc()

    def observe_plugin_run(self, name: str, seconds: float, *, failed: bool) -> None:
        """Observe a run of a credential provider, with its duration in seconds."""
        self._plugin_duration.labels(name).observe(seconds)
        if failed:
            self._plugin_errors.labels(name).inc()


class PullRecordMetrics:
    """Metrics of pull records, and of checks of access to images."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._intents_on_disk = Gauge(
            "kubelet_imagemanager_ondisk_pullintents",
            "Number of ImagePullIntents stored on disk.",
            registry=registry,
        )
        self._pulled_on_disk = Gauge(
            "kubelet_imagemanager_ondisk_pulledrecords",
            "Number of ImagePulledRecords stored on disk.",
            registry=registry,
        )
        self._intents_usage = Gauge(
            "kubelet_imagemanager_inmemory_pullintents_usage_percent",
            "The ImagePullIntents in-memory cache usage in percent.",
            registry=registry,
        )
        self._pulled_usage = Gauge(
            "kubelet_imagemanager_inmemory_pulledrecords_usage_percent",
            "The ImagePulledRecords in-memory cache usage in percent.",
            registry=registry,
        )
        self._checks = Counter(
            "kubelet_imagemanager_image_mustpull_checks_total",
            "Checks whether a pod may use an image that is already present.",
            ["result"],
            registry=registry,
        )

    def intents(self, on_disk: int, cache_percent: int) -> None:
        """Set the number of pull intents and the usage of their cache in percent."""
        self._intents_on_disk.set(on_disk)
        self._intents_usage.set(cache_percent)

    def pulled_records(self, on_disk: int, cache_percent: int) -> None:
        """Set the number of pulled records and the usage of their cache in percent."""
        self._pulled_on_disk.set(on_disk)
        self._pulled_usage.set(cache_percent)

    def count_check(self, result: str) -> None:
        """Count a check of a pod's access to an image that is present."""
        self._checks.labels(result).inc()


class ImageGCMetrics:
    """Metrics of image garbage collection."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._removed = Counter(
            "kubelet_image_garbage_collected_total",
            "Images removed by garbage collection, by the reason: disk usage (space) or age.",
            ["reason"],
            registry=registry,
        )

    def count_removal(self, reason: Literal["age", "space"]) -> None:
        """Count an image that was removed."""
        self._removed.labels(reason).inc()


def size_label(size_bytes: int) -> str:
    """Return the size class of an image; size zero stands for an unknown size."""
    if size_bytes == 0:
        return "N/A"
    index = bisect_left(list(_SIZES), size_bytes)
    return [*_SIZES.values(), _LARGEST][index]


def _label_value(known: bool | None) -> str:
    return "unknown" if known is None else str(known).lower()
