"""How long pulls take, how often images were needed, and how credential providers do.

The names and labels are the reference's. Built on a registry that the caller gives, because two
agents can live in one process.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.metrics import SECONDS

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
    """The images of one agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pulls = Histogram(
            "kubelet_image_pull_duration_seconds",
            "How long pulls of images took, the time in the queue included, by size of the image.",
            ["image_size_in_bytes"],
            buckets=_PULL_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "kubelet_image_manager_ensure_image_requests_total",
            "How often an image was needed.",
            ["pull_policy", "present_locally", "pull_required"],
            registry=registry,
        )
        self._plugin_duration = Histogram(
            "kubelet_credential_provider_plugin_duration",
            "How long credential providers took, in seconds.",
            ["plugin_name"],
            buckets=SECONDS,
            registry=registry,
        )
        self._plugin_errors = Counter(
            "kubelet_credential_provider_plugin_errors_total",
            "Credential providers that failed.",
            ["plugin_name"],
            registry=registry,
        )

    def pulled(self, size_bytes: int, seconds: float) -> None:
        """Count a pull that succeeded."""
        self._pulls.labels(size_label(size_bytes)).observe(seconds)

    def needed(self, policy: str, present: bool | None, pull: bool | None) -> None:
        """Count that an image was needed: was it present, and had it to be pulled (None: unknown)?"""
        self._requests.labels(policy.lower(), _word(present), _word(pull)).inc()

    def plugin_ran(self, name: str, seconds: float, *, failed: bool) -> None:
        """Count a run of a credential provider."""
        self._plugin_duration.labels(name).observe(seconds)
        if failed:
            self._plugin_errors.labels(name).inc()


def size_label(size_bytes: int) -> str:
    """Give the class of size that an image belongs to; zero stands for a size that is not known."""
    if size_bytes == 0:
        return "N/A"
    index = bisect_left(list(_SIZES), size_bytes)
    return [*_SIZES.values(), _LARGEST][index]


def _word(known: bool | None) -> str:
    return "unknown" if known is None else str(known).lower()
