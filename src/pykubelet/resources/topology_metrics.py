"""How many pods asked for CPUs, memory and devices, how many were refused, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.resources.alignment_metrics import AlignmentMetrics

_MILLISECONDS = tuple(0.05 * 2**step for step in range(15))


class TopologyMetrics:
    """The topology manager of one agent; without a registry nobody sees the numbers."""

    def __init__(
        self, registry: CollectorRegistry | None = None, alignment: AlignmentMetrics | None = None
    ) -> None:
        self.alignment = alignment or AlignmentMetrics()
        self._requests = Counter(
            "kubelet_topology_manager_admission_requests_total",
            "Pods whose CPUs, memory and devices had to be found.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_topology_manager_admission_errors_total",
            "Pods that were refused because theirs could not be given near to each other.",
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_topology_manager_admission_duration_ms",
            "How long finding them took, in milliseconds.",
            buckets=_MILLISECONDS,
            registry=registry,
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a pod, and measure how long it takes to the end of the block."""
        self._requests.inc()
        began = perf_counter()
        try:
            yield
        finally:
            # Whole milliseconds, as the reference counts them.
            self._duration.observe(int((perf_counter() - began) * 1000))
