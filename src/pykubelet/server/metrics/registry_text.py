"""Prometheus text of a registry, rendered in slices between which other tasks run.

The library collects all samples and writes them in one go, which takes tens of milliseconds on a busy node.
Here the families are sorted by name before their samples are read. The samples of a metric of the library,
and those of a `SlicedCollector`, are read while they are written, so a page needs memory for one chunk. Other
collectors are bounded (constants, totals, plugins): their families are kept until their turn.

The library's writer also appends `_total` to every counter and adds `_created` series, which upstream's
metrics do not have. A metric without samples is omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

from pykubelet.util.metrics import SlicedCollector, escape_label, format_number, header

MAX_CHUNK_SAMPLES = 64
"""Samples that are rendered between two chunks, which takes less than a millisecond."""
_CREATED = "_created"
_TOTAL = "_total"
_BOUND = "le"


class _Family(NamedTuple):
    """A metric whose samples are read when it is written."""

    name: str
    kind: str
    help: str
    lines: Callable[[], Iterable[str]]


def registry_chunks(
    registry: CollectorRegistry, is_included: Callable[[str], bool], *others: CollectorRegistry
) -> Iterator[bytes]:
    """Yield the included metrics of a registry, and all of others, sorted by name; the first are empty.

    The caller may run other tasks after each chunk. Names are those of the library, without `_total`.
    """
    families: list[_Family] = []
    for found in _families(registry, is_included):
        if found is None:
            yield b""
        else:
            families.append(found)
    for other in others:
        families += filter(None, _families(other, lambda _: True))
    families.sort(key=lambda family: family.name, reverse=True)
    lines: list[str] = []
    while families:
        family = families.pop()  # so that its samples are released
        head = header(family.name, family.kind, family.help)
        for line in family.lines():
            lines.append(head + line)
            head = ""
            if len(lines) >= MAX_CHUNK_SAMPLES:
                yield "".join(lines).encode()
                lines.clear()
    if lines:
        yield "".join(lines).encode()


def text_format(metrics: Iterable[Metric]) -> bytes:
    """Return collected metrics in Prometheus text format, sorted by name."""
    families = sorted(map(_collected, metrics), key=lambda family: family.name)
    return "".join(
        header(family.name, family.kind, family.help) + lines
        for family in families
        if (lines := "".join(family.lines()))
    ).encode()


def _families(registry: CollectorRegistry, is_included: Callable[[str], bool]) -> Iterator[_Family | None]:
    """Yield the families of a registry, and None where other tasks may run."""
    # The library has no other way to its collectors than to collect from all of them.
    for collector in tuple(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            for metric in collector.describe():
                if is_included(metric.name):
                    yield _wrapped(collector, metric)
        elif isinstance(collector, SlicedCollector):
            for gauge in collector.slices():
                if gauge is None:
                    yield None
                elif is_included(gauge.name):
                    yield _Family(gauge.name, "gauge", gauge.help, partial(map, _line, gauge.samples()))
        else:
            for metric in collector.collect():
                if is_included(metric.name):
                    yield _collected(metric)
                yield None


def _wrapped(collector: MetricWrapperBase, metric: Metric) -> _Family:
    name = metric.name + _TOTAL if isinstance(collector, Counter) else metric.name

    def lines() -> Iterator[str]:
        if not collector._labelnames:
            yield from _child_lines(metric.name, {}, collector)
            return
        with collector._lock:
            children = list(collector._metrics.items())
        for values, child in children:
            yield from _child_lines(metric.name, dict(zip(collector._labelnames, values, strict=True)), child)

    return _Family(name, metric.type, metric.documentation, lines)


def _child_lines(name: str, labels: Mapping[str, str], child: MetricWrapperBase) -> Iterator[str]:
    """Yield the lines of one set of labels, which are rendered once; a histogram is read in one go."""
    text = _labels(labels)
    before = [*_pairs((name, value) for name, value in labels.items() if name < _BOUND), f'{_BOUND}="']
    after = ['"', *_pairs((name, value) for name, value in labels.items() if name > _BOUND)]
    start, end = "{" + ",".join(before), ",".join(after) + "}"
    for sample in child._samples():
        if sample.name == _CREATED:
            continue
        shown = text
        if sample.labels:
            bound = sample.labels.get(_BOUND)
            shown = f"{start}{_bound(bound)}{end}" if bound else _labels({**labels, **sample.labels})
        yield f"{name}{sample.name}{shown} {format_number(sample.value)}\n"


def _collected(metric: Metric) -> _Family:
    """Return a collected metric; the library strips `_total` from the names of counters."""
    samples = [sample for sample in metric.samples if sample.name != metric.name + _CREATED]
    name, total = metric.name, metric.name + _TOTAL
    if metric.type == "counter" and any(sample.name == total for sample in samples):
        name = total
    return _Family(name, metric.type, metric.documentation, partial(map, _line, samples))


def _line(sample: Sample) -> str:
    return f"{sample.name}{_labels(sample.labels)} {format_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    if bound := labels.get(_BOUND):
        labels = {**labels, _BOUND: _bound(bound)}
    return "{" + ",".join(_pairs(labels.items())) + "}"


def _pairs(labels: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f'{name}="{escape_label(value)}"' for name, value in sorted(labels))


def _bound(bound: str) -> str:
    # Prometheus compares bucket bounds as strings, and Go clients write 1, not 1.0.
    return bound.removesuffix(".0")
