"""Gauges of pods and containers, computed on collection, and all metrics of the pod engine.

Desired pods are counted in the pod store, working pods in the workers, running pods and containers in the
last observed state of the runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.mux import PodChange, PodStore
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.podworkers.metrics import PlegMetrics, StartedMetrics, WorkerMetrics
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.startup_latency import PodStartupLatencyTracker
from pykubelet.podworkers.workers import PodWorker, PodWorkers, PodWorkerState
from pykubelet.probes.network_probes import lifecycle_get
from pykubelet.status.compute import TERMINAL, StatusStore
from pykubelet.status.manager import StatusMetrics

_STATES = ("created", "running", "exited", "unknown")
_LIVES = {
    PodWorkerState.SYNCING: "sync",
    PodWorkerState.TERMINATING: "terminating",
    PodWorkerState.TERMINATED: "terminated",
}
_UNKNOWN = ("runtime_only", "unknown")
_CONFIGS = (("desired", ""), ("desired", "true"), ("orphan", ""), ("orphan", "true"), _UNKNOWN)
_PLACES = [(life, *config) for config in _CONFIGS for life in _LIVES.values()]


class PodCounts(Collector):
    """Collector of pod and container gauges."""

    def __init__(
        self,
        store: PodStore,
        workers: PodWorkers,
        statuses: StatusStore,
        life: NodePodSyncer,
        pleg: Pleg,
    ) -> None:
        self._store = store
        self._workers = workers
        self._statuses = statuses
        self._life = life
        self._pleg = pleg

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        yield from self._running()
        pods = self._store.pods()
        yield _by_static("kubelet_desired_pods", "Desired pods of this node.", pods)
        active = [pod for pod in pods if self._is_active(pod)]
        yield _by_static("kubelet_active_pods", "Desired pods of this node that have not terminated.", active)
        yield _one(
            "kubelet_mirror_pods",
            "Mirror pods in the API server.",
            len(self._store.mirrors()),
        )
        yield _one(
            "kubelet_managed_ephemeral_containers",
            "Ephemeral containers of the desired pods.",
            sum(len(pod.spec.ephemeral_containers) for pod in pods),
        )
        yield self._working(pods)

    def _observed_pods(self) -> Iterator[ObservedPod]:
        """Yield the last observed state of each pod, from its worker or from the last relist."""
        listed = self._pleg.pods
        for uid in {*listed, *self._workers.uids(), *(pod.uid for pod in self._store.pods())}:
            observed = self._life.observed(uid) or listed.get(uid)
            if observed is not None:
                yield observed

    def _running(self) -> Iterator[Metric]:
        pods, states = 0, Counter[str]()
        for observed in self._observed_pods():
            pods += any(sandbox.ready for sandbox in observed.sandboxes)
            states.update(container.phase for container in observed.containers)
        yield _one("kubelet_running_pods", "Pods with a running sandbox.", pods)
        yield _family(
            "kubelet_running_containers",
            "Containers in the runtime, by state.",
            ["container_state"],
            {(state,): states[state] for state in _STATES},
        )

    def _is_active(self, pod: Pod) -> bool:
        worker, status = self._workers.get(pod.uid), self._statuses.get(pod.uid)
        ended = status is not None and status.phase in TERMINAL
        if worker is None:
            return not ended
        return worker.state is PodWorkerState.TERMINATING or (
            worker.state is PodWorkerState.SYNCING and not ended
        )

    def _working(self, pods: Iterable[Pod]) -> Metric:
        desired_uids = {pod.uid for pod in pods}
        counts = Counter(_place(worker, desired_uids) for worker in self._workers.all())
        # A terminated pod that is still desired has no worker.
        counts.update(
            ("terminated", "desired", _static(pod))
            for pod in pods
            if self._workers.get(pod.uid) is None and not self._is_active(pod)
        )
        return _family(
            "kubelet_working_pods",
            "Pods with a worker, by lifecycle state, whether they are desired, and whether they are static.",
            ["lifecycle", "config", "static"],
            {place: counts[place] for place in _PLACES},
        )


def _place(worker: PodWorker, desired_uids: set[str]) -> tuple[str, str, str]:
    life = _LIVES.get(worker.state, "terminated")
    if worker.pod is None:
        return (life, *_UNKNOWN)
    return life, "desired" if worker.uid in desired_uids else "orphan", _static(worker.pod)


def _static(pod: Pod) -> str:
    return "true" if is_static_pod(pod) else ""


def _by_static(name: str, text: str, pods: Iterable[Pod]) -> Metric:
    counts = Counter(map(_static, pods))
    return _family(name, text, ["static"], {(static,): counts[static] for static in ("", "true")})


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _family(name: str, text: str, labels: list[str], values: dict[tuple[str, ...], int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


class EngineMetrics:
    """All metrics of a pod engine, in the registry of its kubelet."""

    def __init__(self, registry: CollectorRegistry, statuses: StatusStore, journal: PodHistory) -> None:
        self._registry = registry
        self.workers = WorkerMetrics(registry)
        self.statuses = StatusMetrics(registry)
        self.pleg = PlegMetrics(registry)
        self.starts = StartMetrics(registry)
        self.lifecycle_get = partial(lifecycle_get, on_fallback=self.starts.fell_back)
        self.pod_starts = PodStartupLatencyTracker(StartedMetrics(registry))
        statuses.add_listener(self.pod_starts.status_changed)
        journal.add_listener(self.pod_starts.happened)

    def shown(self, change: PodChange) -> None:
        """Record a pod as the API server shows it."""
        if change.source == "api" and change.op != "REMOVE":
            self.pod_starts.shown(change.pod)

    def count_pods(
        self, store: PodStore, workers: PodWorkers, statuses: StatusStore, life: NodePodSyncer, pleg: Pleg
    ) -> None:
        """Register the collector of pod gauges."""
        self._registry.register(PodCounts(store, workers, statuses, life, pleg))
