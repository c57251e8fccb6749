"""Housekeeping: terminates orphaned pods and removes what they left on the node.

The kubelet may have been down when a pod was deleted, or killed during its termination. So the pods in the
runtime, on disk and in cgroups are compared with the desired pods every two seconds, and orphans are
terminated. Nothing is done before every pod source has reported, nor to a pod that may be desired but could
not be parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.logs import get_logger
from pykubelet.podworkers.container_gc import ContainerGC, PodStateProvider
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
GC_SECONDS = 60.0


class Housekeeping:
    """Terminates orphaned pods, and runs the garbage collection of containers every minute."""

    def __init__(
        self,
        records: PodRecords,
        workers: PodWorkers,
        pleg: Pleg,
        dirs: PodDirs,
        cgroups: PodCgroups,
        allocation: AllocationManager,
        *,
        pod_states: PodStateProvider,
        container_gc: ContainerGC,
        retain: Sequence[Callable[[AbstractSet[str]], None]],
        scope: TaskScope,
    ) -> None:
        """Initialize; `retain` drop the state of all pods but those with the given uids."""
        self._records = records
        self._workers = workers
        self._pleg = pleg
        self._dirs = dirs
        self._cgroups = cgroups
        self._allocation = allocation
        self._pod_states = pod_states
        self.container_gc = container_gc
        self._retain = retain
        self._scope = scope
        self._next_gc = 0.0
        self._qos_errors = ErrorLogLimiter(log, "Failed to update the cgroups of the QoS classes")

    def run_once(self) -> None:
        """Compare pods, remove orphans and collect garbage; slow work continues in tasks."""
        if not self._records.all_reported or self._pleg.health() is not None:
            return
        known = self._workers.uids() | self._records.desired_uids()
        for uid in sorted((set(self._pleg.pods) | self._dirs.uids() | self._cgroups.uids()) - known):
            if not self._pod_states.may_be_desired(uid):
                self._terminate_orphan(uid)
        present = known | self._pleg.pods.keys()
        for retain in self._retain:
            retain(present)
        self._allocation.tidy(present)
        self._scope.start(self._update_qos(), name="qos-cgroups")
        now = asyncio.get_running_loop().time()
        if now >= self._next_gc:
            self._next_gc = now + GC_SECONDS
            self._scope.start(self.container_gc.run_once(), name="gc")

    def terminate_namesakes(self, pod: Pod) -> None:
        """Terminate orphans with the name of a pod, so that the pod waits for their end."""
        for uid in self._pleg.named(pod.full_name):
            if not self._records.is_desired(uid) and not self._pod_states.may_be_desired(uid):
                self._terminate_orphan(uid)

    def _terminate_orphan(self, uid: str) -> None:
        seen = self._pleg.pods.get(uid)
        name = seen.full_name if seen is not None else ""
        log.info("Cleaning up orphaned pod", pod=name, podUID=uid)
        self._workers.terminate_orphan(uid, name, alive=seen is not None and seen.is_alive)

    async def _update_qos(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            await self._cgroups.update_qos([self._allocation.allocated(pod) for pod in self._workers.pods()])
        except OSError as err:
            self._qos_errors.failed(err, now)
        else:
            self._qos_errors.succeeded(now)
