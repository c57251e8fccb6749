"""How many containers were to get memory of certain NUMA nodes, and how often that failed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class MemoryMetrics:
    """The memory manager of one agent; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.requests = Counter(
            "kubelet_memory_manager_pinning_requests_total",
            "Containers that were to get memory of certain NUMA nodes.",
            registry=registry,
        )
        self.errors = Counter(
            "kubelet_memory_manager_pinning_errors_total",
            "Containers that could not get memory of certain NUMA nodes.",
            registry=registry,
        )
