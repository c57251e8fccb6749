"""How long the agent's work on cgroups takes, and which kind of cgroups the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, Histogram

from pykubelet.metrics import SECONDS


class CgroupMetrics:
    """The cgroups of one agent."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, unified: bool = False, memory_qos: bool = False
    ) -> None:
        """Take whether the machine has cgroups v2, and whether the gate `MemoryQoS` is on.

        Without a registry nobody sees the numbers.
        """
        self._duration = Histogram(
            "kubelet_cgroup_manager_duration_seconds",
            "How long it took to make, set or remove a cgroup.",
            ["operation_type"],
            buckets=SECONDS,
            registry=registry,
        )
        version = Gauge("kubelet_cgroup_version", "The version of the machine's cgroups.", registry=registry)
        version.set(2 if unified else 1)
        seen = registry if memory_qos else None
        self._minimum = Gauge(
            "kubelet_memory_qos_node_memory_min_bytes",
            "Memory of guaranteed pods that the kernel never takes back.",
            registry=seen,
        )
        self._low = Gauge(
            "kubelet_memory_qos_node_memory_low_bytes",
            "Memory of burstable pods that the kernel takes back only when there is no other.",
            registry=seen,
        )

    def protected(self, guaranteed: int, burstable: int) -> None:
        """Note the bytes that are kept for pods of the two classes."""
        self._minimum.set(guaranteed)
        self._low.set(burstable)

    @contextmanager
    def timed(self, operation: Literal["create", "update", "destroy"]) -> Iterator[None]:
        """Count an operation from here to the end of the block, however it ends."""
        began = perf_counter()
        try:
            yield
        finally:
            self._duration.labels(operation).observe(perf_counter() - began)
