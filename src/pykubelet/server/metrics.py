"""The servers' own metrics: requests, and what the API server was asked about their senders.

Labels are bounded: paths and methods that the server does not know are counted together as `other`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pykubelet.metrics import SECONDS

_METHODS = frozenset({"OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"})
_PATHS = frozenset(
    {
        *("healthz", "pods", "stats", "metrics", "metrics/cadvisor", "metrics/probes", "metrics/resource"),
        *("run", "exec", "attach", "portForward", "containerLogs", "configz", "runningpods", "checkpoint"),
        *("logs", "debug", "flagz", "statusz", "spec", "manifests"),
    }
)
_LONG = frozenset({"exec", "attach", "portForward", "debug"})
_LABELS = ["method", "path", "server_type", "long_running"]
_CERTIFICATE_SECONDS = [
    *(0, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 345600, 604800),
    *(2592000, 7776000, 15552000, 31104000),
]
_REVIEW_SECONDS = [0.25, 0.5, 0.7, 1, 1.5, 3, 5, 10]

ServerType = Literal["readonly", "readwrite"]
Review = Literal["authn", "authz"]


def path_label(path: str) -> str:
    """The name under which a path is counted."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first == "metrics" and rest:
        first = f"metrics/{rest.partition('/')[0]}"
    return first if first in _PATHS else "other"


class ServerMetrics:
    """Counts for the servers of one agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kubelet_http_requests_total", "Requests to the agent's servers.", _LABELS, registry=registry
        )
        self._duration = Histogram(
            "kubelet_http_requests_duration_seconds",
            "How long requests to the agent's servers took.",
            _LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        self._inflight = Gauge(
            "kubelet_http_inflight_requests",
            "Requests to the agent's servers that are under way.",
            _LABELS,
            registry=registry,
        )
        self._websockets = Counter(
            "kubelet_websocket_streaming_requests_total",
            "Streaming requests that came over WebSocket, by subresource.",
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
            "Bearer tokens looked up, by whether the answer was known.",
            ["status"],
            registry=registry,
        )
        self._token_seconds = Histogram(
            "authentication_token_cache_request_duration_seconds",
            "How long the look-up of a bearer token took.",
            ["status"],
            buckets=SECONDS,
            registry=registry,
        )
        self._token_fetches = Counter(
            "authentication_token_cache_fetch_total",
            "Reviews of bearer tokens, by how they went.",
            ["status"],
            registry=registry,
        )
        self._token_active = Gauge(
            "authentication_token_cache_active_fetch_count",
            "Look-ups of bearer tokens that wait for a review (blocked), and reviews under way (in_flight).",
            ["status"],
            registry=registry,
        )
        self._certificate_expiration = Histogram(
            "apiserver_client_certificate_expiration_seconds",
            "How long the certificates that clients show are still valid.",
            buckets=_CERTIFICATE_SECONDS,
            registry=registry,
        )

    @contextmanager
    def request(self, method: str, path: str, server: ServerType) -> Iterator[None]:
        """Count a request from here to the end of the block."""
        name = path_label(path)
        known = method if method in _METHODS else "other"
        labels = (known, name, server, "true" if name in _LONG else "false")
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
        """Count a question to the API server, by the code of its answer or `<error>`."""
        self._reviews[kind].labels(code).inc()
        self._review_seconds[kind].labels(code).observe(seconds)

    def token_known(self, seconds: float) -> None:
        """Count a token whose owner was remembered."""
        self._token("hit", seconds)

    @contextmanager
    def token_unknown(self) -> Iterator[None]:
        """Count a token whose owner must be asked for, while that lasts."""
        started = perf_counter()
        self._token_active.labels("blocked").inc()
        try:
            yield
        finally:
            self._token_active.labels("blocked").dec()
            self._token("miss", perf_counter() - started)

    @contextmanager
    def token_review(self) -> Iterator[None]:
        """Count a review of a token; it failed when the block raises."""
        self._token_active.labels("in_flight").inc()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        finally:
            self._token_active.labels("in_flight").dec()
            self._token_fetches.labels(outcome).inc()

    def certificate_shown(self, seconds_left: float) -> None:
        """Count a client's certificate by how long it is still valid."""
        self._certificate_expiration.observe(seconds_left)

    def _token(self, status: str, seconds: float) -> None:
        self._token_requests.labels(status).inc()
        self._token_seconds.labels(status).observe(seconds)


def _review_counter(kind: Review, registry: CollectorRegistry) -> Counter:
    return Counter(
        f"apiserver_delegated_{kind}_request_total",
        "Questions to the API server about senders of requests, by code of its answer.",
        ["code"],
        registry=registry,
    )


def _review_histogram(kind: Review, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        f"apiserver_delegated_{kind}_request_duration_seconds",
        "How long the API server took to answer about senders of requests.",
        ["code"],
        buckets=_REVIEW_SECONDS,
        registry=registry,
    )
