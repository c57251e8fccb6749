"""Metrics of the ephemeral storage of pods, on `/metrics` (kubernetes/kubernetes#69507).

The upstream kubelet reports these values only in the Summary API. Here they are Prometheus metrics, so that
an alert can fire before the eviction manager evicts a pod that reaches its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pykubelet.util.metrics import GaugeSlices, SlicedCollector

_STEP_ROWS = 16
"""Rows that are computed before other tasks may run."""


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


_Rows = dict[tuple[str, ...], PodStorageRow]
_Amount = Callable[[PodStorageRow], int | None]


class PodStorageMetrics(SlicedCollector):
    """Collector of the latest measured ephemeral storage, at each scrape."""

    def __init__(self, rows: Callable[[], Iterable[PodStorageRow]]) -> None:
        """Initialize; `rows` returns what was measured last and must not measure."""
        self._rows = rows

    def slices(self) -> Iterator[GaugeSlices | None]:
        """Yield the current metrics; of rows with equal names the last one counts."""
        pods: _Rows = {}
        volumes: _Rows = {}
        for count, row in enumerate(self._rows(), start=1):
            if row.volume:
                volumes[row.namespace, row.pod, row.volume] = row
            else:
                pods[row.namespace, row.pod] = row
            if count % _STEP_ROWS == 0:
                yield None
        labels = ("namespace", "pod")
        yield from _gauges("kubelet_pod_ephemeral_storage", "ephemeral storage of a pod", labels, pods)
        yield from _gauges("kubelet_pod_emptydir", "an emptyDir volume", (*labels, "volume"), volumes)


def _gauges(name: str, what: str, labels: Sequence[str], rows: _Rows) -> Iterator[GaugeSlices]:
    def gauge(suffix: str, text: str, amount: _Amount) -> GaugeSlices:
        def series() -> Iterator[tuple[Sequence[str], float]]:
            for key, row in sorted(rows.items()):
                if (value := amount(row)) is not None:
                    yield key, value

        return GaugeSlices(f"{name}_{suffix}", text, labels, series)

    yield gauge("used_bytes", f"Usage of {what} in bytes.", lambda row: row.used)
    yield gauge("inodes_used", f"Inodes used by {what}.", lambda row: row.inodes)
    yield gauge("limit_bytes", f"Limit of {what} in bytes.", lambda row: row.limit)
