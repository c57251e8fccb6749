"""The kubelet API on port 10250: its routes, as configuration enables them, and its HTTPS server.

    async with api_server(deps) as port:
        ...

`ApiServerDependencies` holds all dependencies, grouped by the routes that use them. Every route is behind
TLS, authentication and authorization.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import to_json
from pykubelet.apiserver.client import ApiClient
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri.client import RuntimeClient
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.logs import get_logger
from pykubelet.podworkers.engine import PodEngine
from pykubelet.server.auth.request_auth import (
    AuthConfigError,
    Authenticator,
    Authorizer,
    make_authenticator,
    make_authorizer,
)
from pykubelet.server.connections import MAX_CONNECTIONS, app_runner, serve_connections, single_error_scope
from pykubelet.server.contention import ContentionProfile
from pykubelet.server.debug import (
    flagz_routes,
    profiling_routes,
    statusz_routes,
    timeline_routes,
    verbosity_routes,
)
from pykubelet.server.listeners import listening_socket
from pykubelet.server.logs.container_logs import ContainerLogs
from pykubelet.server.logs.node_logs import NODE_LOGS, node_log_routes
from pykubelet.server.lookup import PodLookup
from pykubelet.server.manifests import ManifestDirectory
from pykubelet.server.metrics.server_metrics import ServerMetrics, metrics_routes, reset_routes
from pykubelet.server.metrics.stats_metrics import MAX_SCRAPES_PER_USER, ScrapeLimit
from pykubelet.server.pipeline import (
    auth_middleware,
    counting_middleware,
    plain_text,
    tracing_middleware,
)
from pykubelet.server.readonly import Check, health_routes, read_only_routes
from pykubelet.server.streams.container_actions import ContainerActions, running_pods_routes
from pykubelet.server.streams.streaming import StreamingEndpoints, StreamLimits
from pykubelet.server.tls import (
    Files,
    OpensslMissing,
    ServingTls,
    TlsProblem,
    TlsSettings,
    client_authorities,
    reloads_certificate,
)
from pykubelet.tracing.span import Tracer

log = get_logger(__name__)
MAX_BODY_BYTES = 1024 * 1024


@asynccontextmanager
async def https_server(
    address: str,
    port: int,
    routes: Iterable[web.AbstractRouteDef],
    *,
    tls: ServingTls,
    authenticator: Authenticator,
    authorizer: Authorizer,
    metrics: ServerMetrics,
    max_connections: int = MAX_CONNECTIONS,
    tracer: Tracer | None = None,
    name: str = "API",
    outermost: Iterable[Middleware] = (),
) -> AsyncIterator[int]:
    """Serve the routes over TLS while the context is open, and yield the port. Raises PortError.

    `outermost` handle requests before authentication, and all responses, also those to rejected requests.
    """
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[
            *outermost,
            *tracing_middleware(tracer),
            counting_middleware(metrics, "readwrite"),
            auth_middleware(authenticator, authorizer),
        ],
    )
    app.add_routes(routes)
    with listening_socket(name, address, port) as listener:
        async with (
            app_runner(app) as server,
            serve_connections(server, listener, tls.context, max_connections=max_connections),
        ):
            bound_port: int = listener.getsockname()[1]
            log.info("Listening", server=name, address=address, port=bound_port)
            yield bound_port


_NO_IDLE_TIMEOUT_SECONDS = 10.0 * 365 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthDependencies:
    """Dependencies of authentication, authorization and TLS."""

    node_name: str
    review_client: ApiClient | None
    """API client for reviews, which needs a rate limit of its own; None standalone."""
    serving_certificate: Callable[[], Files | None]
    """Returns the current files of the serving certificate and its key; None while they do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDependencies:
    """Dependencies of the endpoints for pods and containers: lists, logs, streaming, checkpoints."""

    engine: PodEngine
    resolve_uid: Callable[[str], str]
    """Translates the UID of a mirror pod to that of its static pod (`PodStore.resolve`)."""
    runtime: RuntimeClient
    root_dir: Path
    """Root directory of the kubelet, in which checkpoints are written."""
    now: Callable[[], datetime]
    log_readers: LogReaders = field(default_factory=LogReaders)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugDependencies:
    """Dependencies of `/configz`, `/flagz`, `/statusz` and `/logs/`."""

    configz: Callable[[], Mapping[str, Any]]
    """Returns the document of `/configz`."""
    flags: Callable[[], Mapping[str, str]]
    started: datetime
    node_logs: Path = NODE_LOGS


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerDependencies:
    """Dependencies of the API server."""

    config: KubeletConfiguration
    gates: FeatureGates
    checks: Mapping[str, Check]
    registry: CollectorRegistry
    metrics: ServerMetrics
    """Shared by all servers of the process."""
    auth: AuthDependencies
    pods: PodDependencies
    debug: DebugDependencies
    on_tls: Callable[[ServingTls], None] = lambda tls: None
    """Called with the TLS of the server before it listens."""
    manifests: ManifestDirectory | None = None
    """Static pod directory that clients may write to; None in a cluster."""
    statistics: Sequence[web.RouteDef] = ()
    """Routes of statistics, which the servers with authentication share with their limits."""
    scrapes: ScrapeLimit = field(default_factory=lambda: ScrapeLimit(max_per_user=MAX_SCRAPES_PER_USER))
    """Limit on scrapes of `/metrics`."""
    tracer: Tracer | None = None


@asynccontextmanager
async def api_server(deps: ApiServerDependencies) -> AsyncIterator[int]:
    """Serve the API while the context is open, and yield its port.

    Raises AuthConfigError or PortError, whose messages are one line with cause and remedy.
    """
    config = deps.config
    async with single_error_scope() as scope:
        authenticator = make_authenticator(config, deps.gates, deps.auth.review_client, scope, deps.metrics)
        authorizer = make_authorizer(
            config, deps.auth.review_client, lambda: deps.auth.node_name, scope, deps.metrics
        )
        settings = TlsSettings.from_config(config, request_certificates=authenticator.requests_certificates)
        try:
            tls = ServingTls(
                settings,
                deps.auth.serving_certificate,
                reloads=reloads_certificate(config, deps.gates),
                authorities=client_authorities(config, deps.gates),
            )
        except (TlsProblem, OpensslMissing, OSError) as err:
            raise AuthConfigError(str(err)) from err
        deps.on_tls(tls)
        contention = ContentionProfile()
        is_served = config.enable_debugging_handlers and config.enable_profiling_handler
        if config.enable_contention_profiling and is_served:
            scope.start(contention.run(), name="contention-profile")
        async with https_server(
            config.address,
            config.port,
            api_routes(deps, contention),
            tls=tls,
            authenticator=authenticator,
            authorizer=authorizer,
            metrics=deps.metrics,
            tracer=deps.tracer,
        ) as port:
            yield port


def api_routes(
    deps: ApiServerDependencies, contention: ContentionProfile | None = None
) -> list[web.AbstractRouteDef]:
    """Return the routes of the API that the configuration enables; `contention` is a profile that runs."""
    routes: list[web.AbstractRouteDef] = [
        *health_routes(deps.checks, deps.metrics.health),
        *read_only_routes(deps.pods.engine),
        *metrics_routes(deps.registry, deps.metrics.health, deps.scrapes),
        *reset_routes(deps.metrics.health),
        *deps.statistics,
    ]
    if not deps.config.enable_debugging_handlers:
        routes += _disabled(_DEBUGGING_PATHS, "Debug endpoints are disabled.\n")
        return routes
    routes += _debugging_routes(deps, contention or ContentionProfile())
    if deps.gates.enabled("ComponentFlagz"):
        routes += flagz_routes(deps.debug.flags)
    if deps.gates.enabled("ComponentStatusz"):
        listed = [route.path for route in routes if isinstance(route, web.RouteDef) and "{" not in route.path]
        routes += statusz_routes(listed, deps.debug.started)
    return routes


def _debugging_routes(
    deps: ApiServerDependencies, contention: ContentionProfile
) -> list[web.AbstractRouteDef]:
    config = deps.config
    lookup = PodLookup(deps.pods.engine, deps.pods.runtime, deps.pods.resolve_uid)
    limits = StreamLimits()
    idle_seconds = config.streaming_connection_idle_timeout.seconds or _NO_IDLE_TIMEOUT_SECONDS
    actions = ContainerActions(lookup, deps.pods.root_dir / "checkpoints", deps.pods.now)
    split_streams = deps.gates.enabled("PodLogsQuerySplitStreams")
    routes: list[web.AbstractRouteDef] = [
        *StreamingEndpoints(
            lookup,
            limits,
            deps.metrics,
            idle_seconds=idle_seconds,
            translate_websockets=deps.gates.enabled("ExtendWebSocketsToKubelet"),
        ).routes(),
        *ContainerLogs(
            lookup, limits, deps.pods.log_readers, split_streams=split_streams, idle_seconds=idle_seconds
        ).routes(),
        *actions.run_routes(),
        *running_pods_routes(deps.pods.runtime),
        web.get("/configz", _configz(deps.debug.configz)),
        *timeline_routes(deps.pods.engine),
    ]
    if deps.manifests is not None:
        routes += deps.manifests.routes(max_bytes=MAX_BODY_BYTES)
    if deps.gates.enabled("ContainerCheckpoint"):
        routes += actions.checkpoint_routes()
    if config.enable_system_log_handler:
        may_query = config.enable_system_log_query and deps.gates.enabled("NodeLogQuery")
        routes += node_log_routes(deps.debug.node_logs, limits if may_query else None)
    else:
        routes += _disabled(["/logs/"], "logs endpoint is disabled.\n")
    if config.enable_profiling_handler:
        routes += profiling_routes(contention)
    else:
        routes += _disabled(["/debug/pprof/"], "profiling endpoint is disabled.\n")
    if config.enable_debug_flags_handler:
        routes += verbosity_routes()
    else:
        routes += _disabled(["/debug/flags/v"], "flags endpoint is disabled.\n")
    return routes


_DEBUGGING_PATHS = (
    *("/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/runningpods/", "/debug/pprof/"),
    "/logs/",
)


def _disabled(roots: Iterable[str], text: str) -> list[web.RouteDef]:
    async def respond(_: web.Request) -> web.Response:
        return plain_text(405, text)

    return [web.route("*", root + "{rest:.*}", respond) for root in roots]


def _configz(document: Callable[[], Mapping[str, Any]]) -> Callable[[web.Request], Any]:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=to_json(document()), content_type="application/json")

    return respond
