"""Housekeeping: terminates orphaned pods and removes what they left on the node.

The kubelet may have been down when a pod was deleted, or killed during its termination. So the pods in the
runtime, on disk and in cgroups are compared with the desired pods every two seconds, and orphans are
terminated. Nothing is done before every pod source has reported, nor to a pod that may be desired but could
not be parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.kuberuntime.gc import GarbageCollector
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.logs import get_logger
from pykubelet.podconfig.mux import PodMux, PodStore
from pykubelet.podsync.contract import Cgroups
from pykubelet.podsync.resource_allocator import ResourceAllocator
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
GC_SECONDS = 60.0


class Housekeeping:
    """Terminates orphaned pods, and runs the garbage collection of containers every minute."""

    def __init__(
        self,
        *,
        mux: PodMux,
        store: PodStore,
        workers: PodWorkers,
        pleg: Pleg,
        dirs: PodDirs,
        cgroups: Cgroups,
        prober: Prober,
        allotment: ResourceAllocator,
        resizing: AllocationManager,
        collector: GarbageCollector,
        scope: TaskScope,
        unreadable: Callable[[], AbstractSet[str]],
        node_event: Record = no_record,
    ) -> None:
        """Initialize; `unreadable` returns the names of desired pods that could not be parsed."""
        self._mux = mux
        self._store = store
        self._workers = workers
        self._pleg = pleg
        self._dirs = dirs
        self._cgroups = cgroups
        self._prober = prober
        self._allotment = allotment
        self._resizing = resizing
        self._collector = collector
        self._scope = scope
        self._unreadable = unreadable
        self._node_event = node_event
        self._next_gc = 0.0
        self._class_complaints = ErrorLogLimiter(log, "Could not update the cgroups of the QoS classes")

    def keep(self) -> None:
        """Run once; slow work continues in tasks."""
        if not self._mux.all_reported or self._pleg.health() is not None:
            return
        known = self._workers.uids() | self._wanted()
        for uid in sorted((set(self._pleg.pods) | self._dirs.uids() | self._cgroups.uids()) - known):
            if not self._may_be_wanted(uid):
                self._end_orphan(uid)
        self._prober.cleanup(known)
        self._allotment.keep_only(known | self._pleg.pods.keys())
        self._resizing.tidy(known | self._pleg.pods.keys())
        self._scope.start(self._weigh_classes(), name="weigh")
        now = asyncio.get_running_loop().time()
        if now >= self._next_gc:
            self._next_gc = now + GC_SECONDS
            self._scope.start(self._collect(), name="gc")

    def end_namesakes(self, pod: Pod) -> None:
        """Terminate orphans with the name of a pod, so that the pod waits for their end."""
        for uid in self._pleg.named(pod.full_name):
            desired = uid in self._mux or self._store.get(uid) is not None
            if not desired and not self._may_be_wanted(uid):
                self._end_orphan(uid)

    def _wanted(self) -> set[str]:
        """Return the uids of all desired pods, also of those that the loop has not dispatched yet."""
        return {*self._mux.pods(), *(pod.uid for pod in self._store.pods())}

    def _may_be_wanted(self, uid: str) -> bool:
        """Return whether this may be a desired pod that could not be parsed."""
        names, seen = self._unreadable(), self._pleg.pods.get(uid)
        return bool(names) and (seen is None or not seen.full_name or seen.full_name in names)

    def _end_orphan(self, uid: str) -> None:
        seen = self._pleg.pods.get(uid)
        name = seen.full_name if seen is not None else ""
        log.info("Cleaning up orphaned pod", pod=name, podUID=uid)
        self._workers.terminate_orphan(uid, name, alive=seen is not None and seen.is_alive)

    async def _weigh_classes(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            await self._cgroups.update_qos([self._resizing.allocated(pod) for pod in self._workers.pods()])
        except OSError as err:
            self._class_complaints.failed(err, now)
        else:
            self._class_complaints.succeeded(now)

    async def _collect(self) -> None:
        def is_deleted(uid: str) -> bool:
            known = uid in self._mux or self._store.get(uid) is not None or self._may_be_wanted(uid)
            return not known and self._workers.get(uid) is None

        try:
            await self._collector.collect(is_deleted=is_deleted, all_sources_ready=self._mux.all_reported)
        except (CriError, OSError) as err:
            log.error(err, "Container garbage collection failed")
            message = err.rpc_text if isinstance(err, CriError) else str(err)
            self._node_event("Warning", "ContainerGCFailed", message)
