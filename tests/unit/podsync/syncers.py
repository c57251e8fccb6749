"""Pod syncers and action executors whose collaborators are fakes."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observed import PodStates
from pykubelet.objects.base import NoObjects
from pykubelet.objects.runtime_classes import default_handler
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.remnants import RemnantRemover
from pykubelet.podsync.reporter import StatusOptions, StatusReporter
from pykubelet.podsync.resource_allocator import NO_CLAIMS
from pykubelet.podsync.restart_all import RestartAll
from pykubelet.podsync.stages.allocation import AllocationStage
from pykubelet.podsync.stages.base import StageList
from pykubelet.podsync.stages.cgroup import CgroupStage
from pykubelet.podsync.stages.claims import ClaimStage
from pykubelet.podsync.stages.containers import ContainerStage
from pykubelet.podsync.stages.directory import DirectoryStage
from pykubelet.podsync.stages.objects import ObjectStage
from pykubelet.podsync.stages.sandbox import SandboxStage
from pykubelet.podsync.stages.user_namespace import UserNamespaceStage
from pykubelet.podsync.stages.volumes import VolumeStage
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podsync.syncer import ActionExecutor, Fate, NodePodSyncer
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager, PodResizeStep
from pykubelet.status.compute import StatusStore
from pykubelet.util.backoff import KeyedBackoff


class Sources:
    """Sources of pods that answer as they are told."""

    def __init__(
        self,
        *,
        clustered: bool = False,
        fate_of: Callable[[str], Fate] = lambda uid: "desired",
        is_new: Callable[[str], bool] = lambda uid: False,
        reject: Callable[[Pod, AdmitRejection], None] = lambda pod, rejection: None,
        on_removed: Callable[[str], None] = lambda uid: None,
        listed_since: Callable[[str, float], PodStates | None] = lambda uid, time: None,
    ) -> None:
        self.clustered = clustered
        self.fate_of = fate_of
        self.is_new = is_new
        self.reject = reject
        self.on_removed = on_removed
        self.listed_since = listed_since

    def on_terminated(self, uid: str) -> None:
        """Record nothing."""

    async def complete_deletion(self, pod: Pod) -> None:
        """Delete nothing."""


def make_stages(
    history: PodHistory,
    allocation: AllocationManager,
    *,
    cgroups: Any,
    dirs: Any,
    volumes: Any,
    user_namespaces: Any = None,
    claims: Any = NO_CLAIMS,
    objects: Any = None,
    is_removed: Callable[[str], bool] = lambda uid: False,
) -> StageList:
    """Return the stages of a node, with fakes behind them."""
    resources: Any = SimpleNamespace(forget=lambda uid: None)
    return StageList(
        ObjectStage(objects or NoObjects()),
        CgroupStage(cgroups, allocation, history),
        DirectoryStage(dirs, history),
        VolumeStage(volumes, history),
        UserNamespaceStage(user_namespaces, default_handler, history),
        AllocationStage(resources, allocation, lambda uid: False),
        ClaimStage(claims, history, is_removed),
    )


def make_executor(
    *,
    starter: Any,
    parts: Any,
    history: PodHistory,
    back_off: KeyedBackoff,
    clock: Callable[[], float] = time.time,
) -> ActionExecutor:
    """Return an executor; `parts` is everything but the starter of containers."""
    allocation, metrics = AllocationManager(history), StartMetrics()
    return ActionExecutor(
        stages=make_stages(
            history, allocation, cgroups=parts, dirs=parts, volumes=parts, user_namespaces=parts
        ),
        sandbox=SandboxStage(starter, default_handler, lambda: (), history, metrics),
        containers=ContainerStage(starter, allocation, back_off, history, metrics, clock),
        killer=parts,
        remover=parts,
        resize=PodResizeStep(allocation),
        limiter=StartLimiter(),
        history=history,
    )


def make_syncer(
    *,
    cri: Any,
    observer: Any,
    executor: Any,
    stages: StageList,
    prober: Prober,
    cgroups: Any,
    history: PodHistory,
    allocation: AllocationManager,
    sources: Any,
    statuses: StatusStore | None = None,
    restart_all: RestartAll | None = None,
    dirs: Any = None,
    remove_logs: Callable[[Pod], None] = lambda pod: None,
    on_removed: Callable[[str], None] = lambda uid: None,
    host_ips: Sequence[str] = (),
    stays_initialized: bool = True,
    clock: Callable[[], float] = time.time,
) -> NodePodSyncer:
    """Return a pod syncer."""
    unused: Any = None
    return NodePodSyncer(
        observer=observer,
        executor=executor,
        stages=stages,
        reporter=StatusReporter(
            StatusOptions(
                runtime_name=cri.version.runtime_name,
                host_ips=host_ips,
                stays_initialized=stays_initialized,
                clustered=sources.clustered,
            ),
            prober,
            statuses or StatusStore(),
            allocation,
            cgroups,
            history,
            clock=clock,
        ),
        remover=RemnantRemover(cri, observer, dirs, remove_logs, on_removed),
        restart_all=restart_all or RestartAll(unused, unused, history, clock, enabled=True),
        allocation=allocation,
        prober=prober,
        history=history,
        sources=sources,
    )
