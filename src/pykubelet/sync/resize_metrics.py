"""How often pods are resized in place, how long it takes, and how many wait for it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MILLISECONDS = (
    *(10, 50, 100, 500, 1000, 2000, 5000, 10_000, 20_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000),
)


class ResizeMetrics:
    """The resizes of one agent; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._requested = Counter(
            "kubelet_container_requested_resizes_total",
            "Changes of containers' resources that were wished for, each resource by itself.",
            ["resource", "requirement", "operation"],
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_pod_resize_duration_milliseconds",
            "How long it took to resize a pod.",
            ["success"],
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self._pending = Gauge(
            "kubelet_pod_pending_resizes",
            "Pods that do not get what they wish for, or not yet.",
            ["reason"],
            registry=registry,
        )
        self._infeasible = Counter(
            "kubelet_pod_infeasible_resizes_total",
            "Wishes that this node cannot fulfil.",
            ["reason_detail"],
            registry=registry,
        )
        self._in_progress = Gauge(
            "kubelet_pod_in_progress_resizes", "Pods that are being resized.", registry=registry
        )
        self._accepted = Counter(
            "kubelet_pod_deferred_accepted_resizes_total",
            "Wishes that were fulfilled after they had to wait, by what made room.",
            ["retry_trigger"],
            registry=registry,
        )

    def requested(self, resource: str, requirement: str, operation: str) -> None:
        """Count a wish."""
        self._requested.labels(resource, requirement, operation).inc()

    def resized(self, seconds: float, *, success: bool) -> None:
        """Count a resize that was tried."""
        self._duration.labels("true" if success else "false").observe(seconds * 1000)

    def infeasible(self, detail: str) -> None:
        """Count a wish that cannot be fulfilled, each time that it was looked at."""
        self._infeasible.labels(detail).inc()

    def accepted(self, trigger: str) -> None:
        """Count a wish that is fulfilled at last."""
        self._accepted.labels(trigger).inc()

    def now(self, pending: Iterable[str], in_progress: int) -> None:
        """Say how many wait, by their reasons, and how many are being worked on."""
        reasons = [reason.lower() for reason in pending]
        self._pending.clear()
        for reason in set(reasons):
            self._pending.labels(reason).set(reasons.count(reason))
        self._in_progress.set(in_progress)
