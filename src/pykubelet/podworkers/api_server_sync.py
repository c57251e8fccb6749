"""Exchange of the pod engine with the API server: pods from it, statuses and mirror pods to it.

`ApiServerSync` contains what a node of a cluster does beyond a standalone one. The engine notifies it of
changes, and waits for it before a deletion is completed. Running pods never depend on it: without the API
server, statuses and mirror pods are delayed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import ApiClient
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.config.errors import Problem
from pykubelet.objects.base import PodObjects
from pykubelet.podconfig.api_source import ApiSource, CheckpointSource
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.mux import SourceUpdates
from pykubelet.podconfig.pod_history import Event
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodChurn, PodWorkers, PodWorkerState
from pykubelet.status.manager import StatusManager, StatusMetrics
from pykubelet.status.mirror_pods import DesiredMirrors, MirrorPods, is_current
from pykubelet.util.tasks import TaskScope


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Clients, objects and callbacks of the cluster for the pod engine."""

    client: ApiClient
    """Client for objects, with the rate limit of `kubeAPIQPS`."""
    node_uid: Callable[[], str]
    """Returns the uid of the node object; empty before the registration."""
    objects: PodObjects
    handler_of: Callable[[Pod], Awaitable[str]]
    """Returns the runtime handler of a pod's RuntimeClass. Raises ObjectError."""
    services: Callable[[Pod], Mapping[str, str] | None]
    """Returns the service environment variables of a pod; None before services are synced."""
    node_event: Record = no_record
    """Records an event about the node."""
    node_ready: Callable[[], Awaitable[None]] | None = None
    """Waits until the node object was read; pods are listed only then."""
    checkpoints: Checkpoints | None = None
    """Checkpoints of pods for times without an API server; None when they are disabled."""


class ApiServerSync:
    """Pod source, status manager and mirror pods of a node; `start` adds their tasks to a scope."""

    def __init__(
        self,
        access: ClusterAccess,
        node_name: str,
        updates: SourceUpdates,
        records: PodRecords,
        workers: PodWorkers,
        churn: PodChurn,
        metrics: StatusMetrics | None = None,
    ) -> None:
        self._access = access
        self._updates = updates
        self._records = records
        self._store = records.store
        self._workers = workers
        self._source = ApiSource(
            access.client, node_name, self._replace, emit_update=updates.update, ready=access.node_ready
        )
        self._status_manager = StatusManager(
            access.client,
            get_object=self._object_of,
            may_run=self._may_run,
            in_burst=churn.is_bursting,
            metrics=metrics,
        )
        self._mirrors = MirrorPods(
            access.client, self._store, node_name, desired=self._desired_mirrors, node_uid=access.node_uid
        )
        self._checkpoint_source = (
            CheckpointSource(access.checkpoints, self._store, partial(updates.offer, "api"))
            if access.checkpoints is not None
            else None
        )
        records.statuses.add_listener(self._status_manager.set_status)
        records.statuses.add_listener(self._checkpoint_status)
        records.history.add_listener(self._event_recorded)

    def start(self, scope: TaskScope) -> None:
        """Start to watch pods and to send statuses."""
        scope.start(self._source.run(), name="source-api")
        scope.start(self._status_manager.run(), name="status-sender")
        scope.start(self._mirrors.run(), name="mirror-pods")
        if self._checkpoint_source is not None and self._access.checkpoints is not None:
            scope.start(self._access.checkpoints.run(), name="checkpoints")
            scope.start(self._checkpoint_source.run(self._source.synced), name="last-pods")

    @property
    def unreadable(self) -> Set[str]:
        """Names of pods of the API server that could not be parsed."""
        return self._source.unreadable

    def services(self, pod: Pod) -> Mapping[str, str] | None:
        """Return the service environment variables of a pod; None while it must wait for them."""
        found = self._access.services(pod)
        # Without the API server, pods start without these variables rather than wait indefinitely.
        checkpoints = self._checkpoint_source
        return {} if found is None and checkpoints is not None and checkpoints.has_unconfirmed_pods else found

    # Called by the engine

    def pod_changed(self, pod: Pod) -> None:
        """Handle a pod that was added, changed or removed, from any source."""
        if is_static_pod(pod):
            self._mirrors.wake()
            return
        self._status_manager.handle_object_update(pod.uid)
        if self._checkpoint_source is not None:
            self._checkpoint_source.update(pod, self._records.statuses.get(pod.uid))

    def mirror_changed(self, mirror: Pod) -> None:
        """Handle a mirror pod that was added, changed or removed."""
        self._mirrors.handle_mirror_update(mirror)
        static = self._store.by_name(mirror.full_name)
        if static is not None:
            self._status_manager.handle_object_update(static.uid)

    def stopped(self, uid: str) -> None:
        """Record that no container of a pod runs: from now on a terminal status may be sent."""
        self._status_manager.check(uid)

    async def final_status_sent(self, uid: str) -> None:
        """Wait until the API server has the pod's final status."""
        await self._status_manager.wait_reported(uid)

    async def remove(self, pod: Pod) -> None:
        """Complete the deletion of a finished pod in the API server."""
        await self._status_manager.remove(pod)

    def forget(self, uid: str) -> None:
        """Drop the state of a removed pod."""
        self._status_manager.forget(uid)
        pod = self._workers.pod(uid)
        if pod is None or is_static_pod(pod):
            self._mirrors.wake()

    # Called by its parts

    def _replace(self, source: str, pods: list[Pod], problems: list[Problem]) -> None:
        self._updates.replace(source, pods, problems)
        self._updates.when_dispatched(self._mirrors.wake)
        if self._checkpoint_source is not None:
            self._checkpoint_source.handle_api_pods(pods, self.unreadable)

    def _checkpoint_status(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        if self._checkpoint_source is not None:
            self._checkpoint_source.update(pod, status)

    def _event_recorded(self, pod: Pod, event: Event) -> None:
        if event.kind == "Warning":
            self._status_manager.expedite(pod.uid)

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

    def _desired_mirrors(self) -> DesiredMirrors | None:
        if not self._records.all_reported:
            return None
        return DesiredMirrors(self._store.static_pods(), self._terminating)

    def _terminating(self) -> set[str]:
        """Return the names of pods that are no longer desired and have not terminated yet."""
        return {worker.name for worker in self._workers.unfinished() if self._store.get(worker.uid) is None}
