"""Tables of resource usage: rows of pods, of a pod's containers and of the node; columns and order.

All functions are pure. Rows hold numbers, columns format them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.quantity import Quantity
from pykubelet.api.stats import ContainerStats, NodeStats, PodReference, PodStats, Summary
from pykubelet.cli.client import all_containers
from pykubelet.cli.pods.logs import container_status
from pykubelet.cli.pods.usage import (
    MISSING,
    NO_TRAFFIC,
    Traffic,
    container_storage,
    format_cpu,
    format_memory,
    format_rate,
    format_share,
    format_size,
    memory_capacity,
    nano_cores,
    pod_nano_cores,
    pod_working_set,
    pressure,
    share,
    swap_usage,
    used_bytes,
    working_set,
)
from pykubelet.cli.printers import (
    escape_unprintable,
    is_finished,
    restart_count,
    restarts,
    restarts_text,
)
from pykubelet.cm.qos import declared_limit, pod_requests
from pykubelet.server.pods import NodePods

View = Literal["pod", "container", "node"]
"""What the rows of a table are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Usage of a pod, a container or the node; None is not measured, or for limits and requests not set."""

    name: str
    namespace: str = ""
    cpu: int | None = None
    cpu_limit: int | None = None
    cpu_request: int | None = None
    memory: int | None = None
    memory_limit: int | None = None
    memory_request: int | None = None
    rss: int | None = None
    swap: int | None = None
    storage: int | None = None
    network: Traffic = NO_TRAFFIC
    processes: int | None = None
    restart_count: int | None = None
    restarts: str = MISSING
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether CPU or memory are known."""
        return self.cpu is not None or self.memory is not None


def pod_rows(node: NodePods, summary: Summary, network: dict[str, Traffic], now: datetime) -> list[UsageRow]:
    """Return a row for each pod that is measured or has not finished; `network` is by uid."""
    pods = {pod.uid: pod for pod in node.pods}
    measured = {stats.pod_ref.uid for stats in summary.pods}
    rows = [
        _pod_row(pods.get(stats.pod_ref.uid), stats, network.get(stats.pod_ref.uid, NO_TRAFFIC), now)
        for stats in summary.pods
    ]
    for pod in node.pods:
        if pod.uid not in measured and not is_finished(pod):
            rows.append(_pod_row(pod, _not_measured(pod), NO_TRAFFIC, now))
    return rows


def container_rows(pod: Pod, stats: PodStats | None, now: datetime) -> list[UsageRow]:
    """Return a row for each container that is measured, and for containers and sidecars that are not."""
    measured = {found.name: found for found in stats.containers} if stats is not None else {}
    rows = []
    for container in all_containers(pod):
        found = measured.pop(container.name, None)
        if found is None and container in pod.spec.init_containers and not is_sidecar(container):
            continue
        limits, requests = container.resources.limits, container.resources.requests
        status = container_status(pod, container.name)
        rows.append(
            _container_row(
                found or ContainerStats(name=container.name, start_time=None),
                cpu_limit=_nanos(limits.get("cpu")),
                cpu_request=_nanos(requests.get("cpu")),
                memory_limit=_units(limits.get("memory")),
                memory_request=_units(requests.get("memory")),
                restart_count=status.restart_count if status is not None else None,
                restarts=restarts_text([status], now) if status is not None else MISSING,
            )
        )
    return rows + [_container_row(found) for found in measured.values()]


def node_rows(stats: NodeStats, network: Traffic, cores: int | None) -> list[UsageRow]:
    """Return a row for the node and one for each system container; limits are the node's capacity."""
    capacity: dict[str, Any] = {
        "cpu_limit": cores * 10**9 if cores else None,
        "memory_limit": memory_capacity(stats.memory),
    }
    node = UsageRow(
        name=stats.node_name,
        cpu=nano_cores(stats.cpu),
        memory=working_set(stats.memory),
        rss=stats.memory.rss_bytes if stats.memory is not None else None,
        swap=swap_usage(stats.swap),
        storage=used_bytes(stats.fs),
        network=network,
        processes=stats.rlimit.curproc if stats.rlimit is not None else None,
        cpu_pressure=pressure(stats.cpu),
        memory_pressure=pressure(stats.memory),
        io_pressure=pressure(stats.io),
        **capacity,
    )
    return [node, *(_container_row(found, **capacity) for found in stats.system_containers)]


def _not_measured(pod: Pod) -> PodStats:
    metadata = pod.metadata
    reference = PodReference(name=metadata.name, namespace=metadata.namespace, uid=pod.uid)
    return PodStats(pod_ref=reference, start_time=None, containers=[])


def _pod_row(pod: Pod | None, stats: PodStats, network: Traffic, now: datetime) -> UsageRow:
    requests = pod_requests(pod) if pod is not None else {}
    return UsageRow(
        name=pod.metadata.name if pod is not None else stats.pod_ref.name,
        namespace=pod.metadata.namespace if pod is not None else stats.pod_ref.namespace,
        cpu=pod_nano_cores(stats),
        cpu_limit=_nanos(declared_limit(pod, "cpu")) if pod is not None else None,
        cpu_request=_nanos(requests.get("cpu")),
        memory=pod_working_set(stats),
        memory_limit=_units(declared_limit(pod, "memory")) if pod is not None else None,
        memory_request=_units(requests.get("memory")),
        rss=stats.memory.rss_bytes if stats.memory is not None else None,
        swap=swap_usage(stats.swap),
        storage=used_bytes(stats.ephemeral_storage),
        network=network,
        processes=stats.process_stats.process_count if stats.process_stats is not None else None,
        restart_count=restart_count(pod) if pod is not None else None,
        restarts=restarts(pod, now) if pod is not None else MISSING,
        cpu_pressure=pressure(stats.cpu),
        memory_pressure=pressure(stats.memory),
        io_pressure=pressure(stats.io),
    )


def _container_row(stats: ContainerStats, **fields: Any) -> UsageRow:
    return UsageRow(
        name=stats.name,
        cpu=nano_cores(stats.cpu),
        memory=working_set(stats.memory),
        rss=stats.memory.rss_bytes if stats.memory is not None else None,
        swap=swap_usage(stats.swap),
        storage=container_storage(stats),
        cpu_pressure=pressure(stats.cpu),
        memory_pressure=pressure(stats.memory),
        io_pressure=pressure(stats.io),
        **fields,
    )


def _nanos(quantity: Quantity | None) -> int | None:
    return quantity.nanos if quantity is not None else None


def _units(quantity: Quantity | None) -> int | None:
    return int(quantity) if quantity is not None else None


SORT_KEYS: dict[str, Callable[[UsageRow], int | float | None]] = {
    "cpu": lambda row: row.cpu,
    "memory": lambda row: row.memory,
    "cpu-limit": lambda row: share(row.cpu, row.cpu_limit),
    "memory-limit": lambda row: share(row.memory, row.memory_limit),
    "restarts": lambda row: row.restart_count,
    "network": lambda row: (row.network.received or 0) + (row.network.sent or 0),
    "ephemeral": lambda row: row.storage,
    "name": lambda _: None,
}
"""Value of each sort key: the largest is first, unknown ones are last; equal ones are ordered by name."""


def sort_key(row: UsageRow, sort: str) -> tuple[float, str, str]:
    """Return the key that orders rows by `sort`."""
    value = SORT_KEYS[sort](row)
    return (1 if value is None else -value, row.namespace, row.name)


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `cell` formats it, with more digits if the second argument is true."""

    heading: str
    cell: Callable[[UsageRow, bool], str]
    percent: Callable[[UsageRow], float | None] | None = None
    """Share of a limit, which decides on the colour."""


def columns(view: View, *, wide: bool, rates: bool) -> list[Column]:
    """Return the columns of a view: pod, container or node; `rates` if traffic is per second."""
    cpu_share, memory_share = ("CPU(%)", "MEMORY(%)") if view == "node" else ("CPU/LIMIT", "MEMORY/LIMIT")
    found = [Column("NAME", lambda row, _: row.name)]
    if view == "pod":
        found.append(Column("NAMESPACE", lambda row, _: row.namespace))
    found += [
        Column("CPU(cores)", lambda row, detail: format_cpu(row.cpu, detail=detail)),
        _share_column(cpu_share, SORT_KEYS["cpu-limit"]),
        Column("MEMORY(bytes)", lambda row, detail: format_memory(row.memory, detail=detail)),
        _share_column(memory_share, SORT_KEYS["memory-limit"]),
    ]
    if view != "node":
        found.append(Column("RESTARTS", lambda row, _: row.restarts))
    if view != "container":
        size = format_rate if rates else format_size
        unit = "/s" if rates else ""
        found += [
            Column(f"RX{unit}", lambda row, detail: size(row.network.received, detail=detail)),
            Column(f"TX{unit}", lambda row, detail: size(row.network.sent, detail=detail)),
        ]
    heading = "DISK" if view == "node" else "EPHEMERAL"
    found.append(Column(heading, lambda row, detail: format_size(row.storage, detail=detail)))
    return found + (_wide_columns(view) if wide else [])


def _wide_columns(view: View) -> list[Column]:
    found = []
    if view != "node":
        found += [
            _share_column("CPU/REQUEST", lambda row: share(row.cpu, row.cpu_request), coloured=False),
            _share_column(
                "MEMORY/REQUEST", lambda row: share(row.memory, row.memory_request), coloured=False
            ),
        ]
    found += [
        Column("RSS", lambda row, detail: format_size(row.rss, detail=detail)),
        Column("SWAP", lambda row, detail: format_size(row.swap, detail=detail)),
    ]
    if view != "container":
        found.append(
            Column("PROCESSES", lambda row, _: MISSING if row.processes is None else str(row.processes))
        )
    return [
        *found,
        _share_column("PSI(cpu)", lambda row: row.cpu_pressure, coloured=False),
        _share_column("PSI(memory)", lambda row: row.memory_pressure, coloured=False),
        _share_column("PSI(io)", lambda row: row.io_pressure, coloured=False),
    ]


def _share_column(
    heading: str, percent: Callable[[UsageRow], float | None], *, coloured: bool = True
) -> Column:
    return Column(
        heading,
        lambda row, detail: format_share(percent(row), detail=detail),
        percent if coloured else None,
    )


def node_line(stats: NodeStats, pods: int, cores: int | None) -> str:
    """Return the totals of the node in one line."""
    total = memory_capacity(stats.memory)
    used, capacity = used_bytes(stats.fs), stats.fs.capacity_bytes if stats.fs is not None else None
    cpu, memory = nano_cores(stats.cpu), working_set(stats.memory)
    parts = [
        f"CPU {format_cpu(cpu)} of {cores or '?'} cores ({format_share(share(cpu, (cores or 0) * 10**9))})",
        f"memory {format_memory(memory)} of {format_memory(total)} ({format_share(share(memory, total))})",
        f"disk {format_size(used)} of {format_size(capacity)} ({format_share(share(used, capacity))})",
        f"{pods} pods",
    ]
    name = escape_unprintable(stats.node_name, lines=False)
    return f"Node {name}: {', '.join(parts)}"
