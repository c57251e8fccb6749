"""Metrics of the ephemeral storage of pods, on `/metrics` (kubernetes/kubernetes#69507).

The upstream kubelet reports these values only in the Summary API. Here they are Prometheus metrics, so that
an alert can fire before the eviction manager evicts a pod that reaches its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class PodStorageRow(NamedTuple):
    """Measured ephemeral storage of a pod, or of one of its emptyDir volumes."""

    namespace: str
    pod: str
    volume: str
    """Name of the emptyDir volume; empty for all ephemeral storage of the pod."""
    used: int
    """Bytes."""
    inodes: int | None = None
    """Used inodes."""
    limit: int | None = None
    """Limit in bytes: the pod's limit on ephemeral-storage, or the volume's sizeLimit."""


class PodStorageMetrics(Collector):
    """Collector of the latest measured ephemeral storage, at each scrape."""

    def __init__(self, rows: Callable[[], Iterable[PodStorageRow]]) -> None:
        """Initialize; `rows` returns what was measured last and must not measure."""
        self._rows = rows

    def describe(self) -> Iterable[Metric]:
        """Return no metrics in advance: their names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; of rows with equal names the last one counts."""
        pods: dict[tuple[str, ...], PodStorageRow] = {}
        volumes: dict[tuple[str, ...], PodStorageRow] = {}
        for row in self._rows():
            if row.volume:
                volumes[row.namespace, row.pod, row.volume] = row
            else:
                pods[row.namespace, row.pod] = row
        yield from _families("kubelet_pod_ephemeral_storage", "ephemeral storage of a pod", pods)
        yield from _families("kubelet_pod_emptydir", "an emptyDir volume", volumes)


def _families(name: str, what: str, rows: dict[tuple[str, ...], PodStorageRow]) -> Iterator[Metric]:
    labels = ["namespace", "pod", "volume"] if name.endswith("emptydir") else ["namespace", "pod"]
    used = GaugeMetricFamily(f"{name}_used_bytes", f"Usage of {what} in bytes.", labels=labels)
    inodes = GaugeMetricFamily(f"{name}_inodes_used", f"Inodes used by {what}.", labels=labels)
    limit = GaugeMetricFamily(f"{name}_limit_bytes", f"Limit of {what} in bytes.", labels=labels)
    for key, row in sorted(rows.items()):
        used.add_metric(key, row.used)
        if row.inodes is not None:
            inodes.add_metric(key, row.inodes)
        if row.limit is not None:
            limit.add_metric(key, row.limit)
    yield from (used, inodes, limit)
