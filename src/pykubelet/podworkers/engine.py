"""Pod engine: the node's pods, as the servers and the managers of the node query and change them.

Sources → mux → loop → workers → syncer (cgroup, volumes, sandbox, containers) → status, and runtime events
back into the loop, as in docs/architecture.md. In a cluster, pods come from the API server too, and their
statuses are sent to it (`api_server_sync.py`). `agent/pod_engine.py` builds the engine and starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pykubelet.api.pod import Container, Pod
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.ephemeral_containers import (
    EphemeralContainerRejected,
    completed_ephemeral_container,
)
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.podworkers.api_server_sync import ApiServerSync
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.loop import SyncLoop
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_admission import PodAdmission
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorker, PodWorkers, PodWorkerState
from pykubelet.status.compute import TERMINAL


class PodEngine:
    """Queries about the node's pods, and changes that an operator or a manager requests."""

    def __init__(
        self,
        *,
        records: PodRecords,
        loop: SyncLoop,
        pleg: Pleg,
        workers: PodWorkers,
        syncer: NodePodSyncer,
        admission: PodAdmission,
        housekeeping: Housekeeping,
        api_server: ApiServerSync | None,
        job_has_completed: Callable[[Pod], bool] = lambda _: False,
    ) -> None:
        """Initialize; `api_server` is None on a standalone node.

        `job_has_completed` returns whether the Job of a pod has completed, as far as this node controls it.
        """
        self.records = records
        self.store = records.store
        self.statuses = records.statuses
        self.history = records.history
        self.loop = loop
        self.pleg = pleg
        self.workers = workers
        self.syncer = syncer
        self._admission = admission
        self._housekeeping = housekeeping
        self._api_server = api_server
        self.job_has_completed = job_has_completed

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
