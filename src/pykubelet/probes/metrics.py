"""How often containers are asked, with what result, and how long it takes: the reference's metrics.

A probe's series appear with its first outcome and go when the probe goes, or a node that saw many
pods would carry them all for ever.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.probes.types import Kind
from pykubelet.util.metrics import SECONDS


class Labels(NamedTuple):
    """Which probe a series belongs to."""

    kind: Kind
    container: str
    pod: str
    namespace: str
    uid: str


class ProbeMetrics:
    """The probes of one agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "prober_probe_total",
            "Startup, readiness and liveness probes of containers, by result.",
            ["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
            registry=registry,
        )
        self._duration = Histogram(
            "prober_probe_duration_seconds",
            "How long probes took that were answered well.",
            ["probe_type", "container", "pod", "namespace"],
            buckets=SECONDS,
            registry=registry,
        )

    def observe(self, labels: Labels, *, passed: bool, seconds: float) -> None:
        """Count one outcome."""
        kind = labels.kind.title()
        result = "successful" if passed else "failed"
        self._total.labels(kind, result, labels.container, labels.pod, labels.namespace, labels.uid).inc()
        if passed:
            self._duration.labels(kind, labels.container, labels.pod, labels.namespace).observe(seconds)

    def forget(self, labels: Labels) -> None:
        """Drop the series of a probe that is over."""
        kind = labels.kind.title()
        for result in ("successful", "failed"):
            self._total.remove(kind, result, labels.container, labels.pod, labels.namespace, labels.uid)
        self._duration.remove(kind, labels.container, labels.pod, labels.namespace)
