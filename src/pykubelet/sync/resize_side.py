"""Resizing, put together for the engine: the rules of this node, who does it, and who is asked."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import Cri
from pykubelet.pods.journal import Journal
from pykubelet.pods.mux import PodMux
from pykubelet.pods.store import PodStore
from pykubelet.resources.resize_book import ResizeBooks
from pykubelet.resources.resize_sizes import Scope
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.linux_resources import can_swap
from pykubelet.runtime.shares import Shares
from pykubelet.runtime.update import Resizer
from pykubelet.sync.admitting import Admitting
from pykubelet.sync.apply import Cgroups
from pykubelet.sync.loop import SyncLoop
from pykubelet.sync.resize_doing import ResizeDoing
from pykubelet.sync.resize_metrics import ResizeMetrics
from pykubelet.sync.resize_rules import ResizeRules
from pykubelet.sync.resizing import Others, Resizing
from pykubelet.sync.worker import State
from pykubelet.sync.workers import PodWorkers
from pykubelet.tasks import TaskScope


def rules_of(config: KubeletConfiguration, node: NodeFacts) -> ResizeRules:
    """Give what this node can resize."""
    gates = node.gates
    whole = "InPlacePodLevelResourcesVerticalScaling"
    return ResizeRules(
        scope=Scope(gates.enabled(whole), gates.enabled("InPlacePodVerticalScalingInitContainers")),
        pod_level=node.pod_level,
        static_cpus=config.cpu_manager_policy == "static"
        and not gates.enabled("InPlacePodVerticalScalingExclusiveCPUs"),
        static_memory=config.memory_manager_policy == "Static"
        and not gates.enabled("InPlacePodVerticalScalingExclusiveMemory"),
        may_swap=lambda pod, container: can_swap(pod, container, node),
    )


def others_of(
    store: PodStore, workers: PodWorkers, admitting: Admitting, loop: SyncLoop, mux: PodMux
) -> Others:
    """Give whom resizing asks and tells."""

    def to_run(uid: str) -> Pod | None:
        worker = workers.get(uid)
        return store.get(uid) if worker is not None and worker.state is State.SYNCING else None

    return Others(
        pod=to_run,
        judge=admitting.judge_resize,
        make_room=admitting.make_room,
        wake=workers.wake,
        is_ready=lambda: mux.all_reported,
        later=loop.after,
    )


def make_resizing(
    config: KubeletConfiguration,
    node: NodeFacts,
    cri: Cri,
    cgroups: Cgroups,
    shares: Shares,
    books: ResizeBooks,
    *,
    journal: Journal,
    registry: CollectorRegistry,
    scope: TaskScope,
) -> tuple[Resizing, ResizeDoing]:
    """Give who decides on resizes, once it knows the others (`others_of`), and who does them."""
    resizing = Resizing(
        journal,
        books,
        rules_of(config, node),
        scope=scope,
        group_of=cgroups.group,
        metrics=ResizeMetrics(registry),
    )
    resizer = Resizer(
        cri, node, cgroups.group, resizing, lambda pod, container: shares.of(pod, container).exclusive
    )
    return resizing, ResizeDoing(resizing, resizer)
