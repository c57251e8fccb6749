"""Metrics of the pods API; exported also while its feature gate is off, as upstream."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class PodWatchMetrics:
    """Metrics of the pods API."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Initialize; without a registry the metrics are not exported."""
        self.dropped = Counter(
            "kubelet_pod_watch_events_dropped_total",
            "Cumulative number of pod watch events dropped.",
            registry=registry,
        )
