"""Pods, usages and a scripted node for tests of the eviction manager."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.api.quantity import Quantity
from pykubelet.api.stats import RlimitStats
from pykubelet.config.validation.validate_resources import ThresholdValue, parse_threshold
from pykubelet.eviction.admission import PressureConditions
from pykubelet.eviction.manager import (
    EvictionManager,
    EvictionMetrics,
    EvictionSettings,
    NodeReclaim,
    StatusFunction,
)
from pykubelet.eviction.observations import (
    ContainerUsage,
    DiskUsage,
    NodeMeasurements,
    Observation,
    PodUsage,
)
from pykubelet.eviction.signals import Threshold
from pykubelet.stats.samples import FilesystemUsage, Limits, Record, Target, Usage
from tests.support.admission import pod as make_pod

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30


def size(text: str) -> int:
    return int(Quantity.parse(text))


def value(text: str) -> ThresholdValue:
    parsed = parse_threshold(text)
    assert parsed is not None
    return parsed


def threshold(signal: str, text: str, *, grace: float = 0.0, reclaim: str = "") -> Threshold:
    return Threshold(signal, value(text), grace, value(reclaim) if reclaim else None)


def seen(available: str, capacity: str, at: float = 0.0) -> Observation:
    return Observation(size(available), size(capacity), at)


def pod(
    name: str,
    *,
    priority: int | None = None,
    requests: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
    **spec: Any,
) -> Pod:
    """A pod of the API server with one container; its uid is its name."""
    resources = {"requests": dict(requests or {}), "limits": dict(limits or {})}
    return make_pod(name, containers=[{"name": "main", "resources": resources}], priority=priority, **spec)


def usage(
    memory: str | None = None,
    *,
    processes: int | None = None,
    rootfs: str = "0",
    logs: str = "0",
    rootfs_inodes: int = 0,
    logs_inodes: int = 0,
    volumes: Mapping[str, tuple[str, int]] | None = None,
    ephemeral: str | None = None,
) -> PodUsage:
    return PodUsage(
        memory=None if memory is None else size(memory),
        processes=processes,
        containers=(
            ContainerUsage(
                name="main",
                memory=None if memory is None else size(memory),
                rootfs=DiskUsage(size(rootfs), rootfs_inodes),
                logs=DiskUsage(size(logs), logs_inodes),
            ),
        ),
        volumes={name: DiskUsage(size(used), inodes) for name, (used, inodes) in (volumes or {}).items()},
        ephemeral_storage=None if ephemeral is None else size(ephemeral),
    )


def cgroup(
    available: str, limit: str = "4Gi", *, active_file: str = "0", inactive_file: str = "100Mi"
) -> Record:
    """A sample of a cgroup with so much memory available."""
    working_set = size(limit) - size(available)
    return Record(
        target=Target(path="/", kind="root"),
        limits=Limits(created=0.0, memory_limit=size(limit)),
        usage=Usage(
            time=time.time(),
            cpu=0,
            memory=working_set + size(inactive_file),
            working_set=working_set,
            active_file=size(active_file),
            inactive_file=size(inactive_file),
        ),
    )


def disk(
    available: str, capacity: str = "100Gi", *, minor: int = 0, inodes_free: int = 900
) -> FilesystemUsage:
    return FilesystemUsage(
        time=time.time(),
        device=f"/dev/vd{minor}",
        major=254,
        minor=minor,
        capacity=size(capacity),
        available=size(available),
        used=size(capacity) - size(available),
        inodes=1000,
        inodes_free=inodes_free,
    )


@dataclass
class ScriptedNode:
    """A node whose measurements a test sets, and that records what is done to it."""

    memory: str | None = "2Gi"
    nodefs: str | None = "50Gi"
    imagefs: str | None = None
    """None: images are on nodefs."""
    runtime_is_up: bool = True
    tasks: int = 100
    usages: dict[str, PodUsage] = field(default_factory=dict)
    usages_now: dict[str, PodUsage] = field(default_factory=dict)
    """Usages that replace others when volumes are measured."""
    pods: list[Pod] = field(default_factory=list)
    unkillable: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    """Pods that end with their grace period."""
    kill_seconds: float = 10.0
    """Time after which the termination of an unkillable pod is given up."""
    reclaim_seconds: float = 0.0
    on_kill: Callable[[Pod], None] = lambda pod: None
    on_reclaim: Callable[[str], None] = lambda what: None
    killed: list[tuple[str, int]] = field(default_factory=list)
    statuses: dict[str, PodStatus] = field(default_factory=dict)
    reclaimed: list[str] = field(default_factory=list)
    node_events: list[tuple[str, str]] = field(default_factory=list)
    pod_events: list[tuple[str, str, str, Mapping[str, str]]] = field(default_factory=list)
    measured: list[bool] = field(default_factory=list)
    """Whether details were requested, for each measurement of pods."""
    conditions: PressureConditions = field(default_factory=PressureConditions)
    metrics: EvictionMetrics = field(default_factory=EvictionMetrics)

    def manager(self, *thresholds: Threshold, **options: Any) -> EvictionManager:
        """Return a manager of this node."""
        settings = {"transition_period": 300.0, "local_storage": False}
        own = {key: options.pop(key) for key in list(options) if key in EvictionSettings.__slots__}
        return EvictionManager(
            EvictionSettings(thresholds=thresholds, **(settings | own)),
            _Measurements(self),
            lambda: list(self.pods),
            _Killer(self),
            NodeReclaim(self._reclaim_containers, self._reclaim_images),
            self,
            self.conditions,
            metrics=self.metrics,
            **options,
        )

    def count(self, signal: str) -> float:
        """Return the number of evictions for a signal."""
        return self.metrics.evictions.labels(signal)._value.get()  # type: ignore[no-any-return]

    def node_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self.node_events.append((reason, message))

    def pod_event(self, pod: Pod, reason: str, message: str, annotations: Mapping[str, str]) -> None:
        self.pod_events.append((pod.metadata.name, reason, message, annotations))

    async def _reclaim_containers(self) -> None:
        await self._reclaim("containers")

    async def _reclaim_images(self) -> None:
        await self._reclaim("images")

    async def _reclaim(self, what: str) -> None:
        self.reclaimed.append(what)
        await asyncio.sleep(self.reclaim_seconds)
        self.on_reclaim(what)


@dataclass
class _Measurements:
    script: ScriptedNode

    async def node(self) -> NodeMeasurements:
        script, now = self.script, time.time()
        nodefs = disk(script.nodefs) if script.nodefs is not None else None
        imagefs = nodefs if script.imagefs is None else disk(script.imagefs, minor=16)
        return NodeMeasurements(
            root=cgroup(script.memory) if script.memory is not None else None,
            nodefs=nodefs,
            imagefs=imagefs if script.runtime_is_up else None,
            containerfs=imagefs if script.runtime_is_up else None,
            rlimit=RlimitStats(time=None, maxpid=1000, curproc=script.tasks),
            rlimit_time=now,
        )

    async def pods(
        self, uids: Collection[str], *, detailed: bool, volumes: bool = False
    ) -> Mapping[str, PodUsage]:
        self.script.measured.append(detailed)
        if volumes:
            self.script.usages |= self.script.usages_now
        return {uid: found for uid, found in self.script.usages.items() if uid in uids}


@dataclass
class _Killer:
    script: ScriptedNode

    async def kill(self, pod: Pod, grace: int, status: StatusFunction) -> bool:
        script = self.script
        script.killed.append((pod.metadata.name, grace))
        script.statuses[pod.uid] = status(pod.status)
        if pod.uid in script.unkillable:
            await asyncio.sleep(script.kill_seconds)
            return False
        if pod.uid in script.slow:
            await asyncio.sleep(grace)
        script.pods.remove(pod)
        script.usages.pop(pod.uid, None)
        script.on_kill(pod)
        return True

    async def wait_finished(self, uids: Collection[str]) -> None:
        if not all(map(self.is_finished, uids)):
            await asyncio.Event().wait()

    def is_finished(self, uid: str) -> bool:
        return all(pod.uid != uid for pod in self.script.pods)


def names(pods: Sequence[Pod]) -> list[str]:
    return [found.metadata.name for found in pods]
