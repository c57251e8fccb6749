"""Composition root: builds every part of the kubelet and starts it.

`Kubelet.run` is the start-up from top to bottom; each step is logged. Everything that a step opens goes on
one exit stack, so stopping is the same list in reverse, and a failed start leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from pykubelet import KUBERNETES_VERSION, __version__
from pykubelet.agent.cluster import AgentSettings, Cluster, join_cluster
from pykubelet.agent.container_manager import (
    NodeDevices,
    claim_plugins,
    make_allotment,
    make_claims,
    start_allotment,
    start_claims,
)
from pykubelet.agent.host_setup import (
    StartupError,
    adjust_process,
    check_machine,
    find_id_space,
    open_books,
    prepare_cgroups,
    prepare_root,
    set_kernel_defaults,
    start_daemon_cgroups,
    start_util_chains,
    take_cgroup_driver,
    tell_kills,
)
from pykubelet.agent.servers import ServerDependencies, serving
from pykubelet.agent.volumes import make_volumes, start_plugins, start_volumes, volume_plugins
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.cm.cgroups.node_cgroups import no_record
from pykubelet.config.load import LoadedConfig
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.cri.runtime_pb2 import StatusResponse
from pykubelet.images.credential_provider import CredentialProvider, load_providers
from pykubelet.images.pull_manager import PullManager
from pykubelet.kuberuntime.dns import check_resolv_conf
from pykubelet.kuberuntime.gc import GarbageCollector, GcPolicy
from pykubelet.kuberuntime.options import RuntimeNodeOptions, gather_node_facts, recursive_handlers
from pykubelet.kuberuntime.paths import LEGACY_LOG_DIR
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
from pykubelet.node.settings import node_settings
from pykubelet.node.status_inputs import PodCidr
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podsync.resource_allocator import NO_CLAIMS, ResourceAllocator
from pykubelet.podworkers.engine import EngineDependencies, PodEngine, open_pull_manager
from pykubelet.podworkers.pod_admission import AdmissionParts
from pykubelet.podworkers.run_once import run_once
from pykubelet.podworkers.runtime_state import RuntimeState
from pykubelet.server.debug import configz_document
from pykubelet.server.metrics import KubeletInfo
from pykubelet.server.readonly import Check
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.usage import VolumeStatCalculator

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


class Kubelet:
    """One kubelet; several can run in one process."""

    def __init__(
        self,
        loaded: LoadedConfig,
        on_started: Callable[[], None] = lambda: None,
        *,
        tunes_kernel: bool = True,
    ) -> None:
        """Initialize with the settings; `tunes_kernel`: whether the kubelet sets up the host."""
        self.flags = loaded.flags
        self.config = loaded.config
        self.gates = loaded.gates
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._flag_values = loaded.flag_values
        self._started = datetime.now(UTC)
        self._on_started = on_started
        self._tunes_kernel = tunes_kernel
        self._stop = asyncio.Event()
        self._joining: asyncio.Timeout | None = None
        self.volume_usage: VolumeStatCalculator | None = None
        """Usage of pods' volumes; None before the engine runs."""

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
            identity = await self._identify()
            self.registry.register(KubeletInfo(identity.name, self.gates))
            check_machine(self.config)
            adjust_process(self.config)
            if self._tunes_kernel and not self.config.protect_kernel_defaults:
                set_kernel_defaults()
            cri = await self._connect_runtime(stack)
            await take_cgroup_driver(cri, self.config, self.gates)
            await PodCidr(cri.runtime.update_runtime_config).update([self.config.pod_cidr])
            if self._stop.is_set():
                return
            health = RuntimeHealth(cri.runtime.status)
            runtime_state = RuntimeState(health.status)
            # The capacity of the node is read from its disk when it joins.
            prepare_root(Path(self.flags.root_dir), stack)
            cluster = await self._join_cluster(stack, identity, cri, health, runtime_state)
            if self._stop.is_set():
                return
            devices = NodeDevices(
                Path(self.flags.root_dir), Path(self.flags.device_plugin_dir), self.gates, self.registry
            )
            # They outlive the engine: a pending Allocate must not become a rejection at the stop.
            await devices.serve(stack)
            tasks = await stack.enter_async_context(TaskScope())
            tasks.start(runtime_state.run(), name="runtime-state")
            tasks.start(identity.addresses.run(), name="host-addresses")
            start_util_chains(self.config, tasks)
            start_daemon_cgroups(self.config, tasks)
            try:
                engine = await self._start_engine(
                    stack, tasks, cri, identity, runtime_state, cluster, devices
                )
            except StartupError as err:
                if cluster is not None:
                    cluster.node_event("Warning", "KubeletSetupFailed", str(err))
                raise
            runtime_state.on_ready = engine.workers.wake_all
            identity.addresses.add_listener(engine.workers.wake_all)
            health.add_check("PLEG", engine.pleg.health)
            if cluster is not None:
                cluster.reporter.add_address_listener(identity.addresses.set_from_node_status)
                cluster.start(engine)
                tasks.start(tell_kills(cluster.node_event), name="oom-watch")
            checks: dict[str, Check] = {
                "ping": lambda: None,
                "log": log_health,
                "syncloop": engine.loop.health,
                "device-plugin": devices.manager.registration_problem,
            }
            await stack.enter_async_context(self._servers(identity, cri, engine, cluster, checks))
            notify.ready()
            if interval := notify.watchdog_interval():
                tasks.start(notify.feed_watchdog(interval, lambda: _first_reason(checks)), name="watchdog")
            log.info("Started kubelet", node=identity.name, pid=os.getpid())
            _spare_the_collector()
            self._on_started()
            if self.config.run_once:
                if problems := await run_once(engine.pods, lambda: engine.has_begun):
                    raise StartupError("; ".join(problems))
                return
            try:
                await self._stop.wait()
            finally:
                log.info("Stopping kubelet")
                notify.stopping()

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

    async def _join_cluster(
        self,
        stack: contextlib.AsyncExitStack,
        identity: NodeIdentity,
        cri: RuntimeConnection,
        health: RuntimeHealth,
        runtime_state: RuntimeState,
    ) -> Cluster | None:
        if self.flags.standalone:
            return None
        joining = join_cluster(
            self._settings(identity), self.registry, cri, health, runtime_state, self._started
        )
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

    def _settings(self, identity: NodeIdentity) -> AgentSettings:
        return AgentSettings(self.flags, self.config, self.gates, identity.name)

    async def _identify(self) -> NodeIdentity:
        name = hostname.node_name(self.flags.hostname_override)
        if ignored := addresses.parse_node_ip(self.flags.node_ip).ignored:
            log.warning("Could not parse some node IPs, ignoring them", ignored=list(ignored))
        settings = node_settings(self.flags, self.config, self.gates, name)
        identity = NodeIdentity(name, HostIPs(settings))
        await identity.addresses.discover()
        log.info("Node identity", nodeName=name, nodeIPs=identity.ips)
        return identity

    async def _connect_runtime(self, stack: contextlib.AsyncExitStack) -> RuntimeConnection:
        endpoint = self.config.container_runtime_endpoint
        image_endpoint = self.config.image_service_endpoint or endpoint
        log.info("Connecting to the container runtime", endpoint=endpoint, imageEndpoint=image_endpoint)
        cri = await connect(
            endpoint,
            image_endpoint,
            timeout=self.config.runtime_request_timeout,
            metrics=CriMetrics(self.registry),
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

    async def _start_engine(
        self,
        stack: contextlib.AsyncExitStack,
        tasks: TaskScope,
        cri: RuntimeConnection,
        identity: NodeIdentity,
        runtime_state: RuntimeState,
        cluster: Cluster | None,
        devices: NodeDevices,
    ) -> PodEngine:
        root, found = Path(self.flags.root_dir), cgroups.detect_cgroups()
        record = cluster.node_event if cluster is not None else no_record
        pod_cgroups = await prepare_cgroups(self.config, self.gates, root, self.registry, record)
        node = gather_node_facts(
            self.config,
            self.gates,
            root,
            identity.ips,
            cgroup_v2=found.unified,
            ignore_eviction=self.flags.experimental_allocatable_ignore_eviction,
        )
        local_objects = LocalObjects()
        settings = self._settings(identity)
        allotment = make_allotment(settings, self.registry, devices.manager)
        if self.gates.enabled("DisableCPUQuotaWithExclusiveCPUs"):
            pod_cgroups.leave_unbound(allotment.has_exclusive)
        volumes = await make_volumes(settings, cri, node, local_objects, cluster, tasks, self.registry)
        claims = devices.claims = make_claims(settings, self.registry, cluster, tasks)
        runtime = await cri.runtime.status()
        node = dataclasses.replace(node, recursive_handlers=recursive_handlers(runtime))
        parts = EngineDependencies(
            config=self.config,
            node_name=identity.name,
            host_ips=identity.ips,
            cri=cri,
            node=node,
            root_dir=root,
            credential_providers=self._credential_providers(),
            credential_provider_dir=Path(self.flags.image_credential_provider_bin_dir),
            pull_manager=await self._pull_manager(cri, tasks, root),
            volumes=volumes,
            cgroups=pod_cgroups,
            registry=self.registry,
            runtime_errors=runtime_state.errors,
            network_errors=runtime_state.network_errors,
            collector=self._collector(cri),
            node_event=record,
            legacy_logs=self._legacy_logs(),
            id_space=find_id_space(self.config),
            user_namespaces=_has_user_namespaces(runtime),
            admission=dataclasses.replace(
                self._admission(identity, node, runtime, cluster, allotment),
                devices=devices.manager.allocatable_for,
            ),
            allotment=allotment,
            devices=devices.side,
            claims=claims or NO_CLAIMS,
            books=open_books(root),
            local_objects=local_objects,
            cluster=cluster.parts() if cluster is not None else None,
        )
        if self.config.resolv_conf:
            problem = check_resolv_conf(Path(self.config.resolv_conf), self.config.cluster_domain)
            if problem:
                log.warning("Host resolv.conf failed the limits check", problem=problem)
                record("Warning", "CheckLimitsForResolvConf", problem)
        engine = PodEngine(parts, tasks)
        self.volume_usage = start_volumes(volumes, settings, engine, cluster, tasks, self.registry)
        start_allotment(allotment, settings, cri, engine, tasks)
        devices.know(engine, cluster)
        if claims is not None:
            start_claims(claims, cri, engine, devices.active, tasks)
        rooms = (volume_plugins(volumes), devices.handlers, claim_plugins(claims))
        start_plugins(root, self.registry, tasks, *rooms)
        await devices.answer(stack, self.registry, allotment)
        engine.start()
        return engine

    def _admission(
        self,
        identity: NodeIdentity,
        node: RuntimeNodeOptions,
        runtime: StatusResponse,
        cluster: Cluster | None,
        allotment: ResourceAllocator,
    ) -> AdmissionParts:
        settings = node_settings(self.flags, self.config, self.gates, identity.name)
        own = own_node(settings, architecture(), node.allocatable, runtime)
        parts = AdmissionParts(
            own=own,
            gates=self.gates,
            allowed_sysctls=self.config.allowed_unsafe_sysctls,
            allocation=allotment,
            released=allotment.forget,
        )
        if cluster is None:
            return parts
        return dataclasses.replace(parts, known=cluster.node, fetch=cluster.fetch_node)

    def _servers(
        self,
        identity: NodeIdentity,
        cri: RuntimeConnection,
        engine: PodEngine,
        cluster: Cluster | None,
        checks: dict[str, Check],
    ) -> contextlib.AbstractAsyncContextManager[None]:
        parts = ServerDependencies(
            settings=self._settings(identity),
            ips=identity.ips,
            flag_values=self._flag_values,
            started=self._started,
            registry=self.registry,
            cri=cri,
            engine=engine,
            cluster=cluster,
            checks=checks,
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

    def _credential_providers(self) -> list[CredentialProvider]:
        config, folder = (
            self.flags.image_credential_provider_config,
            self.flags.image_credential_provider_bin_dir,
        )
        return load_providers(Path(config), Path(folder)) if config else []

    async def _pull_manager(self, cri: RuntimeConnection, tasks: TaskScope, root: Path) -> PullManager | None:
        try:
            return await open_pull_manager(cri, self.config, self.gates, tasks, self.registry, root)
        except OSError as err:
            raise StartupError(
                f"cannot use the records of pulled images in {root / 'image_manager'}: {err}; "
                "make the directory readable and writable for the kubelet"
            ) from err

    def _legacy_logs(self) -> Path | None:
        """Directory of links to container logs; None when the pod logs are not in the host's directory."""
        logs = Path(self.config.pod_logs_dir)
        return Path(LEGACY_LOG_DIR) if logs == Path("/var/log/pods") else logs.parent / "containers"


def _has_user_namespaces(runtime: StatusResponse) -> bool:
    """Return whether the runtime's default handler supports user namespaces."""
    return any(one.features.user_namespaces for one in runtime.runtime_handlers if not one.name)


def _spare_the_collector() -> None:
    """Exclude the objects of the start from Python's garbage collection, and collect the rest less often.

    Reference counting frees nearly everything, so a collection finds little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _first_reason(checks: dict[str, Check]) -> str | None:
    return next((reason for check in checks.values() if (reason := check()) is not None), None)
