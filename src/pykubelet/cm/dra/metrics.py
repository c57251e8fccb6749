"""How long it takes to make claims ready and to give them back, and how many are in use."""

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
"""From a tenth of a second to forty: drivers have 45 seconds."""


class DraMetrics:
    """The claims of one agent."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Without a registry nobody sees the numbers."""
        self._registry = registry
        self._operations = Histogram(
            "dra_operations_duration_seconds",
            "How long all claims of a pod took to be made ready or given back.",
            ["operation_name", "is_error"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._calls = Histogram(
            "dra_grpc_operations_duration_seconds",
            "How long calls to drivers of claims took.",
            ["driver_name", "method_name", "grpc_status_code"],
            buckets=_BUCKETS,
            registry=registry,
        )

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Measure what is done for a pod."""
        began, failed = perf_counter(), "false"
        try:
            yield
        except ClaimError:
            failed = "true"
            raise
        finally:
            self._operations.labels(name, failed).observe(perf_counter() - began)

    @contextmanager
    def call(self, driver: str, method: str) -> Iterator[None]:
        """Measure a call to a driver."""
        began, code = perf_counter(), "Canceled"
        try:
            yield
            code = "OK"
        except PluginError as err:
            code = err.code
            raise
        finally:
            self._calls.labels(driver, method, code).observe(perf_counter() - began)

    def count(self, in_use: Callable[[], Mapping[str, int]]) -> None:
        """Show how many prepared claims there are, by driver."""
        if self._registry is not None:
            self._registry.register(_InUse(in_use))


class _InUse(Collector):
    """Looks when it is asked, so that a driver that is gone is not shown for ever."""

    def __init__(self, in_use: Callable[[], Mapping[str, int]]) -> None:
        self._in_use = in_use

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Give the numbers."""
        family = GaugeMetricFamily(
            "dra_resource_claims_in_use",
            f"Claims in use, by driver; {ANY_DRIVER} counts each claim once.",
            labels=["driver_name"],
        )
        for driver, count in sorted(self._in_use().items()):
            family.add_metric([driver], count)
        yield family
