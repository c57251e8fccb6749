"""The engine's metrics, put together: what each part counts, and who is listened to for it."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from pykubelet.pods.journal import Journal
from pykubelet.pods.mux import PodChange
from pykubelet.pods.store import PodStore
from pykubelet.probes.http_check import lifecycle_get
from pykubelet.runtime.metrics import StartMetrics
from pykubelet.sync.metrics import PlegMetrics, StartedMetrics, StatusMetrics, WorkerMetrics
from pykubelet.sync.pleg import Pleg
from pykubelet.sync.pod_counts import PodCounts
from pykubelet.sync.pod_life import PodLifeOnNode
from pykubelet.sync.pod_starts import PodStarts
from pykubelet.sync.status_store import StatusStore
from pykubelet.sync.workers import PodWorkers


class EngineMetrics:
    """Everything that is counted of one engine, on its agent's registry."""

    def __init__(self, registry: CollectorRegistry, statuses: StatusStore, journal: Journal) -> None:
        self._registry = registry
        self.workers = WorkerMetrics(registry)
        self.statuses = StatusMetrics(registry)
        self.pleg = PlegMetrics(registry)
        self.starts = StartMetrics(registry)
        self.lifecycle_get = partial(lifecycle_get, fell_back=self.starts.fell_back)
        self.pod_starts = PodStarts(StartedMetrics(registry))
        statuses.listen(self.pod_starts.status_changed)
        journal.listen(self.pod_starts.happened)

    def shown(self, change: PodChange) -> None:
        """Take note of what the API server shows of a pod."""
        if change.source == "api" and change.op != "REMOVE":
            self.pod_starts.shown(change.pod)

    def count_pods(
        self, store: PodStore, workers: PodWorkers, statuses: StatusStore, life: PodLifeOnNode, pleg: Pleg
    ) -> None:
        """Have pods counted whenever somebody asks."""
        self._registry.register(PodCounts(store, workers, statuses, life, pleg))
