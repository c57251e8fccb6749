"""Pod engine: handles the events of the main loop, and the queries about pods.

Sources → mux → loop → workers → syncer (cgroup, volumes, sandbox, containers) → status, and runtime events
back into the loop, as in docs/architecture.md. In a cluster, pods come from the API server too, and their
statuses are sent to it (`api_server_sync.py`). `agent/pod_engine.py` builds the engine and starts it.

`PodFates` is what the pod syncer knows of a pod beyond its own sync (`podsync.syncer.PodSources`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.decide import always_restarts
from pykubelet.kuberuntime.observed import ObservedPod, PodStates
from pykubelet.logs import get_logger
from pykubelet.podconfig.ephemeral_containers import (
    EphemeralContainerRejected,
    completed_ephemeral_container,
)
from pykubelet.podconfig.mux import PodChange
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.podconfig.static_pods import is_mirror_pod, is_static_pod
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podsync.syncer import Fate, NodePodSyncer
from pykubelet.podworkers.api_server_sync import ApiServerSync
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.loop import SyncLoop
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_admission import PodAdmission
from pykubelet.podworkers.pod_metrics import EngineMetrics
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.worker import PodWorker, PodWorkerState
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.compute import TERMINAL, has_external_change

log = get_logger(__name__)


class PodFates:
    """Fates of terminated pods, and the removal of their state when they have left the node."""

    def __init__(
        self,
        records: PodRecords,
        workers: PodWorkers,
        pleg: Pleg,
        admission: PodAdmission,
        api_server: ApiServerSync | None,
        forget: Sequence[Callable[[str], None]],
    ) -> None:
        """Initialize; each of `forget` is called with the uid of a pod that has left the node."""
        self.clustered = api_server is not None
        self._records = records
        self._workers = workers
        self._pleg = pleg
        self._admission = admission
        self._api_server = api_server
        self._forget = forget
        self._departed: set[str] = set()
        """Uids of removed pods that the API server still has."""

    def fate_of(self, uid: str) -> Fate:
        """Return the fate of a terminated pod."""
        pod = self._records.store.get(uid)
        if pod is not None and self._workers.is_reborn(uid):
            # A pod that has terminated for good must leave nothing, or it would not run again.
            return "restarted" if always_restarts(pod) else "gone"
        if pod is None:
            return "gone"
        deleted = pod.metadata.deletion_timestamp is not None and not is_static_pod(pod)
        return "deleted" if deleted and self.clustered else "desired"

    def is_new(self, uid: str) -> bool:
        """Return whether the runtime certainly has nothing of this pod."""
        return self._pleg.never_saw(uid)

    def listed_since(self, uid: str, time: float) -> PodStates | None:
        """Return a pod's states in the last relist; None if that began before this loop time."""
        return self._pleg.listed_since(uid, time)

    def reject(self, pod: Pod, rejection: AdmitRejection) -> None:
        """Reject a pod that was admitted before."""
        self._admission.reject(pod, rejection)

    def on_terminated(self, uid: str) -> None:
        """Record that no container of a pod runs."""
        if self._api_server is not None:
            self._api_server.stopped(uid)

    async def complete_deletion(self, pod: Pod) -> None:
        """Wait until the API server has the pod's final status, and delete the pod there."""
        if self._api_server is not None:
            await self._api_server.final_status_sent(pod.uid)
            await self._api_server.remove(pod)

    def on_removed(self, uid: str) -> None:
        """Drop the state of a pod that has left the node."""
        for forget in self._forget:
            forget(uid)
        if self.fate_of(uid) == "deleted":
            self._departed.add(uid)
        if self._api_server is not None:
            self._api_server.forget(uid)

    def has_departed(self, uid: str) -> bool:
        """Return whether a pod has left the node while the API server still has it."""
        return uid in self._departed

    def left_source(self, uid: str) -> None:
        """Record that the API server has removed a departed pod."""
        self._departed.discard(uid)
        self._records.history.forget(uid)


class PodEngine:
    """Handlers of the main loop, and queries about the node's pods."""

    def __init__(
        self,
        *,
        records: PodRecords,
        loop: SyncLoop,
        pleg: Pleg,
        workers: PodWorkers,
        syncer: NodePodSyncer,
        fates: PodFates,
        admission: PodAdmission,
        housekeeping: Housekeeping,
        api_server: ApiServerSync | None,
        metrics: EngineMetrics,
    ) -> None:
        """Initialize; `api_server` is None on a standalone node."""
        self.records = records
        self.store = records.store
        self.statuses = records.statuses
        self.history = records.history
        self.loop = loop
        self.pleg = pleg
        self.workers = workers
        self.syncer = syncer
        self._fates = fates
        self._admission = admission
        self._housekeeping = housekeeping
        self._api_server = api_server
        self._metrics = metrics

    # Queries of the API and the command line

    def pods(self) -> list[Pod]:
        """Return the desired and the terminating pods, each with its current status."""
        found = []
        leaving = [pod for pod in self.workers.pods() if self.store.get(pod.uid) is None]
        for pod in [*self.store.pods(), *leaving]:
            status = self.statuses.get(pod.uid)
            found.append(pod if status is None else Pod(metadata=pod.metadata, spec=pod.spec, status=status))
        return found

    def observed_pods(self) -> Iterator[tuple[PodWorker, ObservedPod]]:
        """Yield the workers with the last observed states of their pods, as far as there is one."""
        for worker in self.workers.all():
            if (found := self.syncer.observed(worker.uid)) is not None:
                yield worker, found

    @property
    def observed_version(self) -> tuple[int, int]:
        """Version of `observed_pods`: a consumer that polls compares it first."""
        return self.workers.changes, self.syncer.observations

    def running_pods(self) -> list[Pod]:
        """Return the pods that are synced or terminating, with the resources allocated to them."""
        return [
            self._admission.allocated(worker.pod)
            for worker in self.workers.all()
            if worker.pod is not None and worker.state in (PodWorkerState.SYNCING, PodWorkerState.TERMINATING)
        ]

    def journal(self, uid: str) -> tuple[list[Event], list[TimelineEntry]]:
        """Return a pod's events and timeline."""
        return self.history.events(uid), self.history.timeline(uid)

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart the containers of a pod, or one, in place. Raises LookupError when none runs."""
        if self.store.get(uid) is None:
            raise LookupError(f"no pod with uid {uid}")
        names = self.syncer.request_restart(uid, container)
        if not names:
            raise LookupError(f"no container{f' {container}' if container else ''} of this pod runs")
        self.workers.wake(uid)
        return names

    def add_ephemeral_container(self, uid: str, container: Container) -> None:
        """Add an ephemeral container to a running static pod, in this process only.

        Raises LookupError without the pod, and EphemeralContainerRejected.
        """
        pod = self.records.mux.get(uid)
        if pod is None:
            raise LookupError(f"no pod with uid {uid}")
        if self._api_server is not None:
            raise EphemeralContainerRejected(
                "the node has an API server: use `kubectl debug`, which can add ephemeral containers to all "
                "pods but static ones"
            )
        worker, status = self.workers.get(uid), self.statuses.get(uid)
        is_over = status is not None and status.phase in TERMINAL
        if worker is None or worker.state is not PodWorkerState.SYNCING or is_over:
            raise EphemeralContainerRejected("the pod does not run: it has ended, or was not admitted yet")
        added = completed_ephemeral_container(pod, container)
        self.loop.pods(self.records.mux.add_ephemeral_container(uid, added))

    def restart_static_pods(self, reason: str) -> None:
        """Start static pods again that the kubelet has terminated for this reason."""
        for pod in self.store.static_pods():
            status, worker = self.statuses.get(pod.uid), self.workers.get(pod.uid)
            if worker is not None:
                # A termination that has only been requested does not show in the status yet.
                status = worker.killed_status(status or pod.status)
            if status is None or status.phase not in TERMINAL or status.reason != reason:
                continue
            if worker is None:
                self.statuses.forget(pod.uid)
                self._admission.admit(pod)
            else:
                self.workers.sync(pod)

    async def delete_all_unused_containers(self) -> None:
        """Remove all dead containers that no running pod needs. Raises CriError and OSError."""
        await self._housekeeping.container_gc.delete_all_unused_containers()

    def state(self, uid: str) -> str:
        """Return the state of the pod's worker."""
        worker = self.workers.get(uid)
        return worker.state.value if worker is not None else "gone"

    # Handlers of the main loop (podworkers.loop.Handlers)

    def pod_changed(self, change: PodChange) -> None:
        """Handle a change of the desired pods."""
        pod, reconcile = change.pod, change.op == "RECONCILE"
        log.v(4 if reconcile else 2).info(
            f"SyncLoop {change.op}", source=change.source, pod=pod.full_name, podUID=pod.uid
        )
        self.store.apply(change)
        if self._api_server is not None:
            if change.source == "api" and is_mirror_pod(pod):
                self._api_server.mirror_changed(pod)
                return
            self._api_server.pod_changed(pod)
        self._metrics.shown(change)
        if reconcile:
            self._reconcile(pod)
            return
        self.history.note(pod.uid, "source", f"{change.op} from {change.source}")
        if change.op == "REMOVE":
            self._remove(pod)
        elif is_static_pod(pod) or self._is_to_run(change):
            self._admission.admit(pod)

    def _is_to_run(self, change: PodChange) -> bool:
        """Return whether a pod of the API server is to be synced; terminate one that is being deleted."""
        pod = change.pod
        worker, status = self.workers.get(pod.uid), self.statuses.get(pod.uid)
        if self._fates.has_departed(pod.uid):
            return False
        if worker is None and status is None and pod.status.phase not in TERMINAL:
            final = self.records.final.get(pod.uid)
            if final is not None:
                self._end_again(pod, final)
                return False
        if pod.metadata.deletion_timestamp is not None:
            self.workers.end(pod, pod.metadata.deletion_grace_period_seconds)
            return False
        if worker is None:
            return status is None or status.phase not in TERMINAL
        if change.op == "UPDATE" and worker.state is not PodWorkerState.SYNCING:
            # It has terminated by itself; an update does not start it again.
            worker.set_pod(pod)
            return False
        return True

    def _end_again(self, pod: Pod, final: PodStatus) -> None:
        """Terminate a pod that a previous kubelet process terminated without reporting its status."""
        log.info("Pod was terminated by a node shutdown", pod=pod.full_name, podUID=pod.uid)
        self.history.note(pod.uid, "shutdown", "its final status was not reported before the node went down")
        self.statuses.set(pod, final)
        self.workers.end(pod, pod.metadata.deletion_grace_period_seconds)

    def _remove(self, pod: Pod) -> None:
        if self._fates.has_departed(pod.uid):
            self._fates.left_source(pod.uid)
        else:
            self.workers.end(pod)

    def _reconcile(self, pod: Pod) -> None:
        """Handle a changed pod status in the API server, which other components may have written."""
        worker = self.workers.get(pod.uid)
        before = worker.pod if worker is not None else None
        self.workers.set_pod(pod)
        if before is not None and has_external_change(before, pod):
            self.workers.wake(pod.uid)

    def runtime_changed(self, change: PodLifecycleEvent) -> None:
        """Handle a runtime event, unless it is known already."""
        if self.syncer.take(change):
            self.workers.wake(change.uid)

    def probe_changed(self, uid: str) -> None:
        """Handle a new probe result."""
        worker = self.workers.get(uid)
        if worker is not None and worker.state is PodWorkerState.TERMINATING and worker.pod is not None:
            # Its worker is busy until everything has stopped; report the result now.
            self.syncer.probed(worker.pod)
        self.workers.wake(uid)

    async def housekeep(self) -> None:
        """Run housekeeping: orphaned pods in the runtime and on disk, and garbage collection."""
        self._housekeeping.run_once()
