"""Fates of terminated pods: what the syncer knows of a pod beyond its own sync (`podsync.syncer.PodSources`).

The state is in memory only: after a restart, the sources and the runtime determine the fates again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.decide import always_restarts
from pykubelet.kuberuntime.observed import PodStates
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.syncer import Fate
from pykubelet.podworkers.api_server_sync import ApiServerSync
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_admission import PodAdmission
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorkers


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
        honoured: Callable[[Pod], Pod],
    ) -> None:
        """Initialize; each of `forget` is called with the uid of a pod that has left the node.

        `honoured` returns a pod with the restart rules that this node honours (`podsync.restart_all`).
        """
        self.clustered = api_server is not None
        self._records = records
        self._workers = workers
        self._pleg = pleg
        self._admission = admission
        self._api_server = api_server
        self._forget = forget
        self._honoured = honoured
        self._departed: set[str] = set()
        """Uids of removed pods that the API server still has."""

    def fate_of(self, uid: str) -> Fate:
        """Return the fate of a terminated pod."""
        pod = self._records.store.get(uid)
        if pod is not None and self._workers.is_reborn(uid):
            # A pod that has terminated for good must leave nothing, or it would not run again.
            return "restarted" if always_restarts(self._honoured(pod)) else "gone"
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
