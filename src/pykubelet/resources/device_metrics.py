"""How often device plugins register, and how long they take to hand out devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.metrics import SECONDS


class DeviceMetrics:
    """The devices of one agent."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Without a registry nobody sees the numbers."""
        self._registrations = Counter(
            "kubelet_device_plugin_registration_total",
            "Registrations of device plugins.",
            ["resource_name"],
            registry=registry,
        )
        self._allocations = Histogram(
            "kubelet_device_plugin_alloc_duration_seconds",
            "How long a device plugin took to hand out devices.",
            ["resource_name"],
            buckets=SECONDS,
            registry=registry,
        )

    def registered(self, resource: str) -> None:
        """Count a registration."""
        self._registrations.labels(resource).inc()

    @contextmanager
    def timed(self, resource: str) -> Iterator[None]:
        """Measure an allocation from here to the end of the block, however it ends."""
        began = perf_counter()
        try:
            yield
        finally:
            self._allocations.labels(resource).observe(perf_counter() - began)
