"""Builds the node shutdown: its view of the pods, and the shutdown manager.

`NodeShutdownState` and `FinalStatuses` exist before everything else: pod admission, the node status and the
pod engine read them. Final statuses of a previous shutdown are delivered also if node shutdowns are no longer
handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.node.shutdown_drain import PodDrain
from pykubelet.node.shutdown_groups import (
    TERMINATED_MESSAGE,
    TERMINATED_REASON,
    shutdown_periods,
    terminated_status,
)
from pykubelet.node.shutdown_manager import NodeShutdownManager
from pykubelet.node.shutdown_state import FinalStatuses, NodeShutdownState, ShutdownTimes
from pykubelet.node.status_loop import Record
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.workers import PodWorkerState
from pykubelet.status.compute import TERMINAL
from pykubelet.util.tasks import TaskScope

_STOPPED = (PodWorkerState.TERMINATED, PodWorkerState.REMOVING, PodWorkerState.GONE)


class EnginePods:
    """Pods of the pod engine for the drain (`node.shutdown_drain.ShutdownPods`)."""

    def __init__(
        self, engine: PodEngine, final: FinalStatuses, has_volumes: Callable[[str], bool], *, clustered: bool
    ) -> None:
        """Initialize; `has_volumes` returns whether volumes of a pod are mounted.

        `clustered`: whether an API server gets the statuses of pods.
        """
        self._engine = engine
        self._final = final
        self._has_volumes = has_volumes
        self._clustered = clustered
        self._changed = asyncio.Event()
        for add_listener in (engine.workers.add_listener, engine.store.add_listener):
            add_listener(self._on_change)
        engine.statuses.add_listener(final.handle_status)

    def are_known(self) -> bool:
        """Return whether all sources have reported their pods."""
        return self._engine.records.all_dispatched

    def active(self) -> Sequence[Pod]:
        """Return the pods that are not finished."""
        return self._engine.workers.pods()

    def record(self, pod: Pod) -> None:
        """Record that a pod will be terminated, unless it terminates already or starts again anyway."""
        worker = self._engine.workers.get(pod.uid)
        if worker is None or worker.state is not PodWorkerState.SYNCING:
            return
        if self._clustered and not is_static_pod(pod):
            status = self._engine.statuses.get(pod.uid) or pod.status
            self._final.add(pod.uid, terminated_status(pod, status, api_now()))

    def terminate(self, pod: Pod, grace: int) -> None:
        """Terminate a pod; one that terminates already keeps its reason."""
        worker, now = self._engine.workers.get(pod.uid), api_now()
        if worker is not None and worker.state is PodWorkerState.SYNCING:
            self._engine.history.note(pod.uid, "shutdown", TERMINATED_MESSAGE)
            self._engine.workers.terminate(
                pod.uid, grace, pod_status=lambda status: terminated_status(pod, status, now)
            )
        else:
            self._engine.workers.terminate(pod.uid, grace)

    def is_stopped(self, uid: str) -> bool:
        """Return whether no container of a pod runs."""
        worker = self._engine.workers.get(uid)
        return worker is None or worker.state in _STOPPED

    def is_released(self, uid: str) -> bool:
        """Return whether no container of a pod runs and its volumes are unmounted.

        A pod that is being deleted stays TERMINATED until the API server has removed it.
        """
        worker = self._engine.workers.get(uid)
        if worker is None or worker.state is not PodWorkerState.TERMINATED:
            return self.is_stopped(uid)
        pod = worker.pod
        is_deleted = pod is not None and pod.metadata.deletion_timestamp is not None
        return is_deleted and not self._has_volumes(uid)

    def is_reported(self, uid: str) -> bool:
        """Return whether the API server has the final status of a pod, or does not have the pod."""
        records = self._engine.records
        if not records.all_reported:
            return False
        pod = records.store.get(uid)
        return uid not in records.mux if pod is None else pod.status.phase in TERMINAL

    def exceeded(self, pod: Pod) -> None:
        """Record that a pod did not terminate within its period."""
        message = "Container runtime did not kill the pod within specified grace period."
        self._engine.history.event(pod, "Warning", "ExceededGracePeriod", message)

    async def changed(self) -> None:
        """Wait until a pod or its worker changes."""
        self._changed.clear()
        await self._changed.wait()

    def _on_change(self, _: str) -> None:
        self._changed.set()


@dataclass(frozen=True, slots=True)
class NodeShutdown:
    """The parts that handle node shutdowns."""

    drain: PodDrain
    manager: NodeShutdownManager | None
    """None if no periods are configured."""

    def start(self, tasks: TaskScope) -> None:
        """Watch logind, and deliver final statuses of a previous shutdown."""
        tasks.start(self.drain.deliver(), name="final-statuses")
        if self.manager is not None:
            tasks.start(self.manager.run(), name="shutdown-manager")


def build_shutdown(
    settings: AgentSettings,
    state: NodeShutdownState,
    final: FinalStatuses,
    engine: PodEngine,
    has_volumes: Callable[[str], bool],
    record: Record,
    registry: CollectorRegistry,
    tasks: TaskScope,
) -> NodeShutdown:
    """Return what handles node shutdowns; `record` records an event about the node."""
    gates, root = settings.gates, Path(settings.flags.root_dir)
    drain = PodDrain(EnginePods(engine, final, has_volumes, clustered=not settings.flags.standalone), final)
    times = None
    if all(map(gates.enabled, ("GracefulNodeShutdown", "GracefulNodeShutdownBasedOnPodPriority"))):
        times = ShutdownTimes(root, registry)
    periods = shutdown_periods(settings.config, gates.enabled)
    manager = None
    if periods:
        manager = NodeShutdownManager(
            periods,
            drain,
            state,
            record,
            tasks,
            times=times,
            on_cancelled=lambda: engine.restart_static_pods(TERMINATED_REASON),
        )
    return NodeShutdown(drain, manager)
