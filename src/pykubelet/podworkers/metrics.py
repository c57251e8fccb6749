"""How the agent keeps up with its pods: the reference's metrics of workers, starts, statuses and the PLEG.

Counters and durations only; what can be counted at any time is counted when somebody asks
(`pod_counts.py`). No label names a pod: a node that saw many would carry them all for ever.
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
    """The workers of one agent; as of all classes here, without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._duration = Histogram(
            "kubelet_pod_worker_duration_seconds",
            "How long steps of pods took: the first (create), after a change (update), others (sync), "
            "stopping (kill), cleaning up (terminated).",
            ["operation_type"],
            buckets=SECONDS,
            registry=registry,
        )
        self._start = Histogram(
            "kubelet_pod_worker_start_duration_seconds",
            "How long it took from seeing a pod to working on it.",
            buckets=SECONDS,
            registry=registry,
        )
        self._containers = Histogram(
            "kubelet_containers_per_pod_count",
            "How many containers the pods had that came to run.",
            buckets=_CONTAINERS,
            registry=registry,
        )
        self._restarted = Counter(
            "kubelet_restarted_pods_total",
            "Pods that were deleted and came again with the same uid.",
            ["static"],
            registry=registry,
        )
        for static in ("", "true"):
            self._restarted.labels(static)
        self._orphans = Counter(
            "kubelet_orphaned_runtime_pods_total",
            "Pods found in the runtime that nobody wants and no worker knew.",
            registry=registry,
        )

    def worked(self, operation: str, seconds: float) -> None:
        """Count a step of a pod."""
        self._duration.labels(operation).observe(seconds)

    def started(self, containers: int, waited_seconds: float | None) -> None:
        """Count a pod that is worked on from now, with how long it waited for that if it is known."""
        self._containers.observe(containers)
        if waited_seconds is not None:
            self._start.observe(waited_seconds)

    def restarted(self, *, static: bool) -> None:
        """Count a pod that came again."""
        self._restarted.labels("true" if static else "").inc()

    def orphan(self) -> None:
        """Count a pod in the runtime that nobody knew."""
        self._orphans.inc()


class StartedMetrics:
    """How long pods took to start, and how containers ended."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._runs = Histogram(
            "kubelet_pod_start_duration_seconds",
            "How long it took from seeing a pod to its running.",
            buckets=_STARTS,
            registry=registry,
        )
        self._sli = Histogram(
            "kubelet_pod_start_sli_duration_seconds",
            "How long it took from a pod's creation until the API server showed all its containers started, "
            "without the time for images and init containers; only pods without state.",
            buckets=_STARTS,
            registry=registry,
        )
        self._total = Histogram(
            "kubelet_pod_start_total_duration_seconds",
            "How long it took from a pod's creation until the API server showed all its containers started.",
            buckets=_STARTS,
            registry=registry,
        )
        self._first = Gauge(
            "kubelet_first_network_pod_start_sli_duration_seconds",
            "The same as the SLI, of the first pod with a network of its own.",
            registry=registry,
        )
        self._ended = Counter(
            "kubelet_terminated_containers_total",
            "Containers that ended.",
            ["container_type", "exit_code", "reason"],
            registry=registry,
        )

    def runs(self, seconds: float) -> None:
        """Count a pod that runs, so long after it was first seen."""
        self._runs.observe(seconds)

    def started(self, seconds: float) -> None:
        """Count a pod that has started, so long after its creation."""
        self._total.observe(seconds)

    def started_sli(self, seconds: float, *, first: bool) -> None:
        """Count the part of a start that is the cluster's; `first`: of the first pod with a network."""
        self._sli.observe(seconds)
        if first:
            self._first.set(seconds)

    def ended(self, container_type: str, exit_code: int, reason: str) -> None:
        """Count a container that ended."""
        self._ended.labels(container_type, str(exit_code), reason).inc()


class PlegMetrics:
    """How the agent hears of what happens in the runtime."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._duration = Histogram(
            "kubelet_pleg_relist_duration_seconds",
            "How long it took to list all pods of the runtime.",
            buckets=SECONDS,
            registry=registry,
        )
        self._interval = Histogram(
            "kubelet_pleg_relist_interval_seconds",
            "Time between two lists of all pods of the runtime.",
            buckets=SECONDS,
            registry=registry,
        )
        self._last = Gauge(
            "kubelet_pleg_last_seen_seconds",
            "When all pods of the runtime were last listed, in seconds since 1970.",
            registry=registry,
        )

    def listing(self, since_last: float | None) -> None:
        """Count the begin of a list, so many seconds after the one before."""
        if since_last is not None:
            self._interval.observe(since_last)

    def listed(self, seconds: float) -> None:
        """Count a list that is done, for good or ill."""
        self._duration.observe(seconds)

    def seen(self) -> None:
        """Take note that all pods of the runtime are known now."""
        self._last.set_to_current_time()
