"""How long the node's certificates are still valid, and how their renewal goes.

Built on a registry that the caller gives, because two agents can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, Histogram

from pykubelet.metrics import PlainCounter

_LIVES = [60, 3600, 14400, 86400, 604800, 2592000, 7776000, 15552000, 31104000, 124416000]
_ERRORS = {
    "client": "kubelet_certificate_manager_client_expiration_renew_errors",
    "server": "kubelet_server_expiration_renew_errors",
}


class CertificateMetrics:
    """The metrics of the client's or the server's certificate."""

    def __init__(self, registry: CollectorRegistry, kind: Literal["client", "server"]) -> None:
        self._left = Gauge(
            f"kubelet_certificate_manager_{kind}_ttl_seconds",
            f"Seconds until the {kind} certificate expires, negative when it has; +Inf without one.",
            registry=registry,
        )
        self._errors = PlainCounter(
            _ERRORS[kind], "Attempts to renew the certificate that failed.", registry=registry
        )
        self._ages: Histogram | None = None
        if kind == "server":
            self._ages = Histogram(
                "kubelet_certificate_manager_server_rotation_seconds",
                "Ages in seconds at which serving certificates were replaced.",
                buckets=_LIVES,
                registry=registry,
            )

    def show(self, seconds_left: Callable[[], float]) -> None:
        """Show how long the certificate is still valid."""
        self._left.set_function(seconds_left)

    def failed(self) -> None:
        """Count an attempt that failed."""
        self._errors.inc()

    def replaced(self, age_seconds: float) -> None:
        """Count that a certificate of this age was replaced."""
        if self._ages is not None:
            self._ages.observe(age_seconds)
