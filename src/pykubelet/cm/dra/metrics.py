"""Metrics of the DRA manager: durations of operations and of driver calls, and claims in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.cm.dra.claims import ClaimError
from pykubelet.pluginmanager.client import PluginError

ANY_DRIVER = "<any>"
_BUCKETS = tuple(0.1 * 400 ** (step / 14) for step in range(15))
"""From 0.1 to 40 seconds: drivers have 45 seconds."""


class DraMetrics:
    """Metrics of the DRA manager."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Initialize; without a registry the metrics are not exported."""
        self._registry = registry
        self._operations = Histogram(
            "dra_operations_duration_seconds",
            "Duration of the preparation and unpreparation of all claims of a pod in seconds.",
            ["operation_name", "is_error"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._calls = Histogram(
            "dra_grpc_operations_duration_seconds",
            "Duration of gRPC calls to DRA drivers in seconds.",
            ["driver_name", "method_name", "grpc_status_code"],
            buckets=_BUCKETS,
            registry=registry,
        )

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Observe the duration of the block as an operation for a pod."""
        started_at, failed = perf_counter(), "false"
        try:
            yield
        except ClaimError:
            failed = "true"
            raise
        finally:
            self._operations.labels(name, failed).observe(perf_counter() - started_at)

    @contextmanager
    def call(self, driver: str, method: str) -> Iterator[None]:
        """Observe the duration of the block as a call to a driver."""
        started_at, code = perf_counter(), "Canceled"
        try:
            yield
            code = "OK"
        except PluginError as err:
            code = err.code
            raise
        finally:
            self._calls.labels(driver, method, code).observe(perf_counter() - started_at)

    def count(self, in_use: Callable[[], Mapping[str, int]]) -> None:
        """Export the number of prepared claims, by driver."""
        if self._registry is not None:
            self._registry.register(_InUse(in_use))


class _InUse(Collector):
    """Collector that counts at each scrape, so that a removed driver is not exported forever."""

    def __init__(self, in_use: Callable[[], Mapping[str, int]]) -> None:
        self._in_use = in_use

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the metric."""
        family = GaugeMetricFamily(
            "dra_resource_claims_in_use",
            f"Claims in use, by driver; {ANY_DRIVER} counts each claim once.",
            labels=["driver_name"],
        )
        for driver, count in sorted(self._in_use().items()):
            family.add_metric([driver], count)
        yield family
