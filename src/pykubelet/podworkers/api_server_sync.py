"""The engine's side towards an API server: pods from it, statuses and mirrors to it.

Everything that a node of a cluster does beyond a standalone one is behind `ApiServerSync`; the engine
tells it what changed and asks it before a pod's end is final. Nothing here ever stops a pod from
running: with the API server away, statuses and mirrors wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import ApiClient
from pykubelet.config.errors import Problem
from pykubelet.images.credential_provider import PodAccounts
from pykubelet.objects.base import PodObjects
from pykubelet.podconfig.api_source import ApiSource, CheckpointSource, EmitUpdate
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.file_source import Emit
from pykubelet.podconfig.mux import PodStore
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podworkers.worker import PodWorkerState
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.compute import StatusStore
from pykubelet.status.manager import StatusManager, StatusMetrics
from pykubelet.status.mirror_pods import DesiredMirrors, MirrorPods, fits
from pykubelet.util.tasks import TaskScope


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """What the engine needs of a cluster."""

    client: ApiClient
    """For objects, with the limit of `kubeAPIQPS`."""
    node_uid: Callable[[], str]
    """The uid of this node's object; empty as long as it is not registered."""
    objects: PodObjects
    handler_of: Callable[[Pod], Awaitable[str]]
    """The runtime handler of a pod's RuntimeClass; raises ObjectError."""
    services: Callable[[Pod], Mapping[str, str] | None]
    """The variables by which a pod's containers find services; None while they are not known."""
    accounts: PodAccounts | None = None
    """The service accounts in whose name credential providers are asked."""
    node_ready: Callable[[], Awaitable[None]] | None = None
    """Waits until the node's object has been read; pods are listed only then."""
    checkpoints: Checkpoints | None = None
    """Where pods are kept for when the API server does not answer; None where they are not."""


class ApiServerSync:
    """The source, the sender and the mirrors of one node; `start` puts their tasks into a scope."""

    def __init__(
        self,
        parts: ClusterParts,
        node_name: str,
        emit: Emit,
        emit_update: EmitUpdate,
        offer: Callable[[Sequence[Pod]], None],
        *,
        store: PodStore,
        statuses: StatusStore,
        workers: PodWorkers,
        all_reported: Callable[[], bool],
        crowded: Callable[[], bool],
        metrics: StatusMetrics | None = None,
    ) -> None:
        self._parts = parts
        self._emit = emit
        self._store = store
        self._statuses = statuses
        self._workers = workers
        self._all_reported = all_reported
        self._source = ApiSource(
            parts.client, node_name, self._take, emit_update=emit_update, ready=parts.node_ready
        )
        self._sender = StatusManager(
            parts.client,
            object_of=self._object_of,
            may_run=self._may_run,
            crowded=crowded,
            metrics=metrics,
        )
        self._mirrors = MirrorPods(
            parts.client, store, node_name, wishes=self._wishes, node_uid=parts.node_uid
        )
        self._last = (
            CheckpointSource(parts.checkpoints, store, offer) if parts.checkpoints is not None else None
        )
        statuses.listen(self._status_changed)

    def start(self, scope: TaskScope) -> None:
        """Begin to watch and to send."""
        scope.start(self._source.run(), name="source-api")
        scope.start(self._sender.run(), name="status-sender")
        scope.start(self._mirrors.run(), name="mirror-pods")
        if self._last is not None and self._parts.checkpoints is not None:
            scope.start(self._parts.checkpoints.run(), name="checkpoints")
            scope.start(self._last.run(self._source.synced), name="last-pods")

    @property
    def unreadable(self) -> Set[str]:
        """Names of pods that the API server wants here and that could not be read."""
        return self._source.unreadable

    def services(self, pod: Pod) -> Mapping[str, str] | None:
        """Give the variables by which a pod's containers find services; None while it must wait for them."""
        found = self._parts.services(pod)
        # Better without them than not at all, when nobody knows when the API server comes back.
        return {} if found is None and self._last is not None and self._last.speak_for_the_api else found

    # What the engine tells

    def pod_changed(self, pod: Pod) -> None:
        """Take note of a pod that came, changed or went, from any source."""
        if is_static_pod(pod):
            self._mirrors.wake()
            return
        self._sender.seen(pod.uid)
        if self._last is not None:
            self._last.changed(pod, self._statuses.get(pod.uid))

    def pods_known(self) -> None:
        """Take note that the API server has told its pods, and all of them were taken note of."""
        self._mirrors.wake()

    def mirror_changed(self, mirror: Pod) -> None:
        """Take note of a mirror pod that came, changed or went."""
        self._mirrors.seen(mirror)
        static = self._store.by_name(mirror.full_name)
        if static is not None:
            self._sender.seen(static.uid)

    def stopped(self, uid: str) -> None:
        """Take note that nothing of a pod runs any more: now it may be said that it has ended."""
        self._sender.check(uid)

    async def told(self, uid: str) -> None:
        """Wait until the API server knows a pod's last status."""
        await self._sender.told(uid)

    async def remove(self, pod: Pod) -> None:
        """Complete a pod's deletion in the API server; nothing of it may be left here."""
        await self._sender.remove(pod)

    def gone(self, uid: str) -> None:
        """Forget a pod of which nothing is left."""
        self._sender.forget(uid)
        pod = self._workers.pod(uid)
        if pod is None or is_static_pod(pod):
            self._mirrors.wake()

    # What its parts say and ask

    def _take(self, source: str, pods: list[Pod], problems: list[Problem]) -> None:
        self._emit(source, pods, problems)
        if self._last is not None:
            self._last.answered(pods, self.unreadable)

    def _status_changed(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        self._sender.changed(pod, status)
        if self._last is not None:
            self._last.changed(pod, status)

    def _object_of(self, uid: str) -> Pod | None:
        """What the API server was last seen to have of a pod that runs here."""
        pod = self._store.get(uid)
        if pod is None or not is_static_pod(pod):
            return pod
        mirror = self._store.mirror_of(pod)
        return mirror if mirror is not None and fits(mirror, pod) else None

    def _may_run(self, uid: str) -> bool:
        worker = self._workers.get(uid)
        return worker is not None and worker.state in (PodWorkerState.SYNCING, PodWorkerState.TERMINATING)

    def _wishes(self) -> DesiredMirrors | None:
        if not self._all_reported():
            return None
        return DesiredMirrors(self._store.static_pods(), self._leaving)

    def _leaving(self) -> set[str]:
        """Return the names of pods that are no longer desired and have not ended yet."""
        return {worker.name for worker in self._workers.unfinished() if self._store.get(worker.uid) is None}
