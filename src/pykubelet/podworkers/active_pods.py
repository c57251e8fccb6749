"""Which pods count: those that run or may come to run. What was given to pods is taken back from all others.

A pod counts from the moment a source wants it until nothing of it runs any more; one that was refused, or
ended in an earlier agent's time, does not. What the runtime still has of pods that nobody wants counts as
well: a device in use must not be given to a second container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.observe import ObservedPod
from pykubelet.podconfig.mux import PodStore
from pykubelet.podworkers.worker import PodWorkerState
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.compute import TERMINAL, StatusStore


class ActivePods:
    """Asks those who know."""

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
        """Take where pods are; `wanted` also gives those that were not handed on yet."""
        self._store = store
        self._workers = workers
        self._statuses = statuses
        self._in_runtime = in_runtime
        self._wanted = wanted
        self._all_reported = all_reported

    def pods(self) -> list[Pod]:
        """Give the pods that count and of which more than their uid is known."""
        known = {pod.uid: pod for pod in (*self._wanted().values(), *self._store.pods())}
        known |= {pod.uid: pod for pod in self._workers.pods()}
        return [pod for pod in known.values() if self._counts(pod)]

    def named(self, namespace: str, name: str) -> Pod | None:
        """Give the pod of this name, also one that does not count: it is here, and has nothing."""
        return self._store.by_name(f"{namespace}/{name}")

    def uids(self) -> set[str] | None:
        """Give the pods that count; None while a source was not heard: nobody can be said to be gone."""
        if not self._all_reported():
            return None
        alive = {uid for uid, seen in self._in_runtime().items() if seen.is_alive}
        return alive | {pod.uid for pod in self.pods()}

    def running_before(self, uid: str) -> frozenset[str]:
        """Give a pod's containers that an earlier agent started, and that this one did not take over yet."""
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
