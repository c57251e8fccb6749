"""How often containers got everything from one place: a NUMA node, whole cores, one cache; how often not.

The CPU manager and the topology manager count into the same metrics, each what it was told to guarantee.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry

from pykubelet.metrics import PlainCounter

Boundary = Literal["numa_node", "physical_cpu", "uncore_cache"]

_LABELS = ["scope", "boundary"]


class AlignmentMetrics:
    """The alignment on one node; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._aligned = PlainCounter(
            "kubelet_container_aligned_compute_resources_count",
            "Containers that got what they asked for from within a boundary.",
            _LABELS,
            registry=registry,
        )
        self._failed = PlainCounter(
            "kubelet_container_aligned_compute_resources_failure_count",
            "Containers that could not get what they asked for from within a boundary.",
            _LABELS,
            registry=registry,
        )

    def expect(self, boundary: Boundary, scope: str = "container", *, failures: bool = True) -> None:
        """Show a boundary before anything is counted for it."""
        self._aligned.labels(scope, boundary)
        if failures:
            self._failed.labels(scope, boundary)

    def aligned(self, boundary: Boundary, scope: str = "container", count: int = 1) -> None:
        """Count containers that are within a boundary."""
        self._aligned.labels(scope, boundary).inc(count)

    def failed(self, boundary: Boundary, scope: str = "container") -> None:
        """Count one that could not be."""
        self._failed.labels(scope, boundary).inc()
