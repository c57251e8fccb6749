"""Metrics of pod workers, pod starts and the PLEG, with upstream's names.

Counters and durations only; gauges of the current state are computed on collection (`pod_metrics.py`). No
label contains a pod, because the series of all pods that a node ever ran would accumulate.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pykubelet.util.metrics import SECONDS

_STARTS = (
    *(0.5, 1, 2, 3, 4, 5, 6, 8, 10, 20, 30, 45, 60, 120, 180, 240, 300, 360, 480, 600),
    *(900, 1200, 1800, 2700, 3600),
)
_CONTAINERS = (1, 2, 4, 8, 16)


class WorkerMetrics:
    """Metrics of the pod workers; without a registry they are not exposed, as for all classes here."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._duration = Histogram(
            "kubelet_pod_worker_duration_seconds",
            "Duration of one step of a pod worker in seconds, by operation: create, update, sync, kill, "
            "terminated.",
            ["operation_type"],
            buckets=SECONDS,
            registry=registry,
        )
        self._start = Histogram(
            "kubelet_pod_worker_start_duration_seconds",
            "Seconds from the observation of a pod to the start of its worker.",
            buckets=SECONDS,
            registry=registry,
        )
        self._containers = Histogram(
            "kubelet_containers_per_pod_count",
            "Number of containers per pod.",
            buckets=_CONTAINERS,
            registry=registry,
        )
        self._restarted = Counter(
            "kubelet_restarted_pods_total",
            "Pods that were deleted and created again with the same uid.",
            ["static"],
            registry=registry,
        )
        for static in ("", "true"):
            self._restarted.labels(static)
        self._orphans = Counter(
            "kubelet_orphaned_runtime_pods_total",
            "Orphaned pods that were found in the runtime without a worker.",
            registry=registry,
        )

    def worked(self, operation: str, seconds: float) -> None:
        """Record the duration of a step."""
        self._duration.labels(operation).observe(seconds)

    def started(self, containers: int, waited_seconds: float | None) -> None:
        """Record a new worker, with the seconds that its pod waited for it if known."""
        self._containers.observe(containers)
        if waited_seconds is not None:
            self._start.observe(waited_seconds)

    def restarted(self, *, static: bool) -> None:
        """Record a pod that is started again with the same uid."""
        self._restarted.labels("true" if static else "").inc()

    def orphan(self) -> None:
        """Record an orphaned running pod."""
        self._orphans.inc()


class StartedMetrics:
    """Durations of pod starts, and exits of containers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._runs = Histogram(
            "kubelet_pod_start_duration_seconds",
            "Seconds from the first observation of a pod until it runs.",
            buckets=_STARTS,
            registry=registry,
        )
        self._sli = Histogram(
            "kubelet_pod_start_sli_duration_seconds",
            "Seconds from the creation of a stateless pod until the API server shows all containers "
            "started, without image pulls and init containers.",
            buckets=_STARTS,
            registry=registry,
        )
        self._total = Histogram(
            "kubelet_pod_start_total_duration_seconds",
            "Seconds from the creation of a pod until the API server shows all containers started.",
            buckets=_STARTS,
            registry=registry,
        )
        self._first = Gauge(
            "kubelet_first_network_pod_start_sli_duration_seconds",
            "SLI start duration of the first pod with its own network, in seconds.",
            registry=registry,
        )
        self._ended = Counter(
            "kubelet_terminated_containers_total",
            "Terminated containers.",
            ["container_type", "exit_code", "reason"],
            registry=registry,
        )

    def runs(self, seconds: float) -> None:
        """Record a running pod, with the seconds since it was first observed."""
        self._runs.observe(seconds)

    def started(self, seconds: float) -> None:
        """Record a started pod, with the seconds since its creation."""
        self._total.observe(seconds)

    def started_sli(self, seconds: float, *, first: bool) -> None:
        """Record the SLI duration of a start; `first`: of the first pod with a network on this node."""
        self._sli.observe(seconds)
        if first:
            self._first.set(seconds)

    def ended(self, container_type: str, exit_code: int, reason: str) -> None:
        """Record a terminated container."""
        self._ended.labels(container_type, str(exit_code), reason).inc()


class PlegMetrics:
    """Metrics of the PLEG."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._duration = Histogram(
            "kubelet_pleg_relist_duration_seconds",
            "Duration of PLEG relists in seconds.",
            buckets=SECONDS,
            registry=registry,
        )
        self._interval = Histogram(
            "kubelet_pleg_relist_interval_seconds",
            "Interval between PLEG relists in seconds.",
            buckets=SECONDS,
            registry=registry,
        )
        self._last = Gauge(
            "kubelet_pleg_last_seen_seconds",
            "Unix time of the last PLEG relist in seconds.",
            registry=registry,
        )

    def listing(self, since_last: float | None) -> None:
        """Record the start of a relist, with the seconds since the previous one."""
        if since_last is not None:
            self._interval.observe(since_last)

    def listed(self, seconds: float) -> None:
        """Record the duration of a relist, successful or not."""
        self._duration.observe(seconds)

    def seen(self) -> None:
        """Record the time of a successful relist."""
        self._last.set_to_current_time()
