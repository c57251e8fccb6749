"""Records of the node's pods: desired, dispatched and reported.

    PodRecords      desired pods by source, dispatched pods, statuses, histories
    ActivePods      pods that run or may still run; resources of other pods are reclaimed

A pod is active from the moment a source has it until none of its containers runs; a rejected pod, or one that
terminated before this kubelet process started, is not. Orphans in the runtime are active as well: a device in
use must not be allocated to a second container.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.mux import PodMux, PodStore
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.status.compute import TERMINAL, StatusStore


@dataclass(frozen=True, slots=True)
class PodRecords:
    """Everything that is recorded of the node's pods, from source to status."""

    mux: PodMux
    """Desired pods as the sources reported them, also those that were not dispatched yet."""
    store: PodStore
    """Desired pods that the loop has dispatched, and mirror pods."""
    statuses: StatusStore
    history: PodHistory
    final: Mapping[str, PodStatus] = field(default_factory=dict)
    """By uid: statuses of pods that a node shutdown has terminated and that must not run again."""

    @classmethod
    def create(cls, final: Mapping[str, PodStatus] | None = None) -> Self:
        """Return empty records; `final` are the final statuses of a previous kubelet process."""
        history = PodHistory()
        mux = PodMux(time.time_ns, partial(_report_duplicate, history))
        return cls(mux, PodStore(), StatusStore(), history, final if final is not None else {})

    @property
    def all_reported(self) -> bool:
        """Whether all sources have reported their pods; nothing may be deleted before."""
        return self.mux.all_reported

    @property
    def all_dispatched(self) -> bool:
        """Whether the desired pods are known and each has been dispatched."""
        return self.all_reported and all(self.store.get(uid) for uid in self.mux.pods())

    def is_desired(self, uid: str) -> bool:
        """Return whether some source has this pod, also one that was not dispatched yet."""
        return uid in self.mux or self.store.get(uid) is not None

    def desired_uids(self) -> set[str]:
        """Return the uids of all desired pods, also of those that were not dispatched yet."""
        return {*self.mux.pods(), *(pod.uid for pod in self.store.pods())}


def _report_duplicate(history: PodHistory, pod: Pod, source: str) -> None:
    meta = pod.metadata
    history.event(
        pod,
        "Warning",
        "FailedValidation",
        f"Error validating pod {meta.name}_{meta.namespace}({meta.uid}) from {source} "
        f'due to duplicate pod name "{meta.name}", ignoring',
        keep=False,
    )


class ActivePods:
    """The active pods, computed from sources, workers and runtime."""

    def __init__(
        self,
        records: PodRecords,
        workers: PodWorkers,
        in_runtime: Callable[[], Mapping[str, ObservedPod]],
    ) -> None:
        """Initialize; `in_runtime` returns the pods of the last relist by uid."""
        self._records = records
        self._workers = workers
        self._in_runtime = in_runtime

    def pods(self) -> list[Pod]:
        """Return the active pods whose spec is known."""
        records = self._records
        known = {pod.uid: pod for pod in (*records.mux.pods().values(), *records.store.pods())}
        known |= {pod.uid: pod for pod in self._workers.pods()}
        return [pod for pod in known.values() if self._is_active(pod)]

    def known_pods(self) -> Iterable[Pod]:
        """Return all pods of this node, also terminated ones."""
        return self._records.store.pods()

    def named(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name, also an inactive one, which has no resources."""
        return self._records.store.by_name(f"{namespace}/{name}")

    def uids(self) -> set[str] | None:
        """Return the uids of active pods; None before all sources have reported."""
        if not self._records.all_reported:
            return None
        alive = {uid for uid, observed in self._in_runtime().items() if observed.is_alive}
        return alive | {pod.uid for pod in self.pods()}

    def running_before(self, uid: str) -> frozenset[str]:
        """Return a pod's containers that an earlier kubelet process started; empty after its admission."""
        observed = self._in_runtime().get(uid)
        if observed is None or self._workers.get(uid) is not None:
            return frozenset()
        return frozenset(container.name for container in observed.running)

    def _is_active(self, pod: Pod) -> bool:
        worker = self._workers.get(pod.uid)
        if worker is not None:
            return worker.state in (
                PodWorkerState.SYNCING,
                PodWorkerState.TERMINATING,
            ) or self._workers.is_reborn(pod.uid)
        status = self._records.statuses.get(pod.uid) or pod.status
        return status.phase not in TERMINAL or self._workers.is_reborn(pod.uid)
