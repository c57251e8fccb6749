"""What the rooms' metrics share: the buckets that Kubernetes takes where it has no opinion, and a counter.

Each room defines its own metrics, on the registry of its agent, under the names that dashboards and
alerts know; `tests/data/metrics.tsv` lists them, and those that are to come.
"""

from __future__ import annotations

from prometheus_client import Gauge

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of durations; not the Python library's own, which are others."""


class PlainCounter(Gauge):
    """A counter whose name does not end in `_total`: the library's counters have no such names."""

    _type = "counter"
