"""Metrics of the HTTP servers, kubelet build information, and the `/metrics` endpoints.

`ServerMetrics` counts requests and reviews. Label values are bounded: unknown paths and methods are counted
as `other`. `KubeletInfo` reports constants (version, feature gates, node name, memory limit), which are
collected only on a scrape.

`/metrics/probes` is separate from `/metrics` because probe metrics have a series per container.
`/metrics/slis` has the results of the checks that requests to `/healthz` have run; a DELETE resets them. All
are sent while they are rendered (`registry_text`), with the limits of `stats_metrics`.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet import KUBERNETES_VERSION
from pykubelet.config.feature_gates import FeatureGates, known_gates
from pykubelet.linux.host_info import architecture
from pykubelet.server.metrics.registry_text import registry_chunks
from pykubelet.server.metrics.stats_metrics import Handler, ScrapeLimit, send_page
from pykubelet.util.metrics import SECONDS

_METHODS = frozenset({"OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"})
_PATHS = frozenset(
    {
        *("healthz", "pods", "stats", "metrics", "metrics/cadvisor", "metrics/probes", "metrics/resource"),
        *("run", "exec", "attach", "portForward", "containerLogs", "configz", "runningpods", "checkpoint"),
        *("logs", "debug", "flagz", "statusz", "spec", "manifests"),
    }
)
_LONG_RUNNING = frozenset({"exec", "attach", "portForward", "debug"})
_LABELS = ["method", "path", "server_type", "long_running"]
_CERTIFICATE_SECONDS = [
    *(0, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 345600, 604800),
    *(2592000, 7776000, 15552000, 31104000),
]
_REVIEW_SECONDS = [0.25, 0.5, 0.7, 1, 1.5, 3, 5, 10]
ServerType = Literal["readonly", "readwrite"]
Review = Literal["authn", "authz"]
MetricsProvider = Literal["cadvisor", "cri"]
"""Source of the statistics of containers: the kubelet's own readers, or the runtime."""


def path_label(path: str) -> str:
    """Return the `path` label of a request path."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first == "metrics" and rest:
        first = f"metrics/{rest.partition('/')[0]}"
    return first if first in _PATHS else "other"


class ProviderMetric(Collector):
    """Metric of the source of `/metrics/cadvisor`, which may change when the runtime is replaced."""

    def __init__(self, provider: Callable[[], MetricsProvider]) -> None:
        self._provider = provider

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        found = GaugeMetricFamily(
            "kubelet_metrics_provider",
            "Source of the statistics of containers: cadvisor or cri.",
            labels=["provider"],
        )
        found.add_metric([self._provider()], 1)
        yield found


class ServerMetrics:
    """Metrics of the kubelet's HTTP servers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kubelet_http_requests_total", "Requests to the kubelet's servers.", _LABELS, registry=registry
        )
        self._duration = Histogram(
            "kubelet_http_requests_duration_seconds",
            "Duration of requests to the kubelet's servers in seconds.",
            _LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        self._inflight = Gauge(
            "kubelet_http_inflight_requests",
            "Requests to the kubelet's servers in progress.",
            _LABELS,
            registry=registry,
        )
        self._websockets = Counter(
            "kubelet_websocket_streaming_requests_total",
            "Streaming requests over WebSocket, by subresource.",
            ["subresource"],
            registry=registry,
        )
        self._reviews: dict[Review, Counter] = {
            "authn": _review_counter("authn", registry),
            "authz": _review_counter("authz", registry),
        }
        self._review_seconds: dict[Review, Histogram] = {
            "authn": _review_histogram("authn", registry),
            "authz": _review_histogram("authz", registry),
        }
        self._token_requests = Counter(
            "authentication_token_cache_request_total",
            "Bearer token lookups, by cache hit or miss.",
            ["status"],
            registry=registry,
        )
        self._token_seconds = Histogram(
            "authentication_token_cache_request_duration_seconds",
            "Duration of bearer token lookups in seconds.",
            ["status"],
            buckets=SECONDS,
            registry=registry,
        )
        self._token_fetches = Counter(
            "authentication_token_cache_fetch_total",
            "Bearer token reviews, by result.",
            ["status"],
            registry=registry,
        )
        self._token_active = Gauge(
            "authentication_token_cache_active_fetch_count",
            "Bearer token lookups that wait for a review (blocked), and reviews in progress (in_flight).",
            ["status"],
            registry=registry,
        )
        self._certificate_expiration = Histogram(
            "apiserver_client_certificate_expiration_seconds",
            "Remaining lifetime of client certificates in seconds.",
            buckets=_CERTIFICATE_SECONDS,
            registry=registry,
        )
        self.health = HealthMetrics()

    @contextmanager
    def request(self, method: str, path: str, server: ServerType) -> Iterator[None]:
        """Count a request, and measure it until the block ends."""
        name = path_label(path)
        known = method if method in _METHODS else "other"
        labels = (known, name, server, "true" if name in _LONG_RUNNING else "false")
        started = perf_counter()
        self._requests.labels(*labels).inc()
        inflight = self._inflight.labels(*labels)
        inflight.inc()
        try:
            yield
        finally:
            inflight.dec()
            self._duration.labels(*labels).observe(perf_counter() - started)

    def websocket(self, subresource: str) -> None:
        """Count a streaming request over WebSocket."""
        self._websockets.labels(subresource).inc()

    def review(self, kind: Review, code: str, seconds: float) -> None:
        """Count a review request to the API server, by its HTTP status code or `<error>`."""
        self._reviews[kind].labels(code).inc()
        self._review_seconds[kind].labels(code).observe(seconds)

    def token_cache_hit(self, seconds: float) -> None:
        """Count a cache hit of the token review cache."""
        self._token("hit", seconds)

    @contextmanager
    def token_cache_miss(self) -> Iterator[None]:
        """Count a cache miss of the token review cache, and measure it until the block ends."""
        started = perf_counter()
        self._token_active.labels("blocked").inc()
        try:
            yield
        finally:
            self._token_active.labels("blocked").dec()
            self._token("miss", perf_counter() - started)

    @contextmanager
    def token_review(self) -> Iterator[None]:
        """Count a token review, as failed if the block raises."""
        self._token_active.labels("in_flight").inc()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        finally:
            self._token_active.labels("in_flight").dec()
            self._token_fetches.labels(outcome).inc()

    def observe_client_certificate(self, seconds_left: float) -> None:
        """Observe the remaining validity of a client certificate, in seconds."""
        self._certificate_expiration.observe(seconds_left)

    def _token(self, status: str, seconds: float) -> None:
        self._token_requests.labels(status).inc()
        self._token_seconds.labels(status).observe(seconds)


class HealthMetrics:
    """Service level indicators: results of health checks, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._latest = Gauge(
            "kubernetes_healthcheck",
            "Result of the last run of a health check: 1 if it passed, 0 if it failed.",
            ["name", "type"],
            registry=self.registry,
        )
        self._total = Counter(
            "kubernetes_healthchecks_total",
            "Runs of health checks, by result.",
            ["name", "type", "status"],
            registry=self.registry,
        )

    def observe(self, name: str, *, healthy: bool, endpoint: str = "healthz") -> None:
        """Record the result of a health check that a request to an endpoint has run."""
        self._latest.labels(name, endpoint).set(healthy)
        self._total.labels(name, endpoint, "success" if healthy else "error").inc()

    def reset(self) -> None:
        """Forget all results."""
        self._latest.clear()
        self._total.clear()


def _review_counter(kind: Review, registry: CollectorRegistry) -> Counter:
    return Counter(
        f"apiserver_delegated_{kind}_request_total",
        "Token and access reviews by the API server, by status code.",
        ["code"],
        registry=registry,
    )


def _review_histogram(kind: Review, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        f"apiserver_delegated_{kind}_request_duration_seconds",
        "Duration of token and access reviews by the API server in seconds.",
        ["code"],
        buckets=_REVIEW_SECONDS,
        registry=registry,
    )


_NO_LIMIT = float(2**64)
"""Value that Go's Prometheus client reports for an unlimited RLIMIT_AS."""


class KubeletInfo(Collector):
    """Collector of constant kubelet information."""

    def __init__(self, node_name: str, gates: FeatureGates) -> None:
        self._node_name = node_name
        self._gates = gates

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield _family("kubelet_node_name", "The node's name.", {"node": self._node_name}, 1)
        yield _family("kubernetes_build_info", "Version of the kubelet.", build_labels(), 1)
        features = GaugeMetricFamily(
            "kubernetes_feature_enabled", "Whether a feature gate is on.", labels=["name", "stage"]
        )
        for gate in known_gates().values():
            stage = "" if gate.stage == "GA" else gate.stage.upper()
            features.add_metric([gate.name, stage], self._gates.enabled(gate.name))
        yield features
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        yield GaugeMetricFamily(
            "process_virtual_memory_max_bytes",
            "Maximum amount of virtual memory in bytes.",
            value=_NO_LIMIT if limit == resource.RLIM_INFINITY else limit,
        )


def build_labels() -> dict[str, str]:
    """Return the labels of `kubernetes_build_info`; those specific to Go and git builds are empty."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".", 2)
    return {
        "major": major,
        "minor": minor,
        "git_version": KUBERNETES_VERSION,
        "git_commit": "",
        "git_tree_state": "",
        "build_date": "",
        "go_version": "",
        "compiler": f"{sys.implementation.name} {platform.python_version()}",
        "platform": f"linux/{architecture()}",
    }


def _family(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


_PROBES = "prober_"
_START_TIME = "process_start_time_seconds"


def metrics_routes(
    registry: CollectorRegistry, health: HealthMetrics, limit: ScrapeLimit | None = None
) -> list[web.RouteDef]:
    """Return the routes of `/metrics`, `/metrics/probes` and `/metrics/slis`."""
    slots = limit or ScrapeLimit()

    def page(is_included: Callable[[str], bool], *others: CollectorRegistry) -> Handler:
        async def respond(request: web.Request) -> web.StreamResponse:
            with slots.acquire(request):
                chunks = registry_chunks(registry, is_included, *others)
                return await send_page(request, chunks, slots)

        return respond

    return [
        web.get("/metrics", page(lambda name: not name.startswith(_PROBES))),
        web.get("/metrics/probes", page(lambda name: name.startswith(_PROBES) or name == _START_TIME)),
        web.get("/metrics/slis", page(lambda name: name == _START_TIME, health.registry)),
    ]


def reset_routes(health: HealthMetrics) -> list[web.RouteDef]:
    """Return the route that resets the metrics of `/metrics/slis`.

    Not for the read-only port, where upstream has it without authentication.
    """

    async def reset(_: web.Request) -> web.Response:
        health.reset()
        return web.Response(text="metrics reset\n")

    return [web.delete("/metrics/slis", reset)]
