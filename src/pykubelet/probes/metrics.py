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

    def series(self, labels: Labels) -> ProbeSeries:
        """Return the series of a probe, which do not exist before its first result."""
        return ProbeSeries(self._total, self._duration, labels)


class ProbeSeries:
    """Series of one probe. Looking them up by their labels takes longer than counting."""

    def __init__(self, total: Counter, duration: Histogram, labels: Labels) -> None:
        kind = labels.kind.title()
        owner = (labels.container, labels.pod, labels.namespace)
        self._total = total
        self._duration = duration
        self._total_labels = {
            passed: (kind, "successful" if passed else "failed", *owner, labels.uid)
            for passed in (True, False)
        }
        self._duration_labels = (kind, *owner)
        self._counts: dict[bool, Counter] = {}
        self._seconds: Histogram | None = None

    def observe(self, *, passed: bool, seconds: float) -> None:
        """Count one result; the duration in seconds is observed for a passed probe only."""
        if (count := self._counts.get(passed)) is None:
            count = self._counts[passed] = self._total.labels(*self._total_labels[passed])
        count.inc()
        if passed:
            if self._seconds is None:
                self._seconds = self._duration.labels(*self._duration_labels)
            self._seconds.observe(seconds)

    def remove(self) -> None:
        """Remove the series of a probe that has been stopped."""
        for passed in self._counts:
            self._total.remove(*self._total_labels[passed])
        if self._seconds is not None:
            self._duration.remove(*self._duration_labels)
        self._counts.clear()
        self._seconds = None
