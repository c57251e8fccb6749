"""Exchange of the pod engine with the API server: pods from it, statuses and mirror pods to it.

`ApiServerSync` contains what a node of a cluster does beyond a standalone one. The engine notifies it of
changes, and waits for it before a deletion is completed. Running pods never depend on it: without the API
server, statuses and mirror pods are delayed.
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
from pykubelet.status.mirror_pods import DesiredMirrors, MirrorPods, is_current
from pykubelet.util.tasks import TaskScope


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """Dependencies of the pod engine on the cluster."""

    client: ApiClient
    """Client for objects, with the rate limit of `kubeAPIQPS`."""
    node_uid: Callable[[], str]
    """Returns the uid of the node object; empty before the registration."""
    objects: PodObjects
    handler_of: Callable[[Pod], Awaitable[str]]
    """Returns the runtime handler of a pod's RuntimeClass. Raises ObjectError."""
    services: Callable[[Pod], Mapping[str, str] | None]
    """Returns the service environment variables of a pod; None before services are synced."""
    accounts: PodAccounts | None = None
    """Service accounts of pods, for credential providers that use their tokens."""
    node_ready: Callable[[], Awaitable[None]] | None = None
    """Waits until the node object was read; pods are listed only then."""
    checkpoints: Checkpoints | None = None
    """Checkpoints of pods for times without an API server; None when they are disabled."""


class ApiServerSync:
    """Pod source, status manager and mirror pods of a node; `start` adds their tasks to a scope."""

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
            get_object=self._object_of,
            may_run=self._may_run,
            in_burst=crowded,
            metrics=metrics,
        )
        self._mirrors = MirrorPods(
            parts.client, store, node_name, desired=self._wishes, node_uid=parts.node_uid
        )
        self._last = (
            CheckpointSource(parts.checkpoints, store, offer) if parts.checkpoints is not None else None
        )
        statuses.add_listener(self._status_changed)

    def start(self, scope: TaskScope) -> None:
        """Start to watch pods and to send statuses."""
        scope.start(self._source.run(), name="source-api")
        scope.start(self._sender.run(), name="status-sender")
        scope.start(self._mirrors.run(), name="mirror-pods")
        if self._last is not None and self._parts.checkpoints is not None:
            scope.start(self._parts.checkpoints.run(), name="checkpoints")
            scope.start(self._last.run(self._source.synced), name="last-pods")

    @property
    def unreadable(self) -> Set[str]:
        """Names of pods of the API server that could not be parsed."""
        return self._source.unreadable

    def services(self, pod: Pod) -> Mapping[str, str] | None:
        """Return the service environment variables of a pod; None while it must wait for them."""
        found = self._parts.services(pod)
        # Without the API server, pods start without these variables rather than wait indefinitely.
        return {} if found is None and self._last is not None and self._last.has_unconfirmed_pods else found

    # Called by the engine

    def pod_changed(self, pod: Pod) -> None:
        """Handle a pod that was added, changed or removed, from any source."""
        if is_static_pod(pod):
            self._mirrors.wake()
            return
        self._sender.handle_object_update(pod.uid)
        if self._last is not None:
            self._last.update(pod, self._statuses.get(pod.uid))

    def pods_known(self) -> None:
        """Record that the first full list of the API server's pods was handled."""
        self._mirrors.wake()

    def mirror_changed(self, mirror: Pod) -> None:
        """Handle a mirror pod that was added, changed or removed."""
        self._mirrors.handle_mirror_update(mirror)
        static = self._store.by_name(mirror.full_name)
        if static is not None:
            self._sender.handle_object_update(static.uid)

    def stopped(self, uid: str) -> None:
        """Record that no container of a pod runs: from now on a terminal status may be sent."""
        self._sender.check(uid)

    async def told(self, uid: str) -> None:
        """Wait until the API server has the pod's final status."""
        await self._sender.wait_reported(uid)

    async def remove(self, pod: Pod) -> None:
        """Complete the deletion of a finished pod in the API server."""
        await self._sender.remove(pod)

    def gone(self, uid: str) -> None:
        """Drop the state of a removed pod."""
        self._sender.forget(uid)
        pod = self._workers.pod(uid)
        if pod is None or is_static_pod(pod):
            self._mirrors.wake()

    # Called by its parts

    def _take(self, source: str, pods: list[Pod], problems: list[Problem]) -> None:
        self._emit(source, pods, problems)
        if self._last is not None:
            self._last.handle_api_pods(pods, self.unreadable)

    def _status_changed(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        self._sender.set_status(pod, status)
        if self._last is not None:
            self._last.update(pod, status)

    def _object_of(self, uid: str) -> Pod | None:
        """Return the last observed object of a pod in the API server."""
        pod = self._store.get(uid)
        if pod is None or not is_static_pod(pod):
            return pod
        mirror = self._store.mirror_of(pod)
        return mirror if mirror is not None and is_current(mirror, pod) else None

    def _may_run(self, uid: str) -> bool:
        worker = self._workers.get(uid)
        return worker is not None and worker.state in (PodWorkerState.SYNCING, PodWorkerState.TERMINATING)

    def _wishes(self) -> DesiredMirrors | None:
        if not self._all_reported():
            return None
        return DesiredMirrors(self._store.static_pods(), self._leaving)

    def _leaving(self) -> set[str]:
        """Return the names of pods that are no longer desired and have not terminated yet."""
        return {worker.name for worker in self._workers.unfinished() if self._store.get(worker.uid) is None}
