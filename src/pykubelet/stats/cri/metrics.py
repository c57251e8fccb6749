"""Prometheus text of the metrics that the runtime collects itself (`ListPodSandboxMetrics`). Pure.

With the `PodAndContainerStatsFromCRI` feature gate, a runtime that implements the call provides the container
metrics of `/metrics/cadvisor`. Names, labels and help come from its descriptors. A metric without a
descriptor, with another number of labels, or with an invalid name is skipped: one bad line would make
Prometheus reject the response as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.logs import get_logger
from pykubelet.util.metrics import escape_label, header

log = get_logger(__name__)
SAMPLES_PER_PIECE = 256
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_NANOSECONDS_PER_MILLISECOND = 1_000_000
_TYPES = {pb.COUNTER: "counter", pb.GAUGE: "gauge"}


def render_cri_metrics(
    descriptors: Iterable[pb.MetricDescriptor], pods: Iterable[pb.PodSandboxMetrics]
) -> Iterator[bytes]:
    """Yield the exposition in pieces of at most `SAMPLES_PER_PIECE` samples, sorted by metric name."""
    by_name = {described.name: described for described in descriptors if _is_valid(described)}
    found: dict[str, list[pb.Metric]] = {}
    for metric in _metrics(pods):
        if metric.name in by_name:
            found.setdefault(metric.name, []).append(metric)
        else:
            log.v(5).info("Skipped runtime metric without descriptor", name=metric.name)
    for name in sorted(found):
        yield from _family(by_name[name], found[name])


def _metrics(pods: Iterable[pb.PodSandboxMetrics]) -> Iterator[pb.Metric]:
    for pod in pods:
        yield from pod.metrics
        for container in pod.container_metrics:
            yield from container.metrics


def _is_valid(described: pb.MetricDescriptor) -> bool:
    keys = described.label_keys
    return (
        _METRIC_NAME.fullmatch(described.name) is not None
        and all(_LABEL_NAME.fullmatch(key) for key in keys)
        and len(set(keys)) == len(keys)
    )


def _family(described: pb.MetricDescriptor, metrics: Sequence[pb.Metric]) -> Iterator[bytes]:
    kind = metrics[0].metric_type
    order = sorted(range(len(described.label_keys)), key=lambda index: described.label_keys[index])
    heading = header(described.name, _TYPES.get(kind, "untyped"), f"[INTERNAL] {described.help}")
    lines = heading.splitlines(keepends=True)
    seen = set()
    for metric in metrics:
        values = metric.label_values
        if len(values) != len(order) or metric.metric_type != kind:
            continue
        labels = ",".join(f'{described.label_keys[index]}="{escape_label(values[index])}"' for index in order)
        if labels in seen:
            continue
        seen.add(labels)
        time = f" {metric.timestamp // _NANOSECONDS_PER_MILLISECOND}" if metric.timestamp else ""
        lines.append(f"{described.name}{{{labels}}} {metric.value.value}{time}\n")
        if len(lines) >= SAMPLES_PER_PIECE:
            yield "".join(lines).encode()
            lines.clear()
    if lines:
        yield "".join(lines).encode()
