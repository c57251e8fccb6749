"""Shared parts of the metrics: default buckets of Kubernetes, a counter without `_total`, the text format.

Each package defines its metrics, on the registry of its kubelet, under the names that dashboards and alerts
use; `tests/data/metrics.tsv` lists them, and those that are planned.
"""

from __future__ import annotations

import math

from prometheus_client import Gauge

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Default buckets of durations in Kubernetes, which differ from those of the Python library."""


class PlainCounter(Gauge):
    """A counter whose name does not end in `_total`, which the library's Counter would append."""

    _type = "counter"


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus text format."""
_VALUE_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def escape_label(value: str) -> str:
    """Return a label value for the text format; undecodable bytes (surrogates) become U+FFFD."""
    if not value.isascii():
        value = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return value.translate(_VALUE_ESCAPES)


def header(name: str, kind: str, text: str) -> str:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {text.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"


def format_number(value: float) -> str:
    """Format a number so that Go can parse it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
