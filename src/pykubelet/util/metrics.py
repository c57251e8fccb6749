"""Shared parts of the metrics: the default buckets of Kubernetes, and a counter without `_total`.

Each package defines its metrics, on the registry of its kubelet, under the names that dashboards and alerts
use; `tests/data/metrics.tsv` lists them, and those that are planned.
"""

from __future__ import annotations

from prometheus_client import Gauge

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Default buckets of durations in Kubernetes, which differ from those of the Python library."""


class PlainCounter(Gauge):
    """A counter whose name does not end in `_total`, which the library's Counter would append."""

    _type = "counter"
