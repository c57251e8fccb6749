"""Shared parts of the metrics: buckets, counters without `_total`, sliced collectors, the text format.

Each package defines its metrics, on the registry of its kubelet, under the names that dashboards and alerts
use; `tests/data/metrics.tsv` lists them, and those that are planned.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Gauge, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Default buckets of durations in Kubernetes, which differ from those of the Python library."""


class PlainCounter(Gauge):
    """A counter whose name does not end in `_total`, which the library's Counter would append."""

    _type = "counter"


@dataclass(frozen=True, slots=True)
class GaugeSlices:
    """A gauge whose series are read when they are written."""

    name: str
    help: str
    labels: Sequence[str]
    series: Callable[[], Iterable[tuple[Sequence[str], float]]]
    """Returns label values and value of each series; it is iterated with other tasks running in between."""

    def samples(self) -> Iterator[Sample]:
        """Yield the samples."""
        for values, value in self.series():
            yield Sample(self.name, dict(zip(self.labels, values, strict=True)), value)


class SlicedCollector(Collector):
    """A collector whose number of series grows with that of pods, read in slices on a scrape."""

    @abstractmethod
    def slices(self) -> Iterator[GaugeSlices | None]:
        """Yield the gauges, and None every few steps of work, where other tasks may run."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges with their series."""
        for gauge in self.slices():
            if gauge is not None:
                family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
                for values, value in gauge.series():
                    family.add_metric(values, value)
                yield family


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
