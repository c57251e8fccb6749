"""Text of `/metrics/resource`: CPU, memory and swap of the node, its pods and their containers.

metrics-server reads it. The metrics and labels are upstream's. Upstream hides `scrape_error` since v1.29,
so it is written only if `show_hidden` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from pykubelet.stats.exposition import (
    Family,
    Kind,
    Row,
    Value,
    chunks,
    constant,
    label_texts,
    multiple,
    plain,
    stamp,
)
from pykubelet.stats.samples import UNLIMITED, Record, Usage

_STEP_RECORDS = 64


class ResourcePage:
    """Rows of one page; of records with equal labels only the newest has rows."""

    def __init__(self, *, has_error: bool) -> None:
        self.has_error = has_error
        self.node: list[Row] = []
        self.pods: list[Row] = []
        self.containers: list[Row] = []
        self.started: list[Row] = []
        self.swap_limits: list[Row] = []

    def load(self, records: Sequence[Record]) -> Iterator[None]:
        """Add the records, sorted as in the page; yield every few records."""
        newest: dict[tuple[str, ...], Record] = {}
        for record in records:
            target = record.target
            if target.kind not in ("root", "pod", "container") or record.usage is None:
                continue
            key: tuple[str, ...] = (target.kind, target.container, target.namespace, target.pod)
            other = newest.get(key)
            if other is None or _creation(other) <= _creation(record):
                newest[key] = record
        yield
        keys = sorted(newest)
        for start in range(0, len(keys), _STEP_RECORDS):
            for key in keys[start : start + _STEP_RECORDS]:
                self._add(newest[key])
            yield

    def _add(self, record: Record) -> None:
        usage, target, limits = record.usage, record.target, record.limits
        if usage is None:
            return
        time = stamp(usage.time)
        if target.kind == "root":
            self.node.append(("", usage, time))
            return
        labels = label_texts(record).resource
        if target.kind == "pod":
            self.pods.append((labels, usage, time))
            return
        self.containers.append((labels, usage, time))
        if target.created >= 1:
            self.started.append((labels, target.created, ""))
        if limits.memory_swap_limit <= UNLIMITED:
            self.swap_limits.append((labels, limits.memory_swap_limit, time))


def _creation(record: Record) -> float:
    return record.target.created or record.limits.created


def _node(name: str, kind: Kind, text: str, value: Value) -> Family[ResourcePage]:
    def lines(name: str, page: ResourcePage) -> Iterator[str]:
        for _, usage, time in page.node:
            yield f"{name} {value(usage)}{time}\n"

    return multiple(name, kind, text, lines)


def _pod(name: str, kind: Kind, text: str, value: Value) -> Family[ResourcePage]:
    return plain(name, kind, text, attrgetter("pods"), value)


def _container(name: str, kind: Kind, text: str, value: Value) -> Family[ResourcePage]:
    return plain(name, kind, text, attrgetter("containers"), value)


def _cpu_seconds(usage: Usage) -> float:
    return usage.cpu / 1e9


_working_set: Value = attrgetter("working_set")
_swap: Value = attrgetter("swap")
_ERROR_HELP = "1 if statistics could not be read."

_FAMILIES: tuple[Family[ResourcePage], ...] = (
    _container("container_cpu_usage_seconds_total", "counter", "CPU time used, in seconds.", _cpu_seconds),
    _container(
        "container_memory_working_set_bytes",
        "gauge",
        "Memory usage in bytes without inactive page cache.",
        _working_set,
    ),
    plain(
        "container_start_time_seconds",
        "gauge",
        "Creation time of the container, in seconds since 1970.",
        attrgetter("started"),
        float,
    ),
    plain("container_swap_limit_bytes", "gauge", "Swap limit in bytes.", attrgetter("swap_limits"), int),
    _container("container_swap_usage_bytes", "gauge", "Swap usage in bytes.", _swap),
    _node("node_cpu_usage_seconds_total", "counter", "CPU time used on the node, in seconds.", _cpu_seconds),
    _node(
        "node_memory_working_set_bytes",
        "gauge",
        "Memory usage of the node in bytes without inactive page cache.",
        _working_set,
    ),
    _node("node_swap_usage_bytes", "gauge", "Swap usage of the node in bytes.", _swap),
    _pod("pod_cpu_usage_seconds_total", "counter", "CPU time used by the pod, in seconds.", _cpu_seconds),
    _pod(
        "pod_memory_working_set_bytes",
        "gauge",
        "Memory usage of the pod in bytes without inactive page cache.",
        _working_set,
    ),
    _pod("pod_swap_usage_bytes", "gauge", "Swap usage of the pod in bytes.", _swap),
    constant("resource_scrape_error", _ERROR_HELP, lambda page: int(page.has_error)),
)
_HIDDEN: Family[ResourcePage] = constant("scrape_error", _ERROR_HELP, lambda page: int(page.has_error))


def resource_chunks(
    records: Sequence[Record], *, has_error: bool = False, show_hidden: bool = False
) -> Iterator[bytes]:
    """Yield the page in chunks of at most `MAX_CHUNK_BYTES`; the first ones may be empty.

    The caller may run other tasks after each chunk.
    """
    page = ResourcePage(has_error=has_error)
    for _ in page.load(records):
        yield b""
    yield from chunks((*_FAMILIES, _HIDDEN) if show_hidden else _FAMILIES, page)
