"""Pod engine: builds and starts every part between the pod sources and the runtime.

Sources → mux → loop → workers → syncer (cgroup, volumes, sandbox, containers) → status, and runtime events
back into the loop, as in docs/architecture.md. In a cluster, pods come from the API server too, and their
statuses are sent to it (`api_server_sync.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Pod
from pykubelet.apiserver.reflector import StoreDelta
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.cm.resize import AllocationState, Scope, no_books
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.images.credential_provider import CredentialProvider, PodAccounts, ProviderPlugins
from pykubelet.images.credentials import NodeCredentials
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageMetrics, PullRecordMetrics
from pykubelet.images.pull_manager import PullManager, verification_policy
from pykubelet.images.pull_records import PullRecordFiles, PullRecords
from pykubelet.images.puller import PullLimits
from pykubelet.kuberuntime.decide import always_restarts
from pykubelet.kuberuntime.gc import GarbageCollector
from pykubelet.kuberuntime.kill import ContainerKiller, HookRunner
from pykubelet.kuberuntime.linux_resources import can_swap
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.options import CpusetAssigner, RuntimeNodeOptions
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.kuberuntime.resize import Resizer
from pykubelet.kuberuntime.start import ContainerStarter
from pykubelet.kuberuntime.user_namespaces import UserNamespaceRange, UserNamespaces
from pykubelet.logs import get_logger
from pykubelet.objects.base import PodObjects
from pykubelet.objects.runtime_classes import default_handler
from pykubelet.objects.services import no_services
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podconfig.mux import PodChange, PodMux, PodStore
from pykubelet.podconfig.pod_history import Event, PodHistory, TimelineEntry, field_of
from pykubelet.podconfig.static_pods import is_mirror_pod, is_static_pod
from pykubelet.podconfig.static_sources import start_sources
from pykubelet.podsync.contract import Cgroups, PodLifecycleEvent, Volumes
from pykubelet.podsync.executor import ActionExecutor
from pykubelet.podsync.remnants import RemnantRemover
from pykubelet.podsync.reporter import StatusOptions, StatusReporter
from pykubelet.podsync.resource_allocator import (
    NO_CLAIMS,
    NO_DEVICES,
    DeviceProvider,
    PodClaims,
    ResourceAllocator,
)
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
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.podsync.syncer import Fate, NodePodSyncer
from pykubelet.podworkers.api_server_sync import ApiServerSync, ClusterParts
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.loop import SyncLoop
from pykubelet.podworkers.pleg import Pleg
from pykubelet.podworkers.pod_admission import AdmissionParts, PodAdmission
from pykubelet.podworkers.pod_metrics import EngineMetrics
from pykubelet.podworkers.worker import PodWorkerState
from pykubelet.podworkers.workers import PodChurn, PodWorkers
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager, PodResizeStep, ResizeCollaborators
from pykubelet.resize.feasibility import ResizeMetrics, ResizeRules
from pykubelet.status.compute import TERMINAL, StatusStore, has_external_change
from pykubelet.status.static_readiness import StaticReadiness
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_LOOPBACK = "127.0.0.1"


def make_prober(
    cri: RuntimeConnection, journal: PodHistory, registry: CollectorRegistry, host_ips: Sequence[str]
) -> Prober:
    """Return a prober; pods with hostNetwork are probed at the first of `host_ips`.

    While the host has no address they are probed at its loopback, where most of them listen, too.
    """

    async def run(container_id: str, command: Sequence[str], timeout_seconds: int) -> tuple[int, bytes]:
        answer = await cri.runtime.exec_sync(container_id, list(command), timeout_seconds)
        return answer.exit_code, answer.stdout + answer.stderr

    def tell(pod: Pod, container: str, reason: str, message: str) -> None:
        journal.event(pod, "Warning", reason, message, field_of(pod, container))

    return Prober(run, tell, registry, host_ip=lambda: next(iter(host_ips), _LOOPBACK))


MAX_CACHED_INTENTS = 1024
MAX_CACHED_RECORDS = 2000


def make_puller(
    cri: RuntimeConnection,
    config: KubeletConfiguration,
    journal: PodHistory,
    scope: TaskScope,
    registry: CollectorRegistry,
    *,
    root_dir: Path,
    providers: Sequence[CredentialProvider],
    provider_dir: Path,
    accounts: PodAccounts | None,
    pull_manager: PullManager | None,
) -> ImageManager:
    """Return the image manager; without `accounts` credential providers get no service account token."""
    metrics = ImageMetrics(registry)
    plugins = ProviderPlugins(providers, provider_dir, scope, metrics, accounts) if providers else None
    limits = PullLimits(
        serialize=config.serialize_image_pulls,
        max_parallel=config.max_parallel_image_pulls,
        qps=config.registry_pull_qps,
        burst=config.registry_burst,
    )
    return ImageManager(
        cri.images,
        journal,
        scope,
        limits=limits,
        metrics=metrics,
        node_credentials=NodeCredentials(root_dir, Path.cwd(), _home()).load,
        plugins=plugins,
        pull_manager=pull_manager,
    )


async def open_pull_manager(
    cri: RuntimeConnection,
    config: KubeletConfiguration,
    gates: FeatureGates,
    scope: TaskScope,
    registry: CollectorRegistry,
    root_dir: Path,
) -> PullManager | None:
    """Return the pull manager of a node, started, or None when its feature gate is off; raises OSError."""
    metrics = PullRecordMetrics(registry)
    if not gates.enabled("KubeletEnsureSecretPulledImages"):
        return None
    parallel = config.max_parallel_image_pulls or 0
    records = PullRecords(
        PullRecordFiles(root_dir),
        metrics,
        intents_size=min(max(2 * config.max_pods, 2 * parallel), MAX_CACHED_INTENTS),
        pulled_size=min(5 * config.max_pods, MAX_CACHED_RECORDS),
    )
    policy = verification_policy(
        config.image_pull_credentials_verification_policy, config.preloaded_images_verification_allowlist
    )
    manager = PullManager(records, policy, cri.images, scope, metrics)
    await manager.start()
    return manager


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def rules_of(config: KubeletConfiguration, node: RuntimeNodeOptions) -> ResizeRules:
    """Return the resize rules of this node."""
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
    store: PodStore, workers: PodWorkers, admitting: PodAdmission, loop: SyncLoop, mux: PodMux
) -> ResizeCollaborators:
    """Return the collaborators of the allocation manager."""

    def to_run(uid: str) -> Pod | None:
        worker = workers.get(uid)
        return store.get(uid) if worker is not None and worker.state is PodWorkerState.SYNCING else None

    return ResizeCollaborators(
        pod=to_run,
        judge=admitting.judge_resize,
        make_room=admitting.make_room,
        wake=workers.wake,
        is_ready=lambda: mux.all_reported,
        later=loop.after,
    )


def make_resizing(
    config: KubeletConfiguration,
    node: RuntimeNodeOptions,
    cri: RuntimeConnection,
    cgroups: Cgroups,
    shares: CpusetAssigner,
    books: AllocationState,
    *,
    journal: PodHistory,
    registry: CollectorRegistry,
    scope: TaskScope,
) -> tuple[AllocationManager, PodResizeStep]:
    """Return the allocation manager, which needs its collaborators (`others_of`), and the resize step."""
    resizing = AllocationManager(
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
    return resizing, PodResizeStep(resizing, resizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDependencies:
    """Dependencies of the pod engine."""

    config: KubeletConfiguration
    node_name: str
    host_ips: Sequence[str]
    cri: RuntimeConnection
    node: RuntimeNodeOptions
    root_dir: Path
    credential_providers: Sequence[CredentialProvider]
    credential_provider_dir: Path
    pull_manager: PullManager | None
    """Access control of images that are present; None when its feature gate is off."""
    volumes: Volumes
    cgroups: Cgroups
    registry: CollectorRegistry
    runtime_errors: Callable[[], list[str]]
    network_errors: Callable[[], list[str]]
    collector: GarbageCollector
    node_event: Record = no_record
    """Records an event about the node."""
    id_space: UserNamespaceRange
    user_namespaces: bool
    """Whether the runtime supports user namespaces."""
    legacy_logs: Path | None
    admission: AdmissionParts
    local_objects: LocalObjects
    """ConfigMaps and secrets of the manifest directory, for a standalone node."""
    cluster: ClusterParts | None = None
    """None on a standalone node."""
    devices: DeviceProvider = NO_DEVICES
    allotment: ResourceAllocator
    claims: PodClaims = NO_CLAIMS
    books: AllocationState = field(default_factory=no_books)


class PodEngine:
    """Engine that runs the desired pods; `start` adds its tasks to a scope."""

    def __init__(self, parts: EngineDependencies, scope: TaskScope) -> None:
        config, cluster = parts.config, parts.cluster
        objects: PodObjects = cluster.objects if cluster is not None else parts.local_objects
        self._parts = parts
        self._scope = scope
        self.clustered = cluster is not None
        self.book = PodHistory()
        self.statuses = StatusStore()
        self._metrics = EngineMetrics(parts.registry, self.statuses, self.book)
        self._static_readiness = StaticReadiness(parts.root_dir)
        self.statuses.add_listener(self._static_readiness.record)
        self.store = PodStore()
        self.dirs = PodDirs(parts.root_dir)
        self.sources_expected = bool(config.static_pod_path or config.static_pod_url)
        self._mux = PodMux(time.time_ns, self._report_duplicate)
        self._observer = Observer(parts.cri)
        self._gate = StartLimiter()
        self.prober = make_prober(parts.cri, self.book, parts.registry, parts.host_ips)
        self.prober.results.subscribe(lambda update: self.loop.probe(update.pod_uid))
        hooks = HookRunner(parts.cri, self._metrics.lifecycle_get, self._pod_ip, self._metrics.starts)
        killer = ContainerKiller(parts.cri, hooks, self.book, scope)
        self.pleg = Pleg(
            parts.cri, self._observer, lambda change: self.loop.runtime(change), self._metrics.pleg
        )
        self._images = make_puller(
            parts.cri,
            config,
            self.book,
            scope,
            parts.registry,
            root_dir=parts.root_dir,
            providers=parts.credential_providers,
            provider_dir=parts.credential_provider_dir,
            accounts=cluster.accounts if cluster is not None else None,
            pull_manager=parts.pull_manager,
        )
        starter = ContainerStarter(
            parts.cri,
            self._observer,
            parts.node,
            self.dirs,
            self._images,
            hooks,
            killer,
            self.book,
            self.pleg.learn,
            parts.volumes.sub_paths,
            lambda: Path(config.resolv_conf).read_text() if config.resolv_conf else None,
            parts.legacy_logs,
            objects=objects,
            services=lambda pod: (
                self._cluster.services(pod) if self._cluster is not None else no_services(pod)
            ),
            grants=parts.devices.grants,
            shares=parts.allotment,
            node_event=parts.node_event,
        )
        self._resizing, resize_doing = make_resizing(
            config,
            parts.node,
            parts.cri,
            parts.cgroups,
            parts.allotment,
            parts.books,
            journal=self.book,
            registry=parts.registry,
            scope=scope,
        )
        remover = ContainerRemover(parts.cri, parts.legacy_logs)
        restart_all = parts.admission.gates.enabled("RestartAllContainersOnContainerExits")
        stages = StageList(
            ObjectStage(objects),
            CgroupStage(parts.cgroups, self._resizing, self.book),
            DirectoryStage(self.dirs, self.book),
            VolumeStage(parts.volumes, self.book),
            UserNamespaceStage(
                UserNamespaces(self.dirs, parts.id_space, supported=parts.user_namespaces), self.book
            ),
            AllocationStage(parts.allotment, self._resizing, lambda uid: self.workers.is_reborn(uid)),
            ClaimStage(parts.claims, self.book, lambda uid: self.fate_of(uid) == "gone"),
        )
        self.life = NodePodSyncer(
            observer=self._observer,
            executor=ActionExecutor(
                stages=stages,
                sandbox=SandboxStage(
                    starter,
                    cluster.handler_of if cluster is not None else default_handler,
                    parts.network_errors,
                    self.book,
                    self._metrics.starts,
                ),
                containers=ContainerStage(
                    starter,
                    self._resizing,
                    crash_loop_back_off(config, parts.admission.gates),
                    self.book,
                    self._metrics.starts,
                ),
                killer=killer,
                remover=remover,
                resize=resize_doing,
                limiter=self._gate,
                history=self.book,
            ),
            stages=stages,
            reporter=StatusReporter(
                StatusOptions(
                    runtime_name=parts.cri.version.runtime_name,
                    host_ips=parts.host_ips,
                    recursive_handlers=parts.node.recursive_handlers,
                    stays_initialized=restart_all,
                    clustered=self.clustered,
                ),
                self.prober,
                self.statuses,
                self._resizing,
                parts.cgroups,
                self.book,
                parts.devices.health,
            ),
            remover=RemnantRemover(
                parts.cri, self._observer, self.dirs, starter.remove_logs, self.pleg.forget
            ),
            restart_all=RestartAll(killer, remover, self.book, time.time, enabled=restart_all),
            allocation=self._resizing,
            prober=self.prober,
            history=self.book,
            sources=self,
        )
        self.workers = PodWorkers(self.life, scope, config.sync_frequency.seconds, self._metrics.workers)
        self.crowd = PodChurn(self._gate, self.workers)
        self._admitting = PodAdmission(
            parts.admission,
            scope,
            parts.registry,
            store=self.store,
            workers=self.workers,
            statuses=self.statuses,
            journal=self.book,
            in_runtime=lambda: self.pleg.pods,
            wanted=self._mux.get,
            start=self._start_pod,
            allocated=self._resizing.allocated,
            counted=self._resizing.counted,
        )
        self._resizing.add_listener(self._admitting.mark)
        self._metrics.count_pods(self.store, self.workers, self.statuses, self.life, self.pleg)
        self.loop = SyncLoop(self, self._runtime_errors, config.sync_frequency)
        self._housekeeping = Housekeeping(
            mux=self._mux,
            store=self.store,
            workers=self.workers,
            pleg=self.pleg,
            dirs=self.dirs,
            cgroups=parts.cgroups,
            prober=self.prober,
            allotment=parts.allotment,
            resizing=self._resizing,
            collector=parts.collector,
            scope=scope,
            node_event=parts.node_event,
            unreadable=lambda: self._cluster.unreadable if self._cluster is not None else frozenset(),
        )
        self._resizing.others = others_of(self.store, self.workers, self._admitting, self.loop, self._mux)
        self._departed: set[str] = set()
        """Uids of removed pods that the API server still has."""
        self._cluster: ApiServerSync | None = None
        if cluster is not None:
            self._cluster = ApiServerSync(
                cluster,
                parts.node_name,
                self._emit,
                self._emit_update,
                lambda pods: self._hand_on(self._mux.offer("api", pods)),
                store=self.store,
                statuses=self.statuses,
                workers=self.workers,
                all_reported=lambda: self.all_sources_reported,
                crowded=self.crowd.is_there,
                metrics=self._metrics.statuses,
            )
            self.sources_expected = True
        objects.listen(self.workers.wake)

    def start(self) -> None:
        """Start PLEG, prober and main loop, and finally the sources."""
        self._scope.start(self.pleg.run(), name="pleg")
        self._scope.start(self.prober.run(), name="prober")
        self._scope.start(self._parts.books.write_behind(), name="resize-books")
        self._scope.start(self._static_readiness.run(), name="static-readiness")
        self._scope.start(self.loop.run(), name="sync-loop")
        start_sources(
            self._parts.config,
            self._parts.node_name,
            self._mux,
            self._emit,
            self._scope,
            objects=self._parts.local_objects if self._cluster is None else None,
        )
        if self._cluster is not None:
            self._mux.expect("api")
            self._cluster.start(self._scope)

    def _report_duplicate(self, pod: Pod, source: str) -> None:
        meta = pod.metadata
        self.book.event(
            pod,
            "Warning",
            "FailedValidation",
            f"Error validating pod {meta.name}_{meta.namespace}({meta.uid}) from {source} "
            f'due to duplicate pod name "{meta.name}", ignoring',
            keep=False,
        )

    @property
    def all_sources_reported(self) -> bool:
        """Whether all sources have reported their pods; nothing may be deleted before."""
        return self._mux.all_reported

    def wanted(self) -> Mapping[str, Pod]:
        """Return the desired pods, also those that were not dispatched yet."""
        return self._mux.pods()

    def is_desired(self, uid: str) -> bool:
        """Return whether some source has this pod, also one that was not dispatched yet."""
        return uid in self._mux

    @property
    def has_begun(self) -> bool:
        """Whether the desired pods are known and each has been dispatched."""
        return self.all_sources_reported and all(self.store.get(uid) for uid in self._mux.pods())

    # Queries of the API and the command line

    def pods(self) -> list[Pod]:
        """Return the desired and the terminating pods, each with its current status."""
        found = []
        leaving = [pod for pod in self.workers.pods() if self.store.get(pod.uid) is None]
        for pod in [*self.store.pods(), *leaving]:
            status = self.statuses.get(pod.uid)
            found.append(pod if status is None else Pod(metadata=pod.metadata, spec=pod.spec, status=status))
        return found

    def journal(self, uid: str) -> tuple[list[Event], list[TimelineEntry]]:
        """Return a pod's events and timeline."""
        return self.book.events(uid), self.book.timeline(uid)

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart the containers of a pod, or one, in place. Raises LookupError when none runs."""
        if self.store.get(uid) is None:
            raise LookupError(f"no pod with uid {uid}")
        names = self.life.request_restart(uid, container)
        if not names:
            raise LookupError(f"no container{f' {container}' if container else ''} of this pod runs")
        self.workers.wake(uid)
        return names

    def state(self, uid: str) -> str:
        """Return the state of the pod's worker."""
        worker = self.workers.get(uid)
        return worker.state.value if worker is not None else "gone"

    # Handlers of the main loop (podworkers.loop.Handlers)

    def pod_changed(self, change: PodChange) -> None:
        """Handle a change of the desired pods."""
        pod, reconcile = change.pod, change.op == "RECONCILE"
        log.v(4 if reconcile else 2).info(
            f"SyncLoop {change.op}", source=change.source, pod=pod.full_name, podUID=pod.uid
        )
        self.store.apply(change)
        if self._cluster is not None:
            if change.source == "api" and is_mirror_pod(pod):
                self._cluster.mirror_changed(pod)
                return
            self._cluster.pod_changed(pod)
        self._metrics.shown(change)
        if reconcile:
            self._reconcile(pod)
            return
        self.book.note(pod.uid, "source", f"{change.op} from {change.source}")
        if change.op == "REMOVE":
            self._remove(pod)
        elif (is_static_pod(pod) or self._shall_run(change)) and self._admitting.may_start(pod):
            self._start_pod(pod)

    def _start_pod(self, pod: Pod) -> None:
        self._housekeeping.end_namesakes(pod)
        worker = self.workers.get(pod.uid)
        if worker is None and is_static_pod(pod):
            pod = self._static_readiness.restore(pod)
        self._resizing.take(pod, worker.pod if worker is not None else None)
        self.workers.sync(pod)

    def _shall_run(self, change: PodChange) -> bool:
        """Return whether a pod of the API server is to be synced; terminate one that is being deleted."""
        pod = change.pod
        worker, status = self.workers.get(pod.uid), self.statuses.get(pod.uid)
        if pod.uid in self._departed:
            return False
        if pod.metadata.deletion_timestamp is not None:
            self.workers.end(pod, pod.metadata.deletion_grace_period_seconds)
            return False
        if worker is None:
            return status is None or status.phase not in TERMINAL
        if change.op == "UPDATE" and worker.state is not PodWorkerState.SYNCING:
            # It has terminated by itself; an update does not start it again.
            worker.know(pod)
            return False
        return True

    def _remove(self, pod: Pod) -> None:
        if pod.uid in self._departed:
            self._departed.remove(pod.uid)
            self.book.forget(pod.uid)
            return
        self.workers.end(pod)

    def _reconcile(self, pod: Pod) -> None:
        """Handle a changed pod status in the API server, which other components may have written."""
        worker = self.workers.get(pod.uid)
        before = worker.pod if worker is not None else None
        self.workers.know(pod)
        if before is not None and has_external_change(before, pod):
            self.workers.wake(pod.uid)

    def runtime_changed(self, change: PodLifecycleEvent) -> None:
        """Handle a runtime event, unless it is known already."""
        if self.life.take(change):
            self.workers.wake(change.uid)

    def probe_changed(self, uid: str) -> None:
        """Handle a new probe result."""
        worker = self.workers.get(uid)
        if worker is not None and worker.state is PodWorkerState.TERMINATING and worker.pod is not None:
            # Its worker is busy until everything has stopped; report the result now.
            self.life.probed(worker.pod)
        self.workers.wake(uid)

    async def housekeep(self) -> None:
        """Run housekeeping: orphaned pods in the runtime and on disk, and garbage collection."""
        if self.all_sources_reported:
            self._static_readiness.retain(self._mux.__contains__)
        self._housekeeping.keep()

    # What the pod syncer needs (podsync.syncer.PodSources)

    def fate_of(self, uid: str) -> Fate:
        """Return the fate of a terminated pod."""
        pod = self.store.get(uid)
        if pod is not None and self.workers.is_reborn(uid):
            # A pod that has terminated for good must leave nothing, or it would not run again.
            return "restarted" if always_restarts(pod) else "gone"
        if pod is None:
            return "gone"
        deleted = pod.metadata.deletion_timestamp is not None and not is_static_pod(pod)
        return "leaving" if deleted and self._cluster is not None else "wanted"

    def is_new(self, uid: str) -> bool:
        """Return whether the runtime certainly has nothing of this pod."""
        return self.pleg.never_saw(uid)

    def reject(self, pod: Pod, rejection: AdmitRejection) -> None:
        """Reject a pod that was admitted before."""
        self._admitting.refuse(pod, rejection)

    def on_terminated(self, uid: str) -> None:
        """Record that no container of a pod runs."""
        if self._cluster is not None:
            self._cluster.stopped(uid)

    async def complete_deletion(self, pod: Pod) -> None:
        """Wait until the API server has the pod's final status, and delete the pod there."""
        if self._cluster is not None:
            await self._cluster.told(pod.uid)
            await self._cluster.remove(pod)

    def on_removed(self, uid: str) -> None:
        """Drop the state of a pod that has left the node."""
        self.pleg.drop_snapshot(uid)
        self._metrics.pod_starts.gone(uid)
        self._images.forget_pod(uid)
        self._static_readiness.forget(uid)
        self._admitting.forget(uid)
        if self.fate_of(uid) == "leaving":
            self._departed.add(uid)
        if self._cluster is not None:
            self._cluster.gone(uid)

    def _runtime_errors(self) -> list[str]:
        """Return the reasons why no pod can be synced now; the running pods must be known first."""
        problem = self.pleg.health()
        return [*self._parts.runtime_errors(), *([problem] if problem else [])]

    def _emit(self, source: str, pods: Sequence[Pod], problems: Sequence[object]) -> None:
        self._hand_on(self._mux.set(source, pods))
        if source == "api" and self._cluster is not None:
            self.loop.after(self._cluster.pods_known)

    def _emit_update(self, source: str, update: StoreDelta[Pod], everything: Callable[[], list[Pod]]) -> None:
        self._hand_on(self._mux.update(source, update.changed, update.removed, everything))

    def _hand_on(self, changes: Sequence[PodChange]) -> None:
        for change in changes:
            self._admitting.mark(change.pod.uid)
        self.loop.pods(changes)

    def _pod_ip(self, uid: str) -> str:
        pod, observed = self.store.get(uid), self.life.observed(uid)
        if pod is not None and pod.spec.host_network:
            return next(iter(self._parts.host_ips), "")
        return next(iter(observed.ips), "") if observed else ""
