"""Metrics of probes: counts by result, and durations; names and labels are upstream's.

The series of a probe appear with its first result and are removed with the probe; otherwise a node would keep
the series of all pods that it ever ran.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.probes.types import Kind
from pykubelet.util.metrics import SECONDS


class Labels(NamedTuple):
    """Labels of one probe's series."""

    kind: Kind
    container: str
    pod: str
    namespace: str
    uid: str


class ProbeMetrics:
    """Probe metrics of one kubelet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "prober_probe_total",
            "Startup, readiness and liveness probes of containers, by result.",
            ["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
            registry=registry,
        )
        self._duration = Histogram(
            "prober_probe_duration_seconds",
            "Duration of successful probes in seconds.",
            ["probe_type", "container", "pod", "namespace"],
            buckets=SECONDS,
            registry=registry,
        )

    def observe(self, labels: Labels, *, passed: bool, seconds: float) -> None:
        """Count one result; the duration in seconds is observed for a passed probe only."""
        kind = labels.kind.title()
        result = "successful" if passed else "failed"
        self._total.labels(kind, result, labels.container, labels.pod, labels.namespace, labels.uid).inc()
        if passed:
            self._duration.labels(kind, labels.container, labels.pod, labels.namespace).observe(seconds)

    def forget(self, labels: Labels) -> None:
        """Remove the series of a probe that has been stopped."""
        kind = labels.kind.title()
        for result in ("successful", "failed"):
            self._total.remove(kind, result, labels.container, labels.pod, labels.namespace, labels.uid)
        self._duration.remove(kind, labels.container, labels.pod, labels.namespace)
