"""Garbage collection of dead containers: every minute, on demand, and when a container of a pod exits.

`PodStateProvider` decides of which pods everything may be removed, from the desired pods and the states of
their workers. `ContainerGC` runs one collection at a time (`kuberuntime/gc`): the periodic one of
housekeeping, whose failure is an event of the node, and the one that the eviction manager requests.
`ContainerDeletor` removes the older exited containers of a pod soon after another one has exited, so that a
crash loop does not fill the disk until the next collection. That one removes what the deletor failed to
remove, and what a stopped kubelet process left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Set as AbstractSet

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.cm.cgroups.node_cgroups import Record
from pykubelet.kuberuntime.gc import GarbageCollector
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.logs import get_logger
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.status.compute import PREEMPTING, TERMINAL
from pykubelet.tracing.span import Tracer, own_span
from pykubelet.transport.errors import CriError

log = get_logger(__name__)
EVICTED = "Evicted"
_STOPPED = (PodWorkerState.TERMINATED, PodWorkerState.REMOVING, PodWorkerState.GONE)
SETTLE_SECONDS = 1.0
"""Seconds between an event and the removal, in which the pod's worker observes the exit."""


def is_evicted(status: PodStatus | None) -> bool:
    """Return whether the kubelet has evicted or preempted the pod with this status."""
    return status is not None and status.phase == "Failed" and status.reason in (EVICTED, PREEMPTING)


class PodStateProvider:
    """Which pods have to keep their containers, sandboxes and logs."""

    def __init__(
        self,
        records: PodRecords,
        workers: PodWorkers,
        pleg: Pleg,
        unreadable: Callable[[], AbstractSet[str]],
    ) -> None:
        """Initialize; `unreadable` returns the names of desired pods that could not be parsed."""
        self._records = records
        self._workers = workers
        self._pleg = pleg
        self._unreadable = unreadable

    @property
    def all_sources_ready(self) -> bool:
        """Whether all sources have reported their pods."""
        return self._records.all_reported

    def may_be_desired(self, uid: str) -> bool:
        """Return whether this may be a desired pod that could not be parsed."""
        names, seen = self._unreadable(), self._pleg.pods.get(uid)
        return bool(names) and (seen is None or not seen.full_name or seen.full_name in names)

    def should_content_be_removed(self, uid: str) -> bool:
        """Return whether a pod has left the node, or was evicted and has stopped: its logs are removed, too.

        A worker that removes its pod does so on its own.
        """
        if self._records.is_desired(uid) or self.may_be_desired(uid):
            return is_evicted(self._records.statuses.get(uid)) and self._has_stopped(uid)
        return self._workers.get(uid) is None

    def should_runtime_be_removed(self, uid: str) -> bool:
        """Return whether no container of a pod runs or will run again.

        A static pod that waits for its predecessor with the same uid continues its restart counts.
        """
        return not self._workers.is_reborn(uid) and self._has_stopped(uid)

    def _has_stopped(self, uid: str) -> bool:
        worker, status = self._workers.get(uid), self._records.statuses.get(uid)
        if worker is not None:
            return worker.state in _STOPPED
        # A desired pod without a worker has terminated, or is not admitted yet.
        return status is not None and status.phase in TERMINAL


class ContainerGC:
    """Garbage collection of containers and sandboxes, one at a time."""

    def __init__(
        self,
        collector: GarbageCollector,
        pods: PodStateProvider,
        node_event: Record,
        tracer: Tracer | None = None,
    ) -> None:
        """Initialize; `node_event` records events of the node."""
        self._tracer = tracer
        self._collector = collector
        self._pods = pods
        self._node_event = node_event
        self._lock = asyncio.Lock()
        self._failed = False

    async def run_once(self) -> None:
        """Collect what the policy allows; a failure is an event of the node.

        Nothing is done while another collection is in progress.
        """
        if self._lock.locked():
            return
        try:
            await self._collect(evict_all=False)
        except (CriError, OSError) as err:
            log.error(err, "Container garbage collection failed")
            message = err.rpc_text if isinstance(err, CriError) else str(err)
            self._node_event("Warning", "ContainerGCFailed", message)
            self._failed = True
        else:
            log.v(1 if self._failed else 4).info("Container garbage collection succeeded")
            self._failed = False

    async def delete_all_unused_containers(self) -> None:
        """Remove the dead containers of terminated pods as well. Raises CriError and OSError.

        Waits for a collection that is in progress.
        """
        log.info("Attempting to delete unused containers")
        await self._collect(evict_all=True)

    async def _collect(self, *, evict_all: bool) -> None:
        async with self._lock:
            with own_span(self._tracer, "Containers/GarbageCollect"):
                await self._collector.collect(
                    is_deleted=self._pods.should_content_be_removed,
                    is_removable=self._pods.should_runtime_be_removed,
                    all_sources_ready=self._pods.all_sources_ready,
                    evict_all=evict_all,
                )


def exited_beyond(observed: ObservedPod, retained: int) -> Iterator[ObservedContainer]:
    """Yield the exited containers of a pod, except the newest so many of each name."""
    seen: dict[str, int] = {}
    for container in sorted(observed.containers, key=lambda c: (c.created_at, c.attempt), reverse=True):
        if container.phase == "exited":
            seen[container.name] = seen.get(container.name, 0) + 1
            if seen[container.name] > retained:
                yield container


class ContainerDeletor:
    """Removal of older exited containers when a container of the pod has exited."""

    def __init__(
        self,
        remove: Callable[[str], Awaitable[None]],
        observed: Callable[[str], ObservedPod | None],
        should_content_be_removed: Callable[[str], bool],
        max_per_container: int,
    ) -> None:
        """Initialize; `remove` removes a container with its logs, `observed` returns the state of a pod.

        At least one exited container of each name is retained: it has the exit code and the restart count.
        """
        self._remove = remove
        self._observed = observed
        self._should_content_be_removed = should_content_be_removed
        self._retained = max(max_per_container, 1)
        self._due: dict[str, None] = {}
        """Uids of pods with events, in their order."""
        self._added = asyncio.Event()

    def handle_event(self, event: PodLifecycleEvent) -> None:
        """Handle a runtime event; one without a container may be of several."""
        if event.what == "ended" or not event.container_id:
            self.request(event.uid)

    def handle_status(self, pod: Pod, status: PodStatus, _: PodStatus | None) -> None:
        """Handle a changed status: of an evicted pod nothing is retained."""
        if is_evicted(status):
            self.request(pod.uid)

    def request(self, uid: str) -> None:
        """Request the removal of the older exited containers of a pod."""
        self._due[uid] = None
        self._added.set()

    async def run(self) -> None:
        """Remove containers until cancelled."""
        while True:
            await self._added.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._added.clear()
            due, self._due = self._due, {}
            for uid in due:
                await self._prune(uid)

    async def _prune(self, uid: str) -> None:
        observed = self._observed(uid)
        if observed is None:
            return
        retained = 0 if self._should_content_be_removed(uid) else self._retained
        for container in exited_beyond(observed, retained):
            try:
                await self._remove(container.id)
            except (CriError, OSError) as err:
                log.error(err, "Failed to remove container", podUID=uid, containerID=container.id)
