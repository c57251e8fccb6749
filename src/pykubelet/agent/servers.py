"""Builds and starts the servers: authenticated API, read-only port, control socket, health, pods API."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet import __version__
from pykubelet.agent.cluster import AgentSettings, Cluster
from pykubelet.agent.host_setup import StartupError
from pykubelet.agent.live_config import Apply, ConfigReloader, Consumer, ReloadError
from pykubelet.agent.stats import NodeStatistics
from pykubelet.apiserver.certificates.key_generation import KeyGenerationError
from pykubelet.apiserver.certificates.serving import (
    CertificateFiles,
    RequestedCertificate,
    ServingCertificate,
    SwitchableCertificate,
    self_signed_certificate,
)
from pykubelet.apiserver.certificates.store import StoreError
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.eviction.manager import EvictionManager
from pykubelet.images.image_gc import ImageGC
from pykubelet.images.image_manager import ImageManager
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.logs import get_logger
from pykubelet.logs.setup import log_file
from pykubelet.podconfig.event_log import EventLog
from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.static_sources import served_kinds, validation_options
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.workers import PodWorkerState
from pykubelet.server.api import (
    ApiServerDependencies,
    AuthDependencies,
    DebugDependencies,
    PodDependencies,
    api_server,
)
from pykubelet.server.auth.request_auth import AuthConfigError
from pykubelet.server.images import image_routes
from pykubelet.server.listeners import http_server, unix_server
from pykubelet.server.manifests import ManifestDirectory, control_routes, pressure_routes, reload_routes
from pykubelet.server.metrics.server_metrics import ProviderMetric, ServerMetrics, metrics_routes
from pykubelet.server.metrics.stats_metrics import (
    MAX_SCRAPES_PER_USER,
    ScrapeLimit,
    cadvisor_routes,
    resource_routes,
)
from pykubelet.server.node_info import NodeInfo, write_node_info
from pykubelet.server.node_routes import configz_routes, event_routes, node_routes
from pykubelet.server.pipeline import counting_middleware, tracing_middleware
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.server.podsapi.metrics import PodWatchMetrics
from pykubelet.server.readonly import (
    Check,
    health_port_routes,
    health_routes,
    own_hosts_only,
    read_only_routes,
    spec_routes,
)
from pykubelet.server.stats import memory_curve_routes, summary_routes
from pykubelet.server.tls import OpensslMissing, ServingTls, TlsProblem, TlsSettings, server_context
from pykubelet.util.tasks import RenderTurns, TaskScope, finish_in_thread

log = get_logger(__name__)


class HostProblem(Protocol):
    """A finding of `doctor` about the host."""

    @property
    def area(self) -> str:
        """Part of the host."""

    @property
    def what(self) -> str:
        """What is wrong."""

    @property
    def remedy(self) -> str:
        """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDependencies:
    """Dependencies of the servers."""

    settings: AgentSettings
    ips: Sequence[str]
    flag_values: Mapping[str, str]
    started: datetime
    registry: CollectorRegistry
    cri: RuntimeConnection
    engine: PodEngine
    cluster: Cluster | None
    checks: Mapping[str, Check]
    runtime_checks: Mapping[str, Check]
    """Checks of the runtime, its network and its relists, for the page. As upstream, `/healthz` does not run
    them, because a restart of the kubelet does not repair the runtime."""
    statistics: NodeStatistics
    eviction: EvictionManager
    log_readers: LogReaders
    reloader: ConfigReloader
    events: EventLog
    images: ImageManager
    image_gc: ImageGC
    default_page_port: int = 0
    """Port of the page without `--page-port`; that it is taken is only logged."""
    host_problems: Callable[[], Sequence[HostProblem]] = list
    """Returns what is wrong with the host, for the page; blocks."""


async def serve_pods_api(
    stack: contextlib.AsyncExitStack, settings: AgentSettings, registry: CollectorRegistry, engine: PodEngine
) -> None:
    """Serve the pods API until the stack exits, if its feature gate is on. Raises StartupError.

    Called before the engine starts, so that no event is missed.
    """
    metrics = PodWatchMetrics(registry)
    if not settings.gates.enabled("PodsAPI"):
        return
    # The messages of all types of a pod cost memory, which only this API needs.
    from pykubelet.server.podsapi.server import DIRECTORY_NAME, PodsServer, serving_pods
    from pykubelet.server.podsapi.watch import PodWatch

    def is_terminated(uid: str) -> bool:
        worker = engine.workers.get(uid)
        return worker is not None and worker.state not in (
            PodWorkerState.SYNCING,
            PodWorkerState.TERMINATING,
        )

    watch = PodWatch(engine.store, engine.statuses, is_terminated, metrics)
    engine.store.add_listener(watch.handle_pod)
    engine.statuses.add_listener(watch.handle_status)
    engine.workers.add_listener(watch.handle_worker)
    server = PodsServer(engine.store, engine.statuses, watch)
    try:
        await stack.enter_async_context(serving_pods(Path(settings.flags.root_dir) / DIRECTORY_NAME, server))
    except OSError as err:
        raise StartupError(f"the pods API cannot be served: {err.strerror or err}") from err


@contextlib.asynccontextmanager
async def serving(parts: ServerDependencies) -> AsyncIterator[None]:
    """Serve while the context is open. Raises AuthConfigError or PortError, each with one line."""
    metrics, manifests = ServerMetrics(parts.registry), _manifests(parts)
    config, health = parts.settings.config, health_routes(parts.checks, metrics.health)
    turns = RenderTurns()
    by_user = partial(ScrapeLimit, max_per_user=MAX_SCRAPES_PER_USER, turns=turns)
    scrapes, statistics = by_user(), _statistics_routes(parts, by_user, turns)
    runtime = parts.statistics.runtime
    parts.registry.register(ProviderMetric(lambda: "cri" if runtime.has_metrics else "cadvisor"))
    async with contextlib.AsyncExitStack() as stack:
        api: ApiServerDependencies | None = None
        if config.enable_server and not config.run_once and _may_have_clients(parts):
            tasks = await stack.enter_async_context(TaskScope())
            api = await _api_parts(parts, metrics, manifests, statistics, scrapes, tasks)
            await stack.enter_async_context(api_server(api))
        if config.enable_server and config.read_only_port > 0:
            standalone = parts.cluster is None
            # It knows no users; clients that do not read must not keep those of the API out.
            unlimited_users = partial(ScrapeLimit, turns=turns)
            routes = [
                *read_only_routes(parts.engine, omit_values=standalone),
                *spec_routes(parts.statistics.machine_info),
                *metrics_routes(parts.registry, metrics.health, unlimited_users()),
                *_statistics_routes(parts, unlimited_users, turns),
                *health,
            ]
            layers = [
                *tracing_middleware(parts.settings.tracer),
                counting_middleware(metrics, "readonly"),
            ]
            if standalone:
                layers.append(own_hosts_only((parts.settings.node_name, socket.gethostname())))
            server = http_server("read-only", config.address, config.read_only_port, routes, layers)
            await stack.enter_async_context(server)
        control = Path(parts.settings.flags.root_dir) / SOCKET_NAME
        by_root = [
            *control_routes(parts.engine),
            *image_routes(parts.image_gc, parts.images.pulls),
            *node_routes(await _published_info(parts)),
            *event_routes(parts.events),
            *configz_routes(parts.reloader.configz),
            *metrics_routes(parts.registry, metrics.health, scrapes),
            *memory_curve_routes(parts.statistics.collector.memory_curves),
            *pressure_routes(parts.eviction.report),
            *reload_routes(parts.reloader.reload),
            *statistics,
            *(manifests.routes() if manifests is not None else ()),
        ]
        await stack.enter_async_context(unix_server(control, by_root))
        if config.healthz_port > 0:
            ping = health_port_routes(metrics.health)
            server = http_server("health", config.healthz_bind_address, config.healthz_port, ping)
            await stack.enter_async_context(server)
        if (parts.settings.flags.page_port or parts.default_page_port) and not config.run_once:
            # Its code costs memory, which only a node with the page needs.
            from pykubelet.agent.page import serving_page

            await stack.enter_async_context(serving_page(parts, api, turns))
        yield


async def _published_info(parts: ServerDependencies) -> NodeInfo:
    """Return the paths and names of this node; they are also written for commands of a stopped node."""
    flags, config = parts.settings.flags, parts.settings.config
    info = NodeInfo(
        node_name=parts.settings.node_name,
        root_dir=flags.root_dir,
        cert_dir=flags.cert_dir,
        static_pod_path=config.static_pod_path,
        pod_logs_dir=config.pod_logs_dir,
        container_runtime_endpoint=config.container_runtime_endpoint,
        image_service_endpoint=config.image_service_endpoint,
        config_file=flags.config,
        config_dir=flags.config_dir,
        kubeconfig=flags.kubeconfig,
        bootstrap_kubeconfig=flags.bootstrap_kubeconfig,
        client_ca_file=config.authentication.x509.client_ca_file,
        tls_cert_file=config.tls_cert_file,
        log_file=str(log_file() or ""),
        standalone=parts.cluster is None,
        served=sorted(_served_kinds(parts)),
        version=__version__,
        pid=os.getpid(),
    )
    try:
        await finish_in_thread(partial(write_node_info, Path(flags.root_dir), info))
    except OSError as err:
        log.warning("Failed to write the node's paths, commands need a running kubelet", err=err)
    return info


def _may_have_clients(parts: ServerDependencies) -> bool:
    """Return whether any client could be authorized; a standalone node may serve only its own CLI."""
    ways = parts.settings.config.authentication
    if (
        parts.cluster is not None
        or ways.anonymous.enabled
        or ways.webhook.enabled
        or ways.x509.client_ca_file
    ):
        return True
    log.info(
        "API is not served, no client could be authorized", remedy="set authentication.x509.clientCAFile"
    )
    return False


def _manifests(parts: ServerDependencies) -> ManifestDirectory | None:
    path = Path(parts.settings.config.static_pod_path)
    # A single file may be configured, too; its owner writes it.
    if not parts.settings.config.static_pod_path or path.is_file():
        return None
    return ManifestDirectory(
        path,
        parts.settings.node_name,
        served=_served_kinds(parts),
        options=validation_options(parts.settings.gates),
        clock=time.time_ns,
    )


def _served_kinds(parts: ServerDependencies) -> frozenset[str]:
    """Return the kinds of API objects that manifests may refer to, with those that they may contain."""
    if parts.cluster is None:
        return LOCAL_KINDS
    return served_kinds(parts.settings.gates, standalone=False)


def _statistics_routes(
    parts: ServerDependencies, limit: Callable[[], ScrapeLimit], turns: RenderTurns
) -> list[web.RouteDef]:
    """Return the routes of statistics; servers with the same routes share their limits."""
    statistics, config = parts.statistics, parts.settings.config
    return [
        *summary_routes(statistics, turns=turns),
        *cadvisor_routes(statistics, limit(), hints=statistics.host_filesystems.hints),
        *resource_routes(statistics, limit(), show_hidden=bool(config.show_hidden_metrics_for_version)),
    ]


async def _api_parts(
    parts: ServerDependencies,
    metrics: ServerMetrics,
    manifests: ManifestDirectory | None,
    statistics: Sequence[web.RouteDef],
    scrapes: ScrapeLimit,
    tasks: TaskScope,
) -> ApiServerDependencies:
    settings, cluster = parts.settings, parts.cluster
    try:
        source = await serving_certificate(settings, parts.ips, cluster)
    except (KeyGenerationError, StoreError, OSError) as err:
        raise AuthConfigError(f"there is no certificate to serve with: {err}") from err
    certificate = SwitchableCertificate(source)
    live_tls = LiveTls(settings, parts.ips, certificate, source)
    tasks.start(certificate.run(), name="serving-certificate")
    return ApiServerDependencies(
        config=settings.config,
        gates=settings.gates,
        checks=parts.checks,
        registry=parts.registry,
        metrics=metrics,
        auth=AuthDependencies(
            node_name=settings.node_name,
            review_client=cluster.review_client() if cluster is not None else None,
            serving_certificate=certificate.current,
        ),
        pods=PodDependencies(
            engine=parts.engine,
            resolve_uid=parts.engine.store.resolve,
            runtime=parts.cri.runtime,
            root_dir=Path(settings.flags.root_dir),
            now=lambda: datetime.now(UTC),
            log_readers=parts.log_readers,
        ),
        debug=DebugDependencies(
            configz=parts.reloader.configz,
            flags=lambda: parts.flag_values,
            started=parts.started,
        ),
        on_tls=lambda tls: parts.reloader.register(Consumer("tls", partial(live_tls.prepare, tls))),
        manifests=manifests if cluster is None else None,
        statistics=statistics,
        scrapes=scrapes,
        tracer=settings.tracer,
    )


class LiveTls:
    """Changes of the serving certificate and of the TLS options while the API is served."""

    def __init__(
        self,
        settings: AgentSettings,
        ips: Sequence[str],
        certificate: SwitchableCertificate,
        source: ServingCertificate,
    ) -> None:
        """Initialize with the certificate in use and its source at the start."""
        self._settings = settings
        self._ips = ips
        self._certificate = certificate
        self._source = source
        self._files = _certificate_files(settings.config)

    async def prepare(self, tls: ServingTls, config: KubeletConfiguration) -> Apply:
        """Prepare TLS options and certificate files of new connections. Raises ReloadError."""
        options = TlsSettings.from_config(config, request_certificates=tls.settings.request_certificates)
        try:
            await finish_in_thread(partial(server_context, options))
        except (TlsProblem, OpensslMissing) as err:
            raise ReloadError(str(err)) from err
        switch = await self._prepare_certificate(config)

        def apply() -> None:
            switch()
            tls.set_settings(options)

        return apply

    async def _prepare_certificate(self, config: KubeletConfiguration) -> Apply:
        files = _certificate_files(config)
        if files == self._files:
            return lambda: None
        try:
            if files is not None:
                source: ServingCertificate = await finish_in_thread(partial(CertificateFiles, *files))
            elif not isinstance(self._source, RequestedCertificate):
                cert_dir = Path(self._settings.flags.cert_dir)
                source = await self_signed_certificate(
                    cert_dir, self._settings.node_name, ips=tuple(self._ips)
                )
        except (KeyGenerationError, StoreError, OSError) as err:
            raise ReloadError(f"tlsCertFile, tlsPrivateKeyFile: {err}") from err

        def apply() -> None:
            self._files = files
            if isinstance(self._source, RequestedCertificate):
                # The certificate of the cluster stays; the files are used only without one.
                self._source.set_fallback(files)
            else:
                self._certificate.switch(source)

        return apply


def _certificate_files(config: KubeletConfiguration) -> tuple[Path, Path] | None:
    if not (config.tls_cert_file and config.tls_private_key_file):
        return None
    return Path(config.tls_cert_file), Path(config.tls_private_key_file)


async def serving_certificate(
    settings: AgentSettings, ips: Iterable[str], cluster: Cluster | None
) -> ServingCertificate:
    """Return the serving certificate. Raises KeyGenerationError, StoreError, OSError."""
    config, flags = settings.config, settings.flags
    found = _certificate_files(config)
    files = CertificateFiles(*found) if found is not None else None
    if cluster is not None and config.server_tls_bootstrap:
        return cluster.serving_certificate(files)
    return files or await self_signed_certificate(Path(flags.cert_dir), settings.node_name, ips=tuple(ips))
