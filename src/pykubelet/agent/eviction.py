"""Builds the eviction manager: its facts from the statistics, its actions on the pod workers.

`PressureConditions` exist before everything else, because pod admission and the node status read them; the
manager is built from the pod engine and the statistics, and sets them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.stats import NodeStatistics
from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.node_cgroups import Record
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.eviction.admission import PressureAdmission, PressureConditions
from pykubelet.eviction.custom_ranking import installed_ranking
from pykubelet.eviction.manager import (
    EvictionManager,
    EvictionMetrics,
    EvictionSettings,
    NodeReclaim,
    StatusFunction,
)
from pykubelet.eviction.memory_notifier import MemoryNotifier
from pykubelet.eviction.observations import NodeMeasurements, PodUsage, pod_usage
from pykubelet.eviction.signals import configuration_warnings, parse_thresholds
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.logs import get_logger
from pykubelet.node.conditions import NodePressure
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.stats.machine import read_rlimit
from pykubelet.stats.samples import FilesystemUsage
from pykubelet.stats.summary import pod_stats

log = get_logger(__name__)
ROOT_CGROUP = "/"
IMAGE_PATHS_SECONDS = 300.0
"""Seconds for which the paths of images and writable layers, as the runtime reports them, are reused."""
SHORTEST_KILL_SECONDS = 10
_PODS_PER_STEP = 16
"""Pods whose usage is computed before other tasks run."""


def pressure_admission(conditions: PressureConditions, settings: AgentSettings) -> PressureAdmission:
    """Return the admission handler for a node under pressure."""
    return PressureAdmission(
        conditions,
        comparing=settings.gates.enabled("TaintTolerationComparisonOperators"),
        pod_level=settings.gates.enabled("PodLevelResources"),
    )


def node_pressure(conditions: PressureConditions) -> NodePressure:
    """Return the conditions for the node status."""
    return NodePressure(
        memory=conditions.has("MemoryPressure"),
        disk=conditions.has("DiskPressure"),
        pids=conditions.has("PIDPressure"),
    )


class NodeFacts:
    """Measured facts for the eviction manager (`eviction.manager.Measurements`)."""

    def __init__(self, statistics: NodeStatistics, root_dir: Path, pods_cgroup: str) -> None:
        """Initialize; `pods_cgroup` is the path of the cgroup of all pods."""
        self._statistics = statistics
        self._root_dir = root_dir
        self._pods_cgroup = pods_cgroup
        self._image_path = self._container_path = ""
        self._paths_at = float("-inf")

    async def node(self) -> NodeMeasurements:
        """Measure memory, file systems and tasks now."""
        statistics, now = self._statistics, time.time()
        statistics.collector.sample_now([ROOT_CGROUP, self._pods_cgroup])
        await self._find_paths()
        paths = {str(self._root_dir), self._image_path, self._container_path} - {""}
        measured = dict(zip(paths, await asyncio.gather(*map(self._filesystem, paths)), strict=True))
        imagefs = measured.get(self._image_path)
        return NodeMeasurements(
            root=statistics.collector.record(ROOT_CGROUP),
            pods=statistics.collector.record(self._pods_cgroup),
            nodefs=measured[str(self._root_dir)],
            imagefs=imagefs,
            containerfs=measured.get(self._container_path, imagefs),
            rlimit=read_rlimit(now),
            rlimit_time=now,
        )

    async def _filesystem(self, path: str) -> FilesystemUsage | None:
        return await self._statistics.host_filesystems.of_directory(Path(path), max_age=0)

    async def _find_paths(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._image_path and now - self._paths_at < IMAGE_PATHS_SECONDS:
            return
        found = await self._statistics.runtime.image_filesystems()
        if found.images is not None:
            self._image_path = found.images.mount_point
            self._container_path = found.containers.mount_point if found.containers is not None else ""
            self._paths_at = now

    async def pods(
        self, uids: Collection[str], *, detailed: bool, volumes: bool = False
    ) -> Mapping[str, PodUsage]:
        """Return the usage of pods by uid, as the Summary API reports it; `volumes` measures those before."""
        if volumes:
            await self._statistics.refresh_volumes(uids)
        inputs = await self._statistics.summary_inputs(False, detailed=detailed)
        records = [record for record in inputs.records if record.target.pod_uid in uids]
        found = {}
        for number, stats in enumerate(
            pod_stats(dataclasses.replace(inputs, records=records), only_cpu_and_memory=False), 1
        ):
            if stats.pod_ref.uid in uids:
                found[stats.pod_ref.uid] = pod_usage(stats)
            if number % _PODS_PER_STEP == 0:
                await asyncio.sleep(0)
        return found


class WorkerKiller:
    """Termination of pods by their workers (`eviction.manager.PodKiller`)."""

    def __init__(self, workers: PodWorkers, history: PodHistory) -> None:
        self._workers = workers
        self._history = history
        self._changed = asyncio.Event()
        workers.add_listener(self._on_change)

    async def kill(self, pod: Pod, grace: int, status: StatusFunction) -> bool:
        """Terminate a pod, and return whether no container of it runs after one and a half grace periods."""
        self._workers.terminate(pod.uid, grace, pod_status=status)
        worker = self._workers.get(pod.uid)
        if worker is None:
            return True
        try:
            async with asyncio.timeout(max(grace + grace // 2, SHORTEST_KILL_SECONDS)):
                await worker.stopped.wait()
        except TimeoutError:
            self._history.event(
                pod,
                "Warning",
                "ExceededGracePeriod",
                "Container runtime did not kill the pod within specified grace period.",
            )
            return False
        return True

    async def wait_finished(self, uids: Collection[str]) -> None:
        """Wait until the pods have left the node."""
        while not all(self.is_finished(uid) for uid in uids):
            self._changed.clear()
            await self._changed.wait()

    def is_finished(self, uid: str) -> bool:
        """Return whether the containers, cgroup and volumes of a pod are released."""
        worker = self._workers.get(uid)
        return worker is None or worker.state in (PodWorkerState.REMOVING, PodWorkerState.GONE)

    def _on_change(self, _: str) -> None:
        self._changed.set()


@dataclass(frozen=True, slots=True)
class NodeEvents:
    """Events of evictions (`eviction.manager.EventSink`)."""

    record: Record
    history: PodHistory

    def node_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event about the node."""
        self.record(kind, reason, message)

    def pod_event(self, pod: Pod, reason: str, message: str, annotations: Mapping[str, str]) -> None:
        """Record a Warning event about a pod."""
        self.history.note(pod.uid, "eviction", message.strip())
        self.history.event(pod, "Warning", reason, message, annotations=annotations)


def eviction_settings(config: KubeletConfiguration, gates: FeatureGates) -> EvictionSettings:
    """Return the settings of the eviction manager; contradictions are logged. Raises ValueError."""
    thresholds = parse_thresholds(config)
    for warning in configuration_warnings(thresholds):
        log.warning("Eviction thresholds contradict each other", problem=warning)
    return EvictionSettings(
        thresholds=thresholds,
        transition_period=config.eviction_pressure_transition_period.seconds,
        max_pod_grace_period=config.eviction_max_pod_grace_period,
        local_storage=bool(config.local_storage_capacity_isolation),
        pod_level=gates.enabled("PodLevelResources"),
        separate_disks=gates.enabled("KubeletSeparateDiskGC"),
    )


def build_eviction(
    settings: AgentSettings,
    conditions: PressureConditions,
    statistics: NodeStatistics,
    engine: PodEngine,
    pods_cgroup: str,
    reclaim: NodeReclaim,
    record: Record,
    registry: CollectorRegistry,
) -> EvictionManager:
    """Return the eviction manager; `pods_cgroup` is the cgroup of all pods, "" if pods have no cgroups.

    `record` records an event about the node.
    """
    config = settings.config
    make_notifier = None
    if config.kernel_memcg_notification:
        make_notifier = partial(MemoryNotifier, detect_cgroups(), pods_cgroup)

    return EvictionManager(
        eviction_settings(config, settings.gates),
        NodeFacts(statistics, Path(settings.flags.root_dir), pods_cgroup),
        engine.running_pods,
        WorkerKiller(engine.workers, engine.history),
        reclaim,
        NodeEvents(record, engine.history),
        conditions,
        ranking=installed_ranking(),
        metrics=EvictionMetrics(registry),
        make_notifier=make_notifier,
    )
