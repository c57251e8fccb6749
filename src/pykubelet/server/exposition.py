"""`/metrics` and `/metrics/probes`: the agent's numbers, in the text format that Prometheus reads.

Probes have a page of their own, because they have a series for each container. The format is written
here and not by the library, whose writer renames every counter to end in `_total` and adds the time
at which each series began: scrapers expect neither. A metric without series is not mentioned.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PROBES = "prober_"
_EVERYWHERE = "process_start_time_seconds"
_BEGAN = "_created"
_TOTAL = "_total"
_IN_VALUES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def metrics_routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """Routes for the metrics of one registry."""

    def page(wanted: Callable[[str], bool]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            chosen = (metric for metric in registry.collect() if wanted(metric.name))
            return web.Response(body=text_format(chosen), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

        return answer

    return [
        web.get("/metrics", page(lambda name: not name.startswith(_PROBES))),
        web.get("/metrics/probes", page(lambda name: name.startswith(_PROBES) or name == _EVERYWHERE)),
    ]


def text_format(metrics: Iterable[Metric]) -> bytes:
    """Write metrics, ordered by name."""
    return "".join(line for metric in sorted(metrics, key=_name) for line in _lines(metric)).encode()


def _lines(metric: Metric) -> Iterator[str]:
    samples = [sample for sample in metric.samples if sample.name != metric.name + _BEGAN]
    if not samples:
        return
    name = _name(metric)
    yield f"# HELP {name} {metric.documentation.translate(_IN_HELP)}\n"
    yield f"# TYPE {name} {metric.type}\n"
    for sample in samples:
        yield f"{sample.name}{_labels(sample)} {_number(sample.value)}\n"


def _name(metric: Metric) -> str:
    """The name of the whole; the library takes the end off those of its counters."""
    total = metric.name + _TOTAL
    if metric.type == "counter" and any(sample.name == total for sample in metric.samples):
        return total
    return str(metric.name)


def _number(value: float) -> str:
    """A number, as Go reads it, too."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    labels = sample.labels
    if bound := labels.get("le"):
        # The upper bound of a bucket is a text to Prometheus, and everybody else writes 1, not 1.0.
        labels = {**labels, "le": bound.removesuffix(".0")}
    pairs = (f'{name}="{value.translate(_IN_VALUES)}"' for name, value in sorted(labels.items()))
    return "{" + ",".join(pairs) + "}"
