"""Composition root: builds every part of the kubelet and starts it.

`Kubelet.run` is the start-up from top to bottom; each step is logged. Everything that a step opens goes on
one exit stack, so stopping is the same list in reverse, and a failed start leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from pykubelet import KUBERNETES_VERSION, __version__
from pykubelet.agent.cluster import AgentSettings, Cluster, build_node_reporter, join_cluster
from pykubelet.agent.container_manager import (
    NodeDevices,
    build_dra_manager,
    build_resource_allocator,
    dra_plugin_handlers,
    start_dra_manager,
    start_resource_allocator,
)
from pykubelet.agent.eviction import build_eviction, node_pressure, pressure_admission
from pykubelet.agent.host_setup import (
    StartupError,
    adjust_process,
    check_machine,
    find_id_space,
    prepare_cgroups,
    prepare_root,
    read_allocation_state,
    set_kernel_defaults,
    start_daemon_cgroups,
    start_util_chains,
    take_cgroup_driver,
)
from pykubelet.agent.images import build_archive_directory, build_image_gc, build_image_manager
from pykubelet.agent.live_config import ConfigReloader, ReloadMetrics, ReloadTrigger
from pykubelet.agent.live_consumers import LiveComponents, build_consumers, rotation_policy
from pykubelet.agent.oom_kills import build_oom_watcher
from pykubelet.agent.pod_engine import NodeResources, NodeRuntime, build_pod_engine
from pykubelet.agent.servers import HostProblem, ServerDependencies, serve_pods_api, serving
from pykubelet.agent.shutdown import NodeShutdown, build_shutdown
from pykubelet.agent.stats import NodeStatistics, build_statistics
from pykubelet.agent.tracing import tracing
from pykubelet.agent.volumes import (
    VolumeNode,
    build_volume_usage,
    build_volumes,
    start_plugins,
    start_volumes,
    volume_plugins,
)
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.cm.capacity import node_capacity
from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.config.load import LoadedConfig
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.eviction.admission import PressureConditions
from pykubelet.eviction.manager import EvictionManager, NodeReclaim
from pykubelet.images.archive_directory import ArchiveDirectory
from pykubelet.images.image_gc import ImageGC
from pykubelet.images.image_manager import ImageManager
from pykubelet.kuberuntime.configuration.dns import check_resolv_conf
from pykubelet.kuberuntime.configuration.options import gather_node_options
from pykubelet.kuberuntime.configuration.user_namespaces import UserNamespaces
from pykubelet.kuberuntime.gc import GarbageCollector, GcPolicy
from pykubelet.kuberuntime.log_rotation.manager import ContainerLogManager
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.kuberuntime.paths import LEGACY_LOG_DIR, PodDirs
from pykubelet.kuberuntime.runtime_features import RuntimeFeatures
from pykubelet.linux import HostError
from pykubelet.linux import cgroupfs as cgroups
from pykubelet.linux import lock_file as lockfile
from pykubelet.linux import network as addresses
from pykubelet.linux import network as hostname
from pykubelet.linux import systemd as notify
from pykubelet.linux.host_info import architecture
from pykubelet.logs import get_logger
from pykubelet.logs.setup import log_health
from pykubelet.node.addresses import HostIPs
from pykubelet.node.conditions import RuntimeHealth
from pykubelet.node.informer import own_node
from pykubelet.node.registration import NodeStartup
from pykubelet.node.reporter import NodeReporter
from pykubelet.node.settings import node_settings
from pykubelet.node.shutdown_state import FinalStatuses, NodeShutdownState, ShutdownAdmission
from pykubelet.node.status_inputs import PodCidr, node_sources
from pykubelet.podconfig.event_log import EventLog
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podsync.resource_allocator import NO_CLAIMS, ResourceAllocator
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.pod_admission import AdmissionNode
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.run_once import run_once
from pykubelet.podworkers.runtime_state import RuntimeState
from pykubelet.podworkers.workers import PodChurn
from pykubelet.server.debug import configz_document
from pykubelet.server.metrics.server_metrics import KubeletInfo
from pykubelet.server.readonly import Check
from pykubelet.tracing.span import Tracer
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.usage import VolumeStatCalculator

if TYPE_CHECKING:
    from pykubelet.cm.dra.manager import DraManager

log = get_logger(__name__)
_YOUNG_OBJECTS = 10_000
"""New objects after which Python's garbage collector runs."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Name and addresses of this node."""

    name: str
    addresses: HostIPs

    @property
    def ips(self) -> list[str]:
        """One address, or one per family; empty while the host has no network."""
        return self.addresses.ips


@dataclass(frozen=True, slots=True)
class _Host:
    """The prepared host, before the node joins a cluster."""

    settings: AgentSettings
    identity: NodeIdentity
    cri: RuntimeConnection
    features: RuntimeFeatures
    health: RuntimeHealth
    runtime_state: RuntimeState
    churn: PodChurn
    pressure: PressureConditions
    shutdown: NodeShutdownState


@dataclass(frozen=True, slots=True)
class _Node:
    """Every part of the node, built and not started."""

    host: _Host
    cluster: Cluster | None
    reporter: NodeReporter | None
    devices: NodeDevices
    allocator: ResourceAllocator
    volumes: PodVolumes
    volume_usage: VolumeStatCalculator
    claims: DraManager | None
    images: ImageManager
    archives: ArchiveDirectory | None
    image_gc: ImageGC
    engine: PodEngine
    start_engine: Callable[[], None]
    statistics: NodeStatistics
    start_statistics: Callable[[], None]
    start_oom_watcher: Callable[[], None]
    eviction: EvictionManager
    shutdown: NodeShutdown
    log_manager: ContainerLogManager
    log_readers: LogReaders
    reloader: ConfigReloader


class Kubelet:
    """One kubelet; several can run in one process."""

    def __init__(
        self,
        loaded: LoadedConfig,
        on_started: Callable[[], None] = lambda: None,
        *,
        tunes_kernel: bool = True,
        reload_trigger: ReloadTrigger | None = None,
        default_page_port: int = 0,
        host_problems: Callable[[], Sequence[HostProblem]] = list,
    ) -> None:
        """Initialize with the settings; `tunes_kernel`: whether the kubelet sets up the host.

        `reload_trigger` requests a reload of the configuration. `default_page_port` is the port of the page
        without `--page-port`, 0 for none; if it is taken, the kubelet starts without the page.
        `host_problems` returns what is wrong with the host, for the page; it may block.
        """
        self._loaded = loaded
        # The start sets the cgroup driver that the runtime reports; a reload compares the files.
        self._as_loaded = copy.deepcopy(loaded.config)
        self._reload_trigger = reload_trigger or ReloadTrigger()
        self.flags = loaded.flags
        self.config = loaded.config
        self.gates = loaded.gates
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._flag_values = loaded.flag_values
        self._started = datetime.now(UTC)
        self._on_started = on_started
        self._tunes_kernel = tunes_kernel
        self._default_page_port = default_page_port
        self._host_problems = host_problems
        self._stop = asyncio.Event()
        self._joining: asyncio.Timeout | None = None
        self._events = EventLog()

    def stop(self) -> None:
        """Request the end of `run`; safe to call at any time and more than once."""
        self._stop.set()
        if self._joining is not None:
            self._joining.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Start everything, wait until stopped, and stop everything in reverse order."""
        log.info("Kubelet version", kubeletVersion=f"{KUBERNETES_VERSION}+pykubelet{__version__}")
        async with contextlib.AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(TaskScope())
            await self._take_lock(stack, tasks)
            log.v(5).info(
                "KubeletConfiguration", configuration=configz_document(self.config)["kubeletconfig"]
            )
            if self.flags.standalone:
                log.info("Standalone mode, no API client")
            tracer = await stack.enter_async_context(tracing(self.config, self._node_name()))
            host = await self._prepare_host(stack, tracer)
            if self._stop.is_set():
                return
            cluster = await self._join_cluster(stack, host)
            if self._stop.is_set():
                return
            devices = NodeDevices(
                Path(self.flags.root_dir), Path(self.flags.device_plugin_dir), self.gates, self.registry
            )
            # They outlive the engine: a pending Allocate must not become a rejection at the stop.
            await devices.serve(stack)
            tasks = await stack.enter_async_context(TaskScope())
            try:
                node = await self._build(host, cluster, devices, tasks)
                checks = await self._start(node, stack, tasks)
            except StartupError as err:
                if cluster is not None:
                    cluster.node_event("Warning", "KubeletSetupFailed", str(err))
                raise
            await stack.enter_async_context(self._servers(node, checks))
            tasks.start(node.reloader.run(self._reload_trigger), name="live-config")
            notify.ready()
            if interval := notify.watchdog_interval():
                tasks.start(notify.feed_watchdog(interval, lambda: _first_reason(checks)), name="watchdog")
            log.info("Started kubelet", node=host.identity.name, pid=os.getpid())
            _spare_the_collector()
            self._on_started()
            if self.config.run_once:
                if problems := await run_once(node.engine.pods, lambda: node.engine.records.all_dispatched):
                    raise StartupError("; ".join(problems))
                return
            try:
                await self._wait_stopped(node.shutdown)
            finally:
                log.info("Stopping kubelet")
                notify.stopping()

    async def _wait_stopped(self, shutdown: NodeShutdown) -> None:
        """Wait until the kubelet is stopped; after a signal terminate all pods, if that is configured."""
        try:
            await self._stop.wait()
        except asyncio.CancelledError as err:
            # A signal has a message (`cli.process`); the failure of a component cancels without one.
            manager = shutdown.manager
            if err.args and self.flags.drain_on_stop and manager is not None:
                log.info("Terminating all pods before the kubelet stops", seconds=manager.stop_seconds)
                notify.extend_timeout(manager.stop_seconds)
                await manager.drain_for_stop()
            raise

    async def _prepare_host(self, stack: contextlib.AsyncExitStack, tracer: Tracer | None) -> _Host:
        """Check and set up the host, and connect to the runtime."""
        identity = await self._identify()
        self.registry.register(KubeletInfo(identity.name, self.gates))
        check_machine(self.config)
        adjust_process(self.config)
        if self._tunes_kernel and not self.config.protect_kernel_defaults:
            set_kernel_defaults(self.gates)
        cri = await self._connect_runtime(stack, tracer)
        await take_cgroup_driver(cri, self.config, self.gates)
        await PodCidr(cri.runtime.update_runtime_config).update([self.config.pod_cidr])
        if not self._stop.is_set():
            # The capacity of the node is read from its disk when it joins.
            prepare_root(Path(self.flags.root_dir), stack)
        features = RuntimeFeatures(cri)
        health = RuntimeHealth(features.status)
        settings = AgentSettings(self.flags, self.config, self.gates, identity.name, tracer)
        return _Host(
            settings,
            identity,
            cri,
            features,
            health,
            RuntimeState(health.status),
            PodChurn(),
            PressureConditions(),
            NodeShutdownState(),
        )

    async def _take_lock(self, stack: contextlib.AsyncExitStack, tasks: TaskScope) -> None:
        path = self.flags.lock_file
        if not path:
            return
        log.info("Acquiring file lock", path=path)
        lock = lockfile.LockFile(Path(path), watched=self.flags.exit_on_lock_contention)
        await stack.enter_async_context(lock)
        if self.flags.exit_on_lock_contention:
            log.info("Watching for inotify events", path=path)
            tasks.start(self._stop_on_contention(lock), name="lock-contention")

    async def _stop_on_contention(self, lock: lockfile.LockFile) -> None:
        reason = await lock.wait_for_contention()
        log.info(
            "Lock file was accessed by another process, stopping", path=self.flags.lock_file, event=reason
        )
        self.stop()

    async def _join_cluster(self, stack: contextlib.AsyncExitStack, host: _Host) -> Cluster | None:
        if self.flags.standalone:
            return None
        joining = join_cluster(host.settings, self.registry, host.churn)
        try:
            # A TLS bootstrap waits for the approval of its certificate signing request.
            async with asyncio.timeout(None) as self._joining:
                return await stack.enter_async_context(joining)
        except TimeoutError:
            if not self._stop.is_set():
                raise
            return None
        except (KubeconfigError, HostError, OSError) as err:
            raise StartupError(f"cannot join the cluster: {err}") from err
        finally:
            self._joining = None

    def _node_name(self) -> str:
        return hostname.node_name(self.flags.hostname_override)

    async def _identify(self) -> NodeIdentity:
        name = self._node_name()
        if ignored := addresses.parse_node_ip(self.flags.node_ip).ignored:
            log.warning("Could not parse some node IPs, ignoring them", ignored=list(ignored))
        settings = node_settings(self.flags, self.config, self.gates, name)
        identity = NodeIdentity(name, HostIPs(settings))
        await identity.addresses.discover()
        log.info("Node identity", nodeName=name, nodeIPs=identity.ips)
        return identity

    async def _connect_runtime(
        self, stack: contextlib.AsyncExitStack, tracer: Tracer | None
    ) -> RuntimeConnection:
        endpoint = self.config.container_runtime_endpoint
        image_endpoint = self.config.image_service_endpoint or endpoint
        log.info("Connecting to the container runtime", endpoint=endpoint, imageEndpoint=image_endpoint)
        cri = await connect(
            endpoint,
            image_endpoint,
            timeout=self.config.runtime_request_timeout,
            metrics=CriMetrics(self.registry),
            tracer=tracer,
            stream_lists=self.gates.enabled("CRIListStreaming"),
        )
        stack.push_async_callback(cri.close)
        version = cri.version
        log.info(
            "Container runtime initialized",
            containerRuntime=version.runtime_name,
            version=version.runtime_version,
            apiVersion=version.runtime_api_version,
        )
        return cri

    # First everything is built, …

    async def _build(
        self, host: _Host, cluster: Cluster | None, devices: NodeDevices, tasks: TaskScope
    ) -> _Node:
        """Build every part of the node; only the image manager reads its records already."""
        settings, cri, features, root = host.settings, host.cri, host.features, Path(self.flags.root_dir)
        record = self._record(cluster)
        allocator = build_resource_allocator(settings, self.registry, devices.manager)
        unlimited = self.gates.enabled("DisableCPUQuotaWithExclusiveCPUs")
        pod_cgroups = await prepare_cgroups(
            self.config,
            self.gates,
            root,
            self.registry,
            allocator.has_exclusive if unlimited else lambda uid: False,
            record,
        )
        # Known when the loop starts, which would wait for the first poll otherwise.
        await host.runtime_state.refresh()
        runtime = await features.status()
        features.log_missing()
        options = dataclasses.replace(
            gather_node_options(
                self.config,
                self.gates,
                root,
                host.identity.ips,
                cgroup_v2=cgroups.detect_cgroups().unified,
                ignore_eviction=self.flags.experimental_allocatable_ignore_eviction,
            ),
            recursive_handlers=features.recursive_handlers,
        )
        local_objects = LocalObjects()
        final_statuses = FinalStatuses(root)
        records = PodRecords.create(final_statuses)
        records.history.add_listener(self._events.pod_event)
        volume_node = VolumeNode(options)
        if cluster is not None:
            cluster.add_pod_event_listener(records.history.event)
        volumes = await build_volumes(
            settings,
            features,
            volume_node,
            local_objects,
            cluster,
            records.history.event,
            lambda uid: engine.workers.pod(uid),
            tasks,
            self.registry,
        )
        claims = build_dra_manager(settings, self.registry, cluster, tasks)
        archives = build_archive_directory(settings, cri)
        images = await build_image_manager(
            settings,
            cri,
            records.history,
            cluster.accounts if cluster is not None else None,
            self.registry,
            tasks,
            archives,
        )
        own = own_node(
            node_settings(self.flags, self.config, self.gates, settings.node_name),
            architecture(),
            options.allocatable,
            runtime,
        )
        engine, start_engine, engine_settings = build_pod_engine(
            settings,
            NodeRuntime(
                cri=cri,
                options=options,
                state=host.runtime_state,
                images=images,
                collector=self._collector(cri),
                host_ips=host.identity.ips,
                legacy_logs=self._legacy_logs(),
            ),
            NodeResources(
                cgroups=pod_cgroups,
                volumes=volumes,
                user_namespaces=UserNamespaces(
                    PodDirs(root), find_id_space(self.config), supported=features.has_user_namespaces
                ),
                allocator=allocator,
                allocation_state=read_allocation_state(root),
                devices=devices.provider(claims),
                claims=claims or NO_CLAIMS,
            ),
            records,
            host.churn,
            AdmissionNode(
                own=own,
                known=cluster.node if cluster is not None else lambda: None,
                fetch=cluster.fetch_node if cluster is not None else None,
                gates=self.gates,
                allowed_sysctls=self.config.allowed_unsafe_sysctls,
                devices=devices.manager.allocatable_for,
                pressure=pressure_admission(host.pressure, settings),
                allocation=allocator,
                released=allocator.forget,
                shutdown=ShutdownAdmission(host.shutdown),
            ),
            cluster.access() if cluster is not None else None,
            local_objects,
            self.registry,
            tasks,
        )
        volumes.add_listener(engine.workers.wake)
        volume_usage = build_volume_usage(volumes, settings, engine, self.registry)
        statistics, start_statistics = build_statistics(
            settings,
            cri,
            pod_cgroups,
            engine,
            volume_usage,
            volumes.metrics,
            tasks,
            self.registry,
            started=self._started.timestamp(),
        )
        image_gc = build_image_gc(settings, cri, images, statistics.host_filesystems, record, self.registry)
        reporter = self._build_reporter(host, cluster, devices, volumes) if cluster is not None else None
        log_readers = LogReaders(may_hold=lambda: not host.pressure.has("DiskPressure"))
        log_manager = self._log_manager(cri, engine, log_readers)
        eviction = build_eviction(
            settings,
            host.pressure,
            statistics,
            engine,
            next(iter(pod_cgroups.tree_paths()), ""),
            NodeReclaim(engine.delete_all_unused_containers, image_gc.delete_unused_images),
            record,
            self.registry,
        )
        reloader = ConfigReloader(
            self._loaded, self._as_loaded, record=record, metrics=ReloadMetrics(self.registry)
        )
        reloader.register(
            *build_consumers(
                LiveComponents(
                    settings=settings,
                    options=options,
                    capacity=node_capacity(self.config, root),
                    engine=engine_settings,
                    cgroups=pod_cgroups,
                    volume_node=volume_node,
                    images=images,
                    image_gc=image_gc,
                    eviction=eviction,
                    log_manager=log_manager,
                    tasks=tasks,
                    cluster=cluster,
                    reporter=reporter,
                )
            )
        )
        return _Node(
            host=host,
            cluster=cluster,
            reporter=reporter,
            devices=devices,
            allocator=allocator,
            volumes=volumes,
            volume_usage=volume_usage,
            claims=claims,
            images=images,
            archives=archives,
            image_gc=image_gc,
            eviction=eviction,
            shutdown=build_shutdown(
                settings,
                host.shutdown,
                final_statuses,
                engine,
                lambda uid: bool(volumes.records_for_pod(uid)),
                record,
                self.registry,
                tasks,
            ),
            engine=engine,
            start_engine=start_engine,
            statistics=statistics,
            start_statistics=start_statistics,
            start_oom_watcher=build_oom_watcher(
                settings, cri, pod_cgroups, engine, statistics.collector, record, tasks
            ),
            log_manager=log_manager,
            log_readers=log_readers,
            reloader=reloader,
        )

    def _record(self, cluster: Cluster | None) -> Record:
        """Return the recorder of node events, which are sent to the API server, if there is one."""
        return self._events.recording(cluster.node_event if cluster is not None else no_record)

    def _build_reporter(
        self, host: _Host, cluster: Cluster, devices: NodeDevices, volumes: PodVolumes
    ) -> NodeReporter:
        try:
            sources = node_sources(host.cri, self.flags, self.config, host.health, host.runtime_state.refresh)
        except (HostError, OSError) as err:
            raise StartupError(f"cannot join the cluster: {err}") from err
        reporter = build_node_reporter(
            cluster,
            host.settings,
            dataclasses.replace(
                sources,
                devices=devices.capacity,
                pressures=partial(node_pressure, host.pressure),
                problems=host.shutdown.problems,
            ),
            volumes,
            NodeStartup(self.registry, started=self._started.timestamp()),
        )
        host.pressure.add_listener(cluster.request_node_status)
        host.shutdown.add_listener(cluster.request_node_status)
        reporter.add_address_listener(host.identity.addresses.set_from_node_status)
        return reporter

    # … then everything is started.

    async def _start(
        self, node: _Node, stack: contextlib.AsyncExitStack, tasks: TaskScope
    ) -> dict[str, Check]:
        """Start every part of the node, and return its health checks."""
        host, engine, cluster, devices = node.host, node.engine, node.cluster, node.devices
        record = self._record(cluster)
        self._warn_of_resolv_conf(record)
        tasks.start(host.runtime_state.run(), name="runtime-state")
        tasks.start(host.identity.addresses.run(), name="host-addresses")
        start_util_chains(self.config, tasks)
        start_daemon_cgroups(self.config, tasks)
        start_volumes(node.volumes, node.volume_usage, tasks)
        start_resource_allocator(node.allocator, host.settings, host.cri, engine, tasks)
        devices.start(engine, cluster)
        if node.claims is not None:
            start_dra_manager(node.claims, host.features, engine, devices.active, tasks)
        handlers = (volume_plugins(node.volumes), devices.handlers, dra_plugin_handlers(node.claims))
        start_plugins(Path(self.flags.root_dir), self.registry, tasks, *handlers)
        await devices.serve_pod_resources(stack, self.registry, node.allocator, node.claims)
        await serve_pods_api(stack, host.settings, self.registry, engine)
        if node.archives is not None:
            tasks.start(node.archives.run(), name="image-archives")
        node.start_engine()
        tasks.start(node.log_manager.run(), name="container-logs")
        host.runtime_state.add_listener(engine.workers.wake_all)
        host.identity.addresses.add_listener(engine.workers.wake_all)
        host.health.add_check("PLEG", engine.pleg.health)
        if cluster is not None and node.reporter is not None:
            engine.history.add_listener(cluster.recorder.pod_event)
            tasks.start(cluster.services.run(), name="services")
            tasks.start(node.reporter.run(), name="node")
        node.start_statistics()
        tasks.start(node.image_gc.run(), name="image-gc")
        tasks.start(node.eviction.run(), name="eviction")
        node.shutdown.start(tasks)
        node.start_oom_watcher()
        return {
            "ping": lambda: None,
            "log": log_health,
            "syncloop": engine.loop.health,
            "device-plugin": devices.manager.registration_problem,
        }

    def _warn_of_resolv_conf(self, record: Record) -> None:
        if not self.config.resolv_conf:
            return
        problem = check_resolv_conf(Path(self.config.resolv_conf), self.config.cluster_domain)
        if problem:
            log.warning("Host resolv.conf failed the limits check", problem=problem)
            record("Warning", "CheckLimitsForResolvConf", problem)

    def _servers(self, node: _Node, checks: dict[str, Check]) -> contextlib.AbstractAsyncContextManager[None]:
        parts = ServerDependencies(
            settings=node.host.settings,
            ips=node.host.identity.ips,
            flag_values=self._flag_values,
            started=self._started,
            registry=self.registry,
            cri=node.host.cri,
            engine=node.engine,
            cluster=node.cluster,
            checks=checks,
            runtime_checks={
                "container runtime": lambda: "; ".join(node.host.runtime_state.errors()) or None,
                "pod network": lambda: "; ".join(node.host.runtime_state.network_errors()) or None,
                "PLEG": node.engine.pleg.health,
            },
            statistics=node.statistics,
            eviction=node.eviction,
            log_readers=node.log_readers,
            reloader=node.reloader,
            events=self._events,
            images=node.images,
            image_gc=node.image_gc,
            default_page_port=self._default_page_port,
            host_problems=self._host_problems,
        )
        return serving(parts)

    def _collector(self, cri: RuntimeConnection) -> GarbageCollector:
        flags = self.flags
        policy = GcPolicy(
            min_age=flags.minimum_container_ttl_duration,
            max_per_container=flags.maximum_dead_containers_per_container,
            max_containers=flags.maximum_dead_containers,
        )
        return GarbageCollector(cri, self.config.pod_logs_dir, self._legacy_logs(), policy)

    def _log_manager(
        self, cri: RuntimeConnection, engine: PodEngine, readers: LogReaders
    ) -> ContainerLogManager:
        config = self.config
        return ContainerLogManager(
            cri.runtime.reopen_container_log,
            lambda: (observed for _, observed in engine.observed_pods()),
            config.pod_logs_dir,
            rotation_policy(config),
            readers,
            workers=config.container_log_max_workers,
            interval=config.container_log_monitor_interval.seconds,
            version=lambda: engine.observed_version,
        )

    def _legacy_logs(self) -> Path | None:
        """Directory of links to container logs; None when the pod logs are not in the host's directory."""
        logs = Path(self.config.pod_logs_dir)
        return Path(LEGACY_LOG_DIR) if logs == Path("/var/log/pods") else logs.parent / "containers"


def _spare_the_collector() -> None:
    """Exclude the objects of the start from Python's garbage collection, and collect the rest less often.

    Reference counting frees nearly everything, so a collection finds little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _first_reason(checks: dict[str, Check]) -> str | None:
    return next((reason for check in checks.values() if (reason := check()) is not None), None)
