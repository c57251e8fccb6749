"""Builds the pod engine and everything between the pod sources and the runtime, then starts it.

`build_pod_engine` constructs from the outside in, as in docs/architecture.md: sources and loop, workers,
admission, then the syncer with its stages. A part that others use is built before them. Three cycles remain
and are closed by `start`: the workers get the syncer, the loop its handlers, and the allocation manager the
admission. Nothing runs before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.node_cgroups import no_record
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.resize import AllocationState, Scope
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.pull_tracker import PullTracker
from pykubelet.kuberuntime.configuration.config_builder import ConfigBuilder
from pykubelet.kuberuntime.configuration.container_images import ContainerImages
from pykubelet.kuberuntime.configuration.linux_resources import can_swap
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.configuration.user_namespaces import UserNamespaces
from pykubelet.kuberuntime.gc import GarbageCollector
from pykubelet.kuberuntime.kill import ContainerKiller, HookRunner
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.pod_logs import PodLogs
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.kuberuntime.resize import Resizer
from pykubelet.kuberuntime.start import ContainerStarter, PostStartHooks, StartRecords
from pykubelet.objects.base import PodObjects
from pykubelet.objects.runtime_classes import default_handler
from pykubelet.objects.services import no_services
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podconfig.mux import SourceUpdates
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.podconfig.static_sources import StaticSources, served_kinds, validation_options
from pykubelet.podsync.contract import PodSyncer
from pykubelet.podsync.remnants import RemnantRemover
from pykubelet.podsync.reporter import StatusOptions, StatusReporter
from pykubelet.podsync.resource_allocator import DeviceProvider, PodClaims, ResourceAllocator
from pykubelet.podsync.restart_all import RestartAll
from pykubelet.podsync.stages.allocation import AllocationStage
from pykubelet.podsync.stages.base import StageList
from pykubelet.podsync.stages.cgroup import CgroupStage
from pykubelet.podsync.stages.claims import ClaimStage
from pykubelet.podsync.stages.containers import ContainerStage, crash_loop_back_off
from pykubelet.podsync.stages.directory import DirectoryStage
from pykubelet.podsync.stages.objects import ObjectStage
from pykubelet.podsync.stages.sandbox import SandboxStage
from pykubelet.podsync.stages.user_namespace import UserNamespaceStage
from pykubelet.podsync.stages.volumes import VolumeStage
from pykubelet.podsync.stages.wait_for import WaitForStage
from pykubelet.podsync.syncer import ActionExecutor, NodePodSyncer
from pykubelet.podsync.traced_syncer import TracedPodSyncer
from pykubelet.podworkers.api_server_sync import ApiServerSync, ClusterAccess
from pykubelet.podworkers.container_gc import ContainerDeletor, ContainerGC, PodStateProvider
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.loop import PodEventHandlers, SyncLoop
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_admission import AdmissionMetrics, AdmissionNode, PodAdmission, PodStarter
from pykubelet.podworkers.pod_fates import PodFates
from pykubelet.podworkers.pod_metrics import EngineMetrics
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.runtime_state import RuntimeState
from pykubelet.podworkers.workers import PodChurn, PodWorkers, PodWorkerState
from pykubelet.probes.custom import installed_probes
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager, PodResizeStep, ResizeCollaborators
from pykubelet.resize.feasibility import ResizeMetrics, ResizeRules
from pykubelet.status.compute import StatusStore
from pykubelet.status.static_readiness import StaticReadiness
from pykubelet.tracing.span import Tracer
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.manager import PodVolumes

if TYPE_CHECKING:
    from pykubelet.podconfig.workloads.controller import WorkloadController

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRuntime:
    """The container runtime of this node, and what the kubelet knows of it."""

    cri: RuntimeConnection
    options: RuntimeNodeOptions
    state: RuntimeState
    images: ImageManager
    collector: GarbageCollector
    host_ips: Sequence[str]
    legacy_logs: Path | None
    """Directory of links to container logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """Managers of the resources of pods other than containers; each has a pod stage."""

    cgroups: PodCgroups
    volumes: PodVolumes
    user_namespaces: UserNamespaces
    allocator: ResourceAllocator
    allocation_state: AllocationState
    devices: DeviceProvider
    claims: PodClaims


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Parts of the pod engine whose settings can change at run time."""

    loop: SyncLoop
    workers: PodWorkers
    admission: PodAdmission
    sources: StaticSources
    config_builder: ConfigBuilder
    resizer: Resizer

    def set_sync_frequency(self, period: Duration) -> None:
        """Change the resync period of pods."""
        self.loop.set_resync(period)
        self.workers.set_resync(period.seconds)

    def set_node(self, options: RuntimeNodeOptions) -> None:
        """Replace the node's options and allocatable resources for what starts afterwards."""
        self.config_builder.set_node(options)
        self.resizer.set_node(options)
        self.admission.set_allocatable(options.allocatable)


def build_pod_engine(
    settings: AgentSettings,
    runtime: NodeRuntime,
    resources: NodeResources,
    records: PodRecords,
    churn: PodChurn,
    admission_node: AdmissionNode,
    cluster: ClusterAccess | None,
    local_objects: LocalObjects,
    registry: CollectorRegistry,
    scope: TaskScope,
) -> tuple[PodEngine, Callable[[], None], EngineSettings]:
    """Return the pod engine, the function that starts it, and its settings that can change at run time.

    `cluster` is None on a standalone node, whose pods use `local_objects`; those are the configMaps and
    secrets of the manifest directory.
    """
    config, root, cri = settings.config, Path(settings.flags.root_dir), runtime.cri
    store, statuses, history = records.store, records.statuses, records.history
    objects: PodObjects = cluster.objects if cluster is not None else local_objects
    node_event = cluster.node_event if cluster is not None else no_record
    metrics = EngineMetrics(registry, statuses, history)
    static_readiness = StaticReadiness(root)
    statuses.add_listener(static_readiness.record)

    # Events: sources, runtime and probes → loop.
    observer = Observer(cri)
    # An explicit false is an escape from a runtime whose event stream is faulty.
    pleg = Pleg(
        cri,
        observer,
        metrics.pleg,
        events=settings.gates.overrides.get("EventedPLEG", True),
        on_demand=settings.gates.enabled("PLEGOnDemandRelist"),
    )

    def runtime_errors() -> list[str]:
        """Return the reasons why no pod can be synced now; the running pods must be known first."""
        problem = pleg.health()
        return [*runtime.state.errors(), *([problem] if problem else [])]

    loop = SyncLoop(runtime_errors, config.sync_frequency)
    pleg.add_listener(loop.runtime)
    prober = build_prober(settings, cri, history, registry, runtime.host_ips)
    prober.results.subscribe(lambda update: loop.probe(update.pod_uid))
    updates = SourceUpdates(records.mux, loop.pods, loop.after)
    workloads = build_workloads(settings, updates, statuses) if cluster is None else None
    sources = StaticSources(
        config,
        settings.node_name,
        records.mux,
        updates.replace,
        objects=local_objects if cluster is None else None,
        workloads=workloads,
        served=served_kinds(settings.gates, standalone=cluster is None),
        options=validation_options(settings.gates),
    )

    # Workers, and what decides which pods get one.
    workers = PodWorkers(scope, config.sync_frequency.seconds, churn, metrics.workers)
    objects.add_listener(workers.wake)
    api_server = None
    if cluster is not None:
        api_server = ApiServerSync(
            cluster, settings.node_name, updates, records, workers, churn, metrics.statuses
        )
    allocation = AllocationManager(
        history,
        resources.allocation_state,
        resize_rules(config, runtime.options),
        scope=scope,
        group_of=resources.cgroups.group,
        metrics=ResizeMetrics(registry),
    )
    dirs = PodDirs(root)
    pod_states = PodStateProvider(
        records,
        workers,
        pleg,
        lambda: api_server.unreadable if api_server is not None else frozenset(),
    )
    container_gc = ContainerGC(runtime.collector, pod_states, node_event, settings.tracer)
    housekeeping = Housekeeping(
        records,
        workers,
        pleg,
        dirs,
        resources.cgroups,
        allocation,
        pod_states=pod_states,
        container_gc=container_gc,
        retain=(
            prober.cleanup,
            resources.allocator.keep_only,
            lambda uids: static_readiness.retain(uids.__contains__),
        ),
        scope=scope,
    )
    starter = PodStarter(workers, housekeeping, allocation, static_readiness)
    admission = PodAdmission(
        admission_node,
        records,
        workers,
        allocation,
        in_runtime=lambda: pleg.pods,
        start=starter.start,
        scope=scope,
        metrics=AdmissionMetrics(registry),
    )
    updates.add_listener(admission.mark)

    def pod_ip(uid: str) -> str:
        pod, observed = store.get(uid), syncer.observed(uid)
        if pod is not None and pod.spec.host_network:
            return next(iter(runtime.host_ips), "")
        return next(iter(observed.ips), "") if observed else ""

    hooks = HookRunner(cri, metrics.lifecycle_get, pod_ip, metrics.starts)
    killer = ContainerKiller(cri, hooks, history, scope)
    remover = ContainerRemover(cri, runtime.legacy_logs)
    restart_all_enabled = settings.gates.enabled("RestartAllContainersOnContainerExits")
    restart_all = RestartAll(
        killer,
        remover,
        history,
        time.time,
        enabled=restart_all_enabled,
        container_rules=settings.gates.enabled("ContainerRestartRules"),
    )
    fates = PodFates(
        records,
        workers,
        pleg,
        admission,
        api_server,
        forget=(
            pleg.drop_snapshot,
            metrics.pod_starts.forget,
            runtime.images.forget_pod,
            static_readiness.forget,
            admission.forget,
        ),
        honoured=restart_all.honoured,
    )

    # The sync of one pod.
    container_images = ContainerImages(runtime.images, history, objects)
    pod_logs = PodLogs(runtime.options.pod_logs_dir, runtime.legacy_logs)
    config_builder = ConfigBuilder(
        runtime.options,
        dirs,
        container_images,
        resources.volumes.sub_paths,
        lambda: Path(config.resolv_conf).read_text() if config.resolv_conf else None,
        objects=objects,
        services=api_server.services if api_server is not None else no_services,
        devices=resources.devices.grants,
        cpusets=resources.allocator,
    )
    container_starter = ContainerStarter(
        cri,
        observer,
        config_builder,
        container_images,
        pod_logs,
        PostStartHooks(hooks, killer, history),
        StartRecords(history, node_event, metrics.starts),
        pleg.learn,
        cpusets=resources.allocator,
    )
    handler_of = cluster.handler_of if cluster is not None else default_handler
    wait_for = []
    if workloads is not None:
        wait_for.append(WaitForStage(store.pods, statuses.get, workloads.job_outcome, workers.wake, history))
        statuses.add_listener(wait_for[0].handle_status)
    stages = StageList(
        *wait_for,
        ObjectStage(objects),
        CgroupStage(resources.cgroups, allocation, history),
        DirectoryStage(dirs, history),
        VolumeStage(
            resources.volumes,
            history,
            lambda uid: settings.flags.keep_terminated_pod_volumes and fates.fate_of(uid) == "desired",
        ),
        UserNamespaceStage(resources.user_namespaces, handler_of, history),
        AllocationStage(resources.allocator, allocation, workers.is_reborn),
        ClaimStage(resources.claims, history, lambda uid: fates.fate_of(uid) == "gone"),
    )
    resizer = Resizer(
        cri,
        runtime.options,
        resources.cgroups.group,
        allocation,
        lambda pod, container: resources.allocator.assignment_for(pod, container).exclusive,
    )
    executor = ActionExecutor(
        stages=stages,
        sandbox=SandboxStage(
            container_starter,
            handler_of,
            runtime.state.network_errors,
            history,
            metrics.starts,
        ),
        containers=ContainerStage(
            container_starter,
            allocation,
            crash_loop_back_off(config, settings.gates),
            history,
            metrics.starts,
        ),
        killer=killer,
        remover=remover,
        resize=PodResizeStep(allocation, resizer),
        limiter=churn.limiter,
        history=history,
    )
    reporter = StatusReporter(
        StatusOptions(
            runtime_name=cri.version.runtime_name,
            host_ips=runtime.host_ips,
            recursive_handlers=runtime.options.recursive_handlers,
            stays_initialized=restart_all_enabled,
            reports_image_volumes=settings.gates.enabled("ImageVolumeWithDigest"),
            reports_ready_to_start=settings.gates.enabled("PodReadyToStartContainersCondition"),
            clustered=cluster is not None,
        ),
        prober,
        statuses,
        allocation,
        resources.cgroups,
        history,
        resources.devices.health,
        pull_message=runtime.images.tracker.message,
    )
    syncer = NodePodSyncer(
        observer=observer,
        executor=executor,
        stages=stages,
        reporter=reporter,
        remover=RemnantRemover(cri, observer, dirs, pod_logs.remove, pleg.forget),
        restart_all=restart_all,
        allocation=allocation,
        prober=prober,
        history=history,
        sources=fates,
    )
    runtime.images.tracker.add_listener(partial(_report_pulls, store.pods, runtime.images.tracker, syncer))
    deletor = ContainerDeletor(
        runtime.collector.remove_container,
        syncer.observed,
        pod_states.should_content_be_removed,
        settings.flags.maximum_dead_containers_per_container,
    )
    pleg.add_listener(deletor.handle_event)
    statuses.add_listener(deletor.handle_status)
    metrics.count_pods(store, workers, statuses, syncer, pleg)
    engine = PodEngine(
        records=records,
        loop=loop,
        pleg=pleg,
        workers=workers,
        syncer=syncer,
        admission=admission,
        housekeeping=housekeeping,
        api_server=api_server,
        job_has_completed=workloads.has_completed if workloads is not None else lambda _: False,
    )
    handlers = PodEventHandlers(
        records=records,
        workers=workers,
        syncer=syncer,
        fates=fates,
        admission=admission,
        housekeeping=housekeeping,
        api_server=api_server,
        metrics=metrics,
    )

    def start() -> None:
        workers.start(_traced(syncer, settings.tracer))
        allocation.start(_resize_collaborators(records, workers, admission, loop))
        scope.start(pleg.run(), name="pleg")
        scope.start(prober.run(), name="prober")
        scope.start(deletor.run(), name="container-deletor")
        scope.start(resources.allocation_state.write_behind(), name="allocation-state")
        scope.start(static_readiness.run(), name="static-readiness")
        scope.start(loop.run(handlers), name="sync-loop")
        sources.start(scope)
        if api_server is not None:
            records.mux.expect("api")
            api_server.start(scope)

    return (
        engine,
        start,
        EngineSettings(
            loop=loop,
            workers=workers,
            admission=admission,
            sources=sources,
            config_builder=config_builder,
            resizer=resizer,
        ),
    )


def build_workloads(
    settings: AgentSettings, updates: SourceUpdates, statuses: StatusStore
) -> WorkloadController:
    """Return the controller of the Jobs and CronJobs in the manifests of a standalone node."""
    # Imported here: a node of a cluster has no workloads.
    from pykubelet.podconfig.workloads.controller import WorkloadController

    workloads = WorkloadController(
        Path(settings.flags.root_dir), settings.node_name, updates.replace, statuses.get
    )
    statuses.add_listener(workloads.handle_status)
    return workloads


def _report_pulls(
    pods: Callable[[], Sequence[Pod]], tracker: PullTracker, syncer: NodePodSyncer, images: frozenset[str]
) -> None:
    """Report the progress of pulls in the statuses of the pods that wait for these images."""
    for pod in pods():
        containers = (*pod.spec.init_containers, *pod.spec.containers, *pod.spec.ephemeral_containers)
        if any(tracker.runtime_name(container.image) in images for container in containers):
            syncer.pulling(pod)


def _traced(syncer: NodePodSyncer, tracer: Tracer | None) -> PodSyncer:
    """Return the syncer that the workers call."""
    if tracer is None:
        return syncer

    def has_started(pod: Pod) -> bool:
        observed = syncer.observed(pod.uid)
        running = {container.name for container in observed.running} if observed is not None else set()
        return all(container.name in running for container in pod.spec.containers)

    return TracedPodSyncer(syncer, tracer, has_started)


def build_prober(
    settings: AgentSettings,
    cri: RuntimeConnection,
    history: PodHistory,
    registry: CollectorRegistry,
    host_ips: Sequence[str],
) -> Prober:
    """Return a prober; pods with hostNetwork are probed at the first of `host_ips`.

    While the host has no address they are probed at its loopback, where most of them listen, too.
    """

    async def run(container_id: str, command: Sequence[str], timeout_seconds: int) -> tuple[int, bytes]:
        response = await cri.runtime.exec_sync(container_id, list(command), timeout_seconds)
        return response.exit_code, response.stdout + response.stderr

    def record(pod: Pod, container: str, reason: str, message: str) -> None:
        history.event(pod, "Warning", reason, message, field_of(pod, container))

    return Prober(
        run,
        record,
        registry,
        host_ip=lambda: next(iter(host_ips), _LOOPBACK),
        custom=installed_probes(),
        restores=not settings.gates.enabled("ChangeContainerStatusOnKubeletRestart"),
    )


def resize_rules(config: KubeletConfiguration, options: RuntimeNodeOptions) -> ResizeRules:
    """Return the resize rules of this node."""
    gates = options.gates
    return ResizeRules(
        scope=Scope(
            gates.enabled("InPlacePodLevelResourcesVerticalScaling"),
            gates.enabled("InPlacePodVerticalScalingInitContainers"),
        ),
        pod_level=options.pod_level,
        static_cpus=config.cpu_manager_policy == "static"
        and not gates.enabled("InPlacePodVerticalScalingExclusiveCPUs"),
        static_memory=config.memory_manager_policy == "Static"
        and not gates.enabled("InPlacePodVerticalScalingExclusiveMemory"),
        may_swap=lambda pod, container: can_swap(pod, container, options),
    )


def _resize_collaborators(
    records: PodRecords, workers: PodWorkers, admission: PodAdmission, loop: SyncLoop
) -> ResizeCollaborators:
    def pod_to_run(uid: str) -> Pod | None:
        worker = workers.get(uid)
        is_syncing = worker is not None and worker.state is PodWorkerState.SYNCING
        return records.store.get(uid) if is_syncing else None

    return ResizeCollaborators(
        pod=pod_to_run,
        evaluate=admission.evaluate_resize,
        preempt=admission.preempt,
        wake=workers.wake,
        is_ready=lambda: records.all_reported,
        later=loop.after,
    )
