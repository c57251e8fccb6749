"""Text of `/metrics/resource`: CPU, memory and swap of the node, its pods and their containers.

metrics-server reads it. The metrics and labels are upstream's; as there, `scrape_error` is hidden unless
`showHiddenMetricsForVersion` is set. With pod statistics of the runtime (`PodAndContainerStatsFromCRI`), pods
and containers are reported from these, each value with its own time; what the runtime does not report is
omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from pykubelet.cri import runtime_pb2 as pb
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
from pykubelet.stats.samples import UNLIMITED, Record, Target, Usage

_STEP_RECORDS = 64
_NANOSECONDS = 1e9


class ResourcePage:
    """Rows of one page; of records with equal labels only the newest has rows."""

    def __init__(self, *, has_error: bool) -> None:
        self.has_error = has_error
        self._reported: _Reported | None = None
        self.node: list[Row] = []
        # A cgroup is one row for all three; the runtime may report only some of them.
        self.pod_cpu: list[Row] = []
        self.pod_memory = self.pod_swap = self.pod_cpu
        self.container_cpu: list[Row] = []
        self.container_memory = self.container_swap = self.container_cpu
        self.started: list[Row] = []
        self.swap_limits: list[Row] = []

    def load(
        self, records: Sequence[Record], sandboxes: Mapping[str, pb.PodSandboxStats] | None = None
    ) -> Iterator[None]:
        """Add the records, sorted as in the page; yield every few records.

        `sandboxes` (by id) replaces the samples of pods and containers.
        """
        if sandboxes is not None:
            self._reported = _Reported(records, sandboxes)
            self.pod_memory, self.pod_swap = [], []
            self.container_memory, self.container_swap = [], []
            yield
        newest: dict[tuple[str, ...], Record] = {}
        for record in records:
            target = record.target
            if target.kind not in ("root", "pod", "container"):
                continue
            if record.usage is None and (sandboxes is None or target.kind == "root"):
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
        if self._reported is not None and target.kind != "root":
            self._add_reported(target, label_texts(record).resource)
            return
        if usage is None:
            return
        time = stamp(usage.time)
        if target.kind == "root":
            self.node.append(("", usage, time))
            return
        labels = label_texts(record).resource
        if target.kind == "pod":
            self.pod_cpu.append((labels, usage, time))
            return
        self.container_cpu.append((labels, usage, time))
        if target.created >= 1:
            self.started.append((labels, target.created, ""))
        if limits.memory_swap_limit <= UNLIMITED:
            self.swap_limits.append((labels, limits.memory_swap_limit, time))

    def _add_reported(self, target: Target, labels: str) -> None:
        """Add what the runtime reports of a pod or container."""
        assert self._reported is not None
        if target.kind == "pod":
            sandbox = self._reported.pods.get(target.pod_uid)
            if sandbox is not None:
                _add_cpu(self.pod_cpu, labels, sandbox.linux)
                _add_memory(self.pod_memory, labels, sandbox.linux)
                _add_swap(self.pod_swap, labels, sandbox.linux.containers)
            return
        container = self._reported.containers.get(target.runtime_id)
        if container is None:
            return
        _add_cpu(self.container_cpu, labels, container)
        _add_memory(self.container_memory, labels, container)
        _add_swap(self.container_swap, labels, [container])
        if target.created >= 1:
            self.started.append((labels, target.created, ""))
        swap = container.swap
        if swap.HasField("swap_available_bytes"):
            limit = swap.swap_available_bytes.value + swap.swap_usage_bytes.value
            self.swap_limits.append((labels, limit, stamp(swap.timestamp / _NANOSECONDS)))


class _Reported:
    """Statistics of the runtime: of sandboxes by pod uid, of the newest one, and of containers by id."""

    def __init__(self, records: Iterable[Record], sandboxes: Mapping[str, pb.PodSandboxStats]) -> None:
        newest: dict[str, Target] = {}
        for target in (record.target for record in records if record.target.kind == "sandbox"):
            known = newest.get(target.pod_uid)
            if known is None or target.created >= known.created:
                newest[target.pod_uid] = target
        self.pods = {
            uid: sandboxes[target.runtime_id]
            for uid, target in newest.items()
            if target.runtime_id in sandboxes
        }
        self.containers = {
            container.attributes.id: container
            for sandbox in self.pods.values()
            for container in sandbox.linux.containers
        }


def _add_cpu(rows: list[Row], labels: str, stats: pb.LinuxPodSandboxStats | pb.ContainerStats) -> None:
    cpu = stats.cpu
    if cpu.HasField("usage_core_nano_seconds"):
        time = cpu.timestamp / _NANOSECONDS
        usage = Usage(time=time, cpu=cpu.usage_core_nano_seconds.value, memory=0, working_set=0)
        rows.append((labels, usage, stamp(time)))


def _add_memory(rows: list[Row], labels: str, stats: pb.LinuxPodSandboxStats | pb.ContainerStats) -> None:
    memory = stats.memory
    if memory.HasField("working_set_bytes"):
        time = memory.timestamp / _NANOSECONDS
        usage = Usage(time=time, cpu=0, memory=0, working_set=memory.working_set_bytes.value)
        rows.append((labels, usage, stamp(time)))


def _add_swap(rows: list[Row], labels: str, containers: Iterable[pb.ContainerStats]) -> None:
    """Add the sum of the containers: CRI has no swap usage of pods."""
    known = [each.swap for each in containers if each.swap.HasField("swap_usage_bytes")]
    if known:
        time = known[-1].timestamp / _NANOSECONDS
        total = sum(swap.swap_usage_bytes.value for swap in known)
        rows.append((labels, Usage(time=time, cpu=0, memory=0, working_set=0, swap=total), stamp(time)))


def _creation(record: Record) -> float:
    return record.target.created or record.limits.created


def _node(name: str, kind: Kind, text: str, value: Value) -> Family[ResourcePage]:
    def lines(name: str, page: ResourcePage) -> Iterator[str]:
        for _, usage, time in page.node:
            yield f"{name} {value(usage)}{time}\n"

    return multiple(name, kind, text, lines)


def _cpu_seconds(usage: Usage) -> float:
    return usage.cpu / _NANOSECONDS


_working_set: Value = attrgetter("working_set")
_swap: Value = attrgetter("swap")
_ERROR_HELP = "1 if statistics could not be read."

_FAMILIES: tuple[Family[ResourcePage], ...] = (
    plain(
        "container_cpu_usage_seconds_total",
        "counter",
        "CPU time used, in seconds.",
        attrgetter("container_cpu"),
        _cpu_seconds,
    ),
    plain(
        "container_memory_working_set_bytes",
        "gauge",
        "Memory usage in bytes without inactive page cache.",
        attrgetter("container_memory"),
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
    plain("container_swap_usage_bytes", "gauge", "Swap usage in bytes.", attrgetter("container_swap"), _swap),
    _node("node_cpu_usage_seconds_total", "counter", "CPU time used on the node, in seconds.", _cpu_seconds),
    _node(
        "node_memory_working_set_bytes",
        "gauge",
        "Memory usage of the node in bytes without inactive page cache.",
        _working_set,
    ),
    _node("node_swap_usage_bytes", "gauge", "Swap usage of the node in bytes.", _swap),
    plain(
        "pod_cpu_usage_seconds_total",
        "counter",
        "CPU time used by the pod, in seconds.",
        attrgetter("pod_cpu"),
        _cpu_seconds,
    ),
    plain(
        "pod_memory_working_set_bytes",
        "gauge",
        "Memory usage of the pod in bytes without inactive page cache.",
        attrgetter("pod_memory"),
        _working_set,
    ),
    plain("pod_swap_usage_bytes", "gauge", "Swap usage of the pod in bytes.", attrgetter("pod_swap"), _swap),
    constant("resource_scrape_error", _ERROR_HELP, lambda page: int(page.has_error)),
)
_ALL_FAMILIES: tuple[Family[ResourcePage], ...] = (
    *_FAMILIES,
    constant("scrape_error", f"(Deprecated since 1.29.0) {_ERROR_HELP}", lambda page: int(page.has_error)),
)
"""Families with those that upstream has deprecated so long ago that it hides them."""


def resource_chunks(
    records: Sequence[Record],
    *,
    sandboxes: Mapping[str, pb.PodSandboxStats] | None = None,
    has_error: bool = False,
    show_hidden: bool = False,
) -> Iterator[bytes]:
    """Yield the page in chunks of at most `MAX_CHUNK_BYTES`; the first ones may be empty.

    `sandboxes` (by id) replaces the samples of pods and containers; `show_hidden` adds the metrics that
    upstream hides. The caller may run other tasks after each chunk.
    """
    page = ResourcePage(has_error=has_error)
    for _ in page.load(records, sandboxes):
        yield b""
    yield from chunks(_ALL_FAMILIES if show_hidden else _FAMILIES, page)
