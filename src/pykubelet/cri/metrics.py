"""How often the runtime is called, how long it takes, how often it fails: the reference's metrics.

Built on a registry that the caller gives, because two agents can live in one process.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.metrics import SECONDS

# 5 ms to 12 minutes: a status takes milliseconds, a large image's pull takes minutes.
_OPERATION_BUCKETS = [0.005 * 2.5**n for n in range(14)]


class CriMetrics:
    """The runtime operations of one agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "kubelet_runtime_operations_total",
            "Calls to the container runtime, by operation.",
            ["operation_type"],
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_runtime_operations_duration_seconds",
            "How long calls to the container runtime took, by operation.",
            ["operation_type"],
            buckets=_OPERATION_BUCKETS,
            registry=registry,
        )
        self._errors = Counter(
            "kubelet_runtime_operations_errors_total",
            "Calls to the container runtime that failed, by operation.",
            ["operation_type"],
            registry=registry,
        )
        self._sandbox_duration = Histogram(
            "kubelet_run_podsandbox_duration_seconds",
            "How long it took to start pod sandboxes, by runtime handler.",
            ["runtime_handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self._sandbox_errors = Counter(
            "kubelet_run_podsandbox_errors_total",
            "Pod sandboxes that could not be started, by runtime handler.",
            ["runtime_handler"],
            registry=registry,
        )

        # Finding a series by its labels takes longer than counting.
        self._series: dict[str, tuple[Counter, Histogram]] = {}

    def observe(self, operation: str, seconds: float, *, failed: bool) -> None:
        """Count one call that ended."""
        if (series := self._series.get(operation)) is None:
            series = self._total.labels(operation), self._duration.labels(operation)
            self._series[operation] = series
        total, duration = series
        total.inc()
        duration.observe(seconds)
        if failed:
            self._errors.labels(operation).inc()

    def observe_sandbox(self, handler: str, seconds: float, *, failed: bool) -> None:
        """Count one attempt to start a sandbox with this runtime handler."""
        self._sandbox_duration.labels(handler).observe(seconds)
        if failed:
            self._sandbox_errors.labels(handler).inc()
