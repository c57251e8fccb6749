"""Active pods: those that run or may still run. Resources allocated to other pods are reclaimed.

A pod is active from the moment a source has it until none of its containers runs; a rejected pod, or one that
terminated before this kubelet process started, is not. Orphans in the runtime are active as well: a device in
use must not be allocated to a second container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.mux import PodStore
from pykubelet.podworkers.worker import PodWorkerState
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.compute import TERMINAL, StatusStore


class ActivePods:
    """The active pods, computed from sources, workers and runtime."""

    def __init__(
        self,
        *,
        store: PodStore,
        workers: PodWorkers,
        statuses: StatusStore,
        in_runtime: Callable[[], Mapping[str, ObservedPod]],
        wanted: Callable[[], Mapping[str, Pod]],
        all_reported: Callable[[], bool],
    ) -> None:
        """Initialize; `wanted` also returns pods that the loop has not dispatched yet."""
        self._store = store
        self._workers = workers
        self._statuses = statuses
        self._in_runtime = in_runtime
        self._wanted = wanted
        self._all_reported = all_reported

    def pods(self) -> list[Pod]:
        """Return the active pods whose spec is known."""
        known = {pod.uid: pod for pod in (*self._wanted().values(), *self._store.pods())}
        known |= {pod.uid: pod for pod in self._workers.pods()}
        return [pod for pod in known.values() if self._counts(pod)]

    def named(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name, also an inactive one, which has no resources."""
        return self._store.by_name(f"{namespace}/{name}")

    def uids(self) -> set[str] | None:
        """Return the uids of active pods; None before all sources have reported."""
        if not self._all_reported():
            return None
        alive = {uid for uid, seen in self._in_runtime().items() if seen.is_alive}
        return alive | {pod.uid for pod in self.pods()}

    def running_before(self, uid: str) -> frozenset[str]:
        """Return a pod's containers that an earlier kubelet process started; empty after its admission."""
        seen = self._in_runtime().get(uid)
        if seen is None or self._workers.get(uid) is not None:
            return frozenset()
        return frozenset(container.name for container in seen.running)

    def _counts(self, pod: Pod) -> bool:
        worker = self._workers.get(pod.uid)
        if worker is not None:
            return worker.state in (
                PodWorkerState.SYNCING,
                PodWorkerState.TERMINATING,
            ) or self._workers.is_reborn(pod.uid)
        status = self._statuses.get(pod.uid) or pod.status
        return status.phase not in TERMINAL or self._workers.is_reborn(pod.uid)
