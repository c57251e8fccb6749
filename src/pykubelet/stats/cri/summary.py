"""Usage of pods as the runtime measures it (`ListPodSandboxStats`), for the Summary API. Pure.

Used with the `PodAndContainerStatsFromCRI` feature gate where the runtime implements the call. Only running
containers and sandboxes that the kubelet knows are listed, as in `summary.py`; their names and start times
are the kubelet's. What the runtime does not report is omitted. CRI has no swap usage of pods: the document
for CPU and memory has the sum of the containers, the complete one omits it, as upstream's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pykubelet.api import stats as api
from pykubelet.api.stats import stats_time
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.stats.samples import Record, Target

_NANOSECONDS = 1e9


class CriPodBuilder:
    """Builds pods from sandbox statistics; `records` are used for their targets only."""

    def __init__(
        self,
        records: Iterable[Record],
        sandboxes: Mapping[str, pb.PodSandboxStats],
        *,
        only_cpu_and_memory: bool,
    ) -> None:
        self._sandboxes = sandboxes
        self._only_cpu_and_memory = only_cpu_and_memory
        self._containers: dict[str, Target] = {}
        self._pods: dict[str, Target] = {}
        for record in records:
            target = record.target
            if target.kind == "container":
                self._containers[target.runtime_id] = target
            elif target.kind == "sandbox":
                known = self._pods.get(target.pod_uid)
                if known is None or target.created >= known.created:
                    self._pods[target.pod_uid] = target

    def pods(self) -> Iterator[tuple[api.PodStats, dict[str, str]]]:
        """Yield the pods without storage, and the ids of their containers by name."""
        for sandbox in self._pods.values():
            reported = self._sandboxes.get(sandbox.runtime_id)
            if reported is None:
                continue
            found = {
                target.container: (target, container)
                for container in reported.linux.containers
                if (target := self._containers.get(container.attributes.id)) is not None
            }
            if found:
                stats = self._pod(sandbox, reported.linux)
                stats.containers = [self._container(*pair) for pair in found.values()]
                if self._only_cpu_and_memory:
                    stats.swap = _sum_swap(stats.containers)
                yield stats, {name: target.runtime_id for name, (target, _) in found.items()}

    def _pod(self, sandbox: Target, usage: pb.LinuxPodSandboxStats) -> api.PodStats:
        stats = api.PodStats(
            pod_ref=api.PodReference(name=sandbox.pod, namespace=sandbox.namespace, uid=sandbox.pod_uid),
            start_time=stats_time(sandbox.created),
            containers=[],
            cpu=_cpu(usage.cpu) if usage.HasField("cpu") else None,
            memory=_memory(usage.memory) if usage.HasField("memory") else None,
        )
        if not self._only_cpu_and_memory:
            stats.io = _io(usage.io) if usage.HasField("io") else None
            stats.network = _network(usage.network) if usage.HasField("network") else None
            if usage.HasField("process"):
                stats.process_stats = api.ProcessStats(process_count=_value(usage.process, "process_count"))
        return stats

    def _container(self, target: Target, usage: pb.ContainerStats) -> api.ContainerStats:
        with_io = not self._only_cpu_and_memory and usage.HasField("io")
        return api.ContainerStats(
            name=target.container,
            start_time=stats_time(target.created),
            cpu=_cpu(usage.cpu) if usage.HasField("cpu") else None,
            memory=_memory(usage.memory) if usage.HasField("memory") else None,
            io=_io(usage.io) if with_io else None,
            swap=_swap(usage.swap) if usage.HasField("swap") else None,
        )


_Usage = pb.CpuUsage | pb.MemoryUsage | pb.SwapUsage | pb.ProcessUsage | pb.NetworkInterfaceUsage


def _value(usage: _Usage, name: str) -> int | None:
    if not usage.HasField(name):
        return None
    value: int = getattr(usage, name).value
    return value


def _cpu(usage: pb.CpuUsage) -> api.CPUStats:
    return api.CPUStats(
        time=stats_time(usage.timestamp / _NANOSECONDS),
        usage_nano_cores=_value(usage, "usage_nano_cores"),
        usage_core_nano_seconds=_value(usage, "usage_core_nano_seconds"),
        psi=_psi(usage),
    )


def _memory(usage: pb.MemoryUsage) -> api.MemoryStats:
    return api.MemoryStats(
        time=stats_time(usage.timestamp / _NANOSECONDS),
        available_bytes=_value(usage, "available_bytes"),
        usage_bytes=_value(usage, "usage_bytes"),
        working_set_bytes=_value(usage, "working_set_bytes"),
        rss_bytes=_value(usage, "rss_bytes"),
        page_faults=_value(usage, "page_faults"),
        major_page_faults=_value(usage, "major_page_faults"),
        psi=_psi(usage),
    )


def _io(usage: pb.IoUsage) -> api.IOStats:
    return api.IOStats(time=stats_time(usage.timestamp / _NANOSECONDS), psi=_psi(usage))


def _swap(usage: pb.SwapUsage) -> api.SwapStats:
    return api.SwapStats(
        time=stats_time(usage.timestamp / _NANOSECONDS),
        swap_available_bytes=_value(usage, "swap_available_bytes"),
        swap_usage_bytes=_value(usage, "swap_usage_bytes"),
    )


def _sum_swap(containers: Iterable[api.ContainerStats]) -> api.SwapStats | None:
    parts = [container.swap for container in containers if container.swap is not None]
    if not parts:
        return None
    return api.SwapStats(
        time=parts[-1].time,
        swap_available_bytes=sum(part.swap_available_bytes or 0 for part in parts),
        swap_usage_bytes=sum(part.swap_usage_bytes or 0 for part in parts),
    )


def _network(usage: pb.NetworkUsage) -> api.NetworkStats:
    default = _interface(usage.default_interface)
    return api.NetworkStats(
        time=stats_time(usage.timestamp / _NANOSECONDS),
        name=default.name,
        rx_bytes=default.rx_bytes,
        rx_errors=default.rx_errors,
        tx_bytes=default.tx_bytes,
        tx_errors=default.tx_errors,
        interfaces=[_interface(interface) for interface in usage.interfaces],
    )


def _interface(usage: pb.NetworkInterfaceUsage) -> api.InterfaceStats:
    return api.InterfaceStats(
        name=usage.name,
        rx_bytes=_value(usage, "rx_bytes"),
        rx_errors=_value(usage, "rx_errors"),
        tx_bytes=_value(usage, "tx_bytes"),
        tx_errors=_value(usage, "tx_errors"),
    )


def _psi(usage: pb.CpuUsage | pb.MemoryUsage | pb.IoUsage) -> api.PSIStats | None:
    if not usage.HasField("psi"):
        return None
    return api.PSIStats(full=_psi_data(usage.psi.Full), some=_psi_data(usage.psi.Some))


def _psi_data(data: pb.PsiData) -> api.PSIData:
    return api.PSIData(total=data.Total, avg10=data.Avg10, avg60=data.Avg60, avg300=data.Avg300)
