"""The rest_client_* metrics of API server requests, named as in client-go.

They use the caller's registry, because several kubelets can run in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = [0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60]
_SIZES = [64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216]
_AGES = [600, 1800, 3600, 14400, 86400, 604800, 2592000, 7776000, 15552000, 31104000, 124416000]


class RestMetrics:
    """Metrics of the API requests of one kubelet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "rest_client_requests_total",
            "Requests to the API server, by status code, method and host.",
            ["code", "method", "host"],
            registry=registry,
        )
        self._retries = Counter(
            "rest_client_request_retries_total",
            "Retried requests to the API server, by status code of the failed request, verb and host.",
            ["code", "verb", "host"],
            registry=registry,
        )
        self._duration = Histogram(
            "rest_client_request_duration_seconds",
            "Latency of requests to the API server in seconds, by verb and host.",
            ["verb", "host"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._limiter = Histogram(
            "rest_client_rate_limiter_duration_seconds",
            "Seconds that requests waited for the client's rate limiter, by verb and host.",
            ["verb", "host"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._request_size = Histogram(
            "rest_client_request_size_bytes",
            "Request sizes in bytes, by verb and host.",
            ["verb", "host"],
            buckets=_SIZES,
            registry=registry,
        )
        self._response_size = Histogram(
            "rest_client_response_size_bytes",
            "Response sizes in bytes, by verb and host.",
            ["verb", "host"],
            buckets=_SIZES,
            registry=registry,
        )
        self._plugin_ttl = Gauge(
            "rest_client_exec_plugin_ttl_seconds",
            "Seconds until the certificate of an exec plugin expires; +Inf without one.",
            registry=registry,
        )
        self._plugin_ttl.set(math.inf)
        self._plugin_age = Histogram(
            "rest_client_exec_plugin_certificate_rotation_age",
            "Ages in seconds at which certificates of exec plugins were replaced.",
            buckets=_AGES,
            registry=registry,
        )

    def waited(self, verb: str, host: str, seconds: float) -> None:
        """Observe a wait for the client-side rate limiter."""
        self._limiter.labels(verb, host).observe(seconds)

    def retried(self, code: int, verb: str, host: str) -> None:
        """Count a retry after a response with this code."""
        self._retries.labels(str(code), verb, host).inc()

    def answered(self, method: str, host: str, code: str, seconds: float, sent: int) -> None:
        """Count a request with its response code, or `<error>` if it failed."""
        self._requests.labels(code, method, host).inc()
        self._duration.labels(method, host).observe(seconds)
        self._request_size.labels(method, host).observe(sent)

    def received(self, method: str, host: str, size: int) -> None:
        """Observe the size of a response, in bytes."""
        self._response_size.labels(method, host).observe(size)

    def plugin_certificate(self, seconds_left: Callable[[], float]) -> None:
        """Export the remaining validity, in seconds, of the certificate of an exec plugin."""
        self._plugin_ttl.set_function(seconds_left)

    def plugin_rotated(self, age_seconds: float) -> None:
        """Observe the age, in seconds, at which a certificate of an exec plugin was replaced."""
        self._plugin_age.observe(age_seconds)
