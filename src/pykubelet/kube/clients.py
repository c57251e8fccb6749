"""The agent's three clients of one API server, each with a limit of its own.

Objects, events and heartbeats do not wait for each other: a flood of events must not delay a pod's
status, and neither may delay the sign of life that decides whether the node's pods are moved away.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykubelet.kube.client import ApiClient
from pykubelet.kube.metrics import RestMetrics
from pykubelet.kube.rate import TokenBucket
from pykubelet.kube.transport import Transport

# What every client of Kubernetes falls back to when its limit is given as zero.
_DEFAULT_QPS = 5.0
_DEFAULT_BURST = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """How often to ask; a negative `qps` means no limit, zero the default of Kubernetes' clients."""

    qps: float
    burst: int

    def bucket(self) -> TokenBucket:
        """A new bucket with this limit."""
        return TokenBucket(self.qps or _DEFAULT_QPS, self.burst or _DEFAULT_BURST)


@dataclass(frozen=True, slots=True)
class Clients:
    """Three ways to ask the same API server."""

    objects: ApiClient
    events: ApiClient
    heartbeats: ApiClient
    """Without limit and with a short timeout; it does not repeat what is put off, its owner does."""


def make_clients(
    transport: Transport,
    *,
    objects: Limits,
    events: Limits,
    lease_seconds: float,
    status_seconds: float,
    metrics: RestMetrics | None = None,
) -> Clients:
    """Make the three clients; a heartbeat is late when the next one is due or the lease is over."""
    return Clients(
        objects=ApiClient(transport, objects.bucket(), metrics=metrics),
        events=ApiClient(transport, events.bucket(), metrics=metrics),
        heartbeats=ApiClient(
            transport,
            TokenBucket(-1, 0),
            timeout=min(lease_seconds, status_seconds),
            retries=0,
            metrics=metrics,
        ),
    )
