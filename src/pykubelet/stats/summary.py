"""Builds the Summary API's document from the collector's records and the storage facts. Pure.

Values and their sources are upstream's with cAdvisor connected to the runtime:

| part | source |
|---|---|
| container: cpu, memory, swap, io | its cgroup |
| container: rootfs | writable layer (runtime) and the file system under it |
| container: logs | its log directory, and the file system of the kubelet's root directory |
| pod: cpu, memory, swap, io | the pod's cgroup |
| pod: network | newest sandbox |
| pod: process_stats | sum of its containers, without the sandbox |
| pod: ephemeral-storage | layers, logs, hosts file, and volumes on the node's disk |
| node: cpu, memory, swap, io, network | root cgroup |
| node: runtime | `ImageFsInfo` |

A pod is listed if one of its containers is. What is unknown is omitted; upstream writes 0 for some of it (the
rate of a container that was sampled once). Available memory and swap are never negative, where upstream
writes numbers near 2**64.

With sandbox statistics of the runtime (`PodAndContainerStatsFromCRI`), pods are built from these instead
(`cri/summary.py`).

`encode_summary` yields the document in pieces of one pod, so that the caller can send a large one without
holding it in memory, and other tasks run in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pykubelet.api import stats as api
from pykubelet.api.meta import to_json
from pykubelet.api.stats import stats_time
from pykubelet.stats.cri.runtime_stats import LayerUsage, RuntimeFacts
from pykubelet.stats.cri.summary import CriPodBuilder
from pykubelet.stats.samples import (
    NO_PSI,
    UNLIMITED,
    FilesystemUsage,
    NetworkInterface,
    Psi,
    PsiLine,
    Record,
)
from pykubelet.stats.storage.pod_storage import FileUsage, PodStorage, VolumeUsage

DEFAULT_INTERFACE = "eth0"
ROOT = "/"
SYSTEM_CONTAINERS = ("kubelet", "runtime", "misc", "pods")
"""System containers, in the order of the document."""


class SummaryUnavailable(Exception):
    """Raised when there is no sample of the node yet."""


def _no_volumes(_: str) -> Sequence[VolumeUsage]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryInputs:
    """Facts of one summary; times are seconds since the epoch."""

    node_name: str
    boot_time: float
    """Start time of the node in the document."""
    kubelet_started: float
    """Start time of the system container `kubelet`."""
    records: Sequence[Record]
    """Root, pods, running containers and sandboxes, and the cgroups of system containers."""
    system_containers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Cgroup paths by name (`SYSTEM_CONTAINERS`), as far as configured."""
    root_fs: FilesystemUsage | None = None
    """File system of the kubelet's root directory."""
    filesystems: Mapping[str, FilesystemUsage] = field(default_factory=lambda: MappingProxyType({}))
    """File systems by path, for the paths in `runtime.mount_points()`."""
    runtime: RuntimeFacts = field(default_factory=RuntimeFacts)
    storage: Mapping[str, PodStorage] = field(default_factory=lambda: MappingProxyType({}))
    """Logs and hosts files by pod uid."""
    volumes: Callable[[str], Sequence[VolumeUsage]] = _no_volumes
    """Returns the volumes of a pod by uid, ephemeral ones first."""
    rlimit: api.RlimitStats | None = None
    has_pressure: bool = True
    """Whether pressure stall information is reported (`KubeletPSI`), as zeros where the kernel has none."""


@dataclass(slots=True, eq=False)
class PodRecords:
    """Records of one pod."""

    pod: Record | None = None
    sandbox: Record | None = None
    """The newest one."""
    containers: dict[str, Record] = field(default_factory=dict)
    """The newest one of each name."""


def encode_summary(inputs: SummaryInputs, *, only_cpu_and_memory: bool = False) -> Iterator[bytes]:
    """Yield the document as JSON: first the node, then one piece per pod. Raises SummaryUnavailable."""
    yield b'{"node":' + to_json(node_stats(inputs, only_cpu_and_memory=only_cpu_and_memory)) + b',"pods":['
    separator = b""
    for pod in pod_stats(inputs, only_cpu_and_memory=only_cpu_and_memory):
        yield separator + to_json(pod)
        separator = b","
    yield b"]}"


def build_summary(inputs: SummaryInputs, *, only_cpu_and_memory: bool = False) -> api.Summary:
    """Return the document. Raises SummaryUnavailable."""
    return api.Summary(
        node=node_stats(inputs, only_cpu_and_memory=only_cpu_and_memory),
        pods=list(pod_stats(inputs, only_cpu_and_memory=only_cpu_and_memory)),
    )


# The node


def node_stats(inputs: SummaryInputs, *, only_cpu_and_memory: bool) -> api.NodeStats:
    """Return the node's part of the document. Raises SummaryUnavailable."""
    paths = {ROOT, *inputs.system_containers.values()}
    found = {record.target.path: record for record in inputs.records if record.target.path in paths}
    root = found.get(ROOT)
    if root is None or root.usage is None:
        raise SummaryUnavailable(
            'failed to get root cgroup stats: cgroup stats not found for "/": '
            "unable to find data in memory cache"
        )
    stats = api.NodeStats(
        node_name=inputs.node_name,
        start_time=stats_time(root.limits.created if only_cpu_and_memory else inputs.boot_time),
        system_containers=list(_system_containers(inputs, found, only_cpu_and_memory)),
        cpu=cpu_stats(root),
        memory=memory_stats(root),
        swap=swap_stats(root),
    )
    if not only_cpu_and_memory:
        stats.io = io_stats(root)
        stats.network = network_stats(root)
        if inputs.root_fs is not None:
            stats.fs = fs_stats(root.usage.time, inputs.root_fs)
            stats.fs.used_bytes = inputs.root_fs.used
            stats.fs.inodes_used = inputs.root_fs.inodes_used
        stats.runtime = _runtime_stats(inputs)
        stats.rlimit = inputs.rlimit
    if not inputs.has_pressure:
        _remove_pressure(stats, *stats.system_containers)
    return stats


def _system_containers(
    inputs: SummaryInputs, records: Mapping[str, Record], only_cpu_and_memory: bool
) -> Iterator[api.ContainerStats]:
    for name in SYSTEM_CONTAINERS:
        record = records.get(inputs.system_containers.get(name, ""))
        if record is None or record.usage is None:
            continue
        started = inputs.kubelet_started if name == "kubelet" else record.limits.created
        yield container_stats(name, started, record, only_cpu_and_memory=only_cpu_and_memory)


def _runtime_stats(inputs: SummaryInputs) -> api.RuntimeStats | None:
    images, containers = inputs.runtime.filesystems.images, inputs.runtime.filesystems.containers
    if images is None:
        return None
    image_fs = _layer_stats(images, inputs.filesystems)
    container_fs = image_fs
    if containers is not None and _is_other_device(images, containers, inputs.filesystems):
        container_fs = _layer_stats(containers, inputs.filesystems)
    return api.RuntimeStats(image_fs=image_fs, container_fs=container_fs)


def _is_other_device(
    first: LayerUsage, second: LayerUsage, filesystems: Mapping[str, FilesystemUsage]
) -> bool:
    """Return whether two paths are known to be on different devices (split disks)."""
    left, right = filesystems.get(first.mount_point), filesystems.get(second.mount_point)
    return left is not None and right is not None and (left.major, left.minor) != (right.major, right.minor)


# Pods


def pod_stats(inputs: SummaryInputs, *, only_cpu_and_memory: bool) -> Iterator[api.PodStats]:
    """Yield the pods that have running containers."""
    for stats in _all_pod_stats(inputs, only_cpu_and_memory=only_cpu_and_memory):
        if not inputs.has_pressure:
            _remove_pressure(stats, *stats.containers)
        yield stats


def _all_pod_stats(inputs: SummaryInputs, *, only_cpu_and_memory: bool) -> Iterator[api.PodStats]:
    if inputs.runtime.sandboxes is not None:
        builder = CriPodBuilder(
            inputs.records, inputs.runtime.sandboxes, only_cpu_and_memory=only_cpu_and_memory
        )
        for stats, ids in builder.pods():
            if not only_cpu_and_memory:
                for container in stats.containers:
                    _add_storage(inputs, stats.pod_ref.uid, container, ids[container.name])
                _add_pod_storage(inputs, stats)
            yield stats
        return
    for uid, records in group_by_pod(inputs.records).items():
        if not records.containers:
            continue
        stats = _pod_stats(uid, records, only_cpu_and_memory=only_cpu_and_memory)
        if not only_cpu_and_memory:
            for container in stats.containers:
                target = records.containers[container.name].target
                _add_storage(inputs, uid, container, target.runtime_id)
            _add_pod_storage(inputs, stats)
        yield stats


def group_by_pod(records: Iterable[Record]) -> dict[str, PodRecords]:
    """Return the records of pods, sandboxes and containers by pod uid."""
    pods: dict[str, PodRecords] = {}
    for record in records:
        target = record.target
        if not target.pod_uid:
            continue
        pod = pods.get(target.pod_uid)
        if pod is None:
            pod = pods[target.pod_uid] = PodRecords()
        if target.kind == "container":
            pod.containers[target.container] = _newest(pod.containers.get(target.container), record)
        elif target.kind == "sandbox":
            pod.sandbox = _newest(pod.sandbox, record)
        elif target.kind == "pod":
            pod.pod = record
    return pods


def _newest(known: Record | None, record: Record) -> Record:
    return record if known is None or record.target.created >= known.target.created else known


def _pod_stats(uid: str, records: PodRecords, *, only_cpu_and_memory: bool) -> api.PodStats:
    containers = [
        container_stats(name, record.target.created, record, only_cpu_and_memory=only_cpu_and_memory)
        for name, record in records.containers.items()
    ]
    target = next(iter(records.containers.values())).target
    stats = api.PodStats(
        pod_ref=api.PodReference(name=target.pod, namespace=target.namespace, uid=uid),
        start_time=stats_time(_pod_start(records)),
        containers=containers,
    )
    if records.pod is not None:
        stats.cpu = cpu_stats(records.pod)
        stats.memory = memory_stats(records.pod)
        stats.swap = swap_stats(records.pod)
    if only_cpu_and_memory:
        return stats
    if records.pod is not None:
        stats.io = io_stats(records.pod)
    if records.sandbox is not None:
        stats.network = network_stats(records.sandbox)
    counts = [record.processes for record in records.containers.values() if record.processes is not None]
    if counts:
        stats.process_stats = api.ProcessStats(process_count=sum(counts))
    return stats


def _pod_start(records: PodRecords) -> float:
    """Return the creation time of the newest sandbox; with a runtime without sandboxes, of the cgroup."""
    if records.sandbox is not None and records.sandbox.target.created:
        return records.sandbox.target.created
    if records.pod is not None:
        return records.pod.limits.created
    return min(record.target.created for record in records.containers.values())


# Storage


def _add_storage(inputs: SummaryInputs, uid: str, container: api.ContainerStats, container_id: str) -> None:
    """Set writable layer and logs of a container."""
    layer = inputs.runtime.layers.get(container_id)
    if layer is not None:
        container.rootfs = _layer_stats(layer, inputs.filesystems)
    storage = inputs.storage.get(uid)
    logs = storage.container_logs.get(container.name) if storage is not None else None
    if storage is not None and logs is not None:
        container.logs = _file_stats(storage.time, logs, inputs.root_fs)


def _add_pod_storage(inputs: SummaryInputs, stats: api.PodStats) -> None:
    """Set volumes and ephemeral storage of a pod whose containers are complete."""
    namespace = stats.pod_ref.namespace
    volumes = inputs.volumes(stats.pod_ref.uid)
    stats.volume_stats = [_volume_stats(volume, namespace) for volume in volumes]
    ephemeral: list[api.FsStats] = []
    for container in stats.containers:
        ephemeral += [part for part in (container.rootfs, container.logs) if part is not None]
    ephemeral += [part for part, volume in zip(stats.volume_stats, volumes, strict=True) if volume.ephemeral]
    if (storage := inputs.storage.get(stats.pod_ref.uid)) is not None:
        files = [usage for usage in (storage.pod_logs, storage.hosts) if usage is not None]
        ephemeral += [_file_stats(storage.time, usage, inputs.root_fs) for usage in files]
    stats.ephemeral_storage = _ephemeral_storage(ephemeral, inputs.root_fs)


def _ephemeral_storage(parts: Sequence[api.FsStats], root_fs: FilesystemUsage | None) -> api.FsStats | None:
    times = [part.time for part in parts if part.time is not None]
    if root_fs is not None:
        total = fs_stats(root_fs.time, root_fs)
        times += [total.time] if total.time is not None else []
    elif times:
        total = api.FsStats(time=None)
    else:
        return None
    total.time = max(times, default=None)
    total.used_bytes = _sum(part.used_bytes for part in parts)
    total.inodes_used = _sum(part.inodes_used for part in parts)
    return total


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if all are unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def fs_stats(time: float, filesystem: FilesystemUsage) -> api.FsStats:
    """Return the capacity of a file system, without a usage."""
    return api.FsStats(
        time=stats_time(time),
        available_bytes=filesystem.available,
        capacity_bytes=filesystem.capacity,
        inodes_free=filesystem.inodes_free,
        inodes=filesystem.inodes,
    )


def _layer_stats(layer: LayerUsage, filesystems: Mapping[str, FilesystemUsage]) -> api.FsStats:
    filesystem = filesystems.get(layer.mount_point)
    if filesystem is None:
        stats = api.FsStats(time=stats_time(layer.time))
    else:
        stats = fs_stats(layer.time, filesystem)
    stats.used_bytes, stats.inodes_used = layer.used, layer.inodes_used
    return stats


def _file_stats(time: float, usage: FileUsage, root_fs: FilesystemUsage | None) -> api.FsStats:
    stats = fs_stats(max(time, root_fs.time), root_fs) if root_fs else api.FsStats(time=stats_time(time))
    stats.used_bytes, stats.inodes_used = usage.used, usage.inodes
    return stats


def _volume_stats(volume: VolumeUsage, namespace: str) -> api.VolumeStats:
    measured = volume.stats
    return api.VolumeStats(
        time=stats_time(measured.moment),
        available_bytes=measured.available,
        capacity_bytes=measured.capacity,
        used_bytes=measured.used,
        inodes_free=measured.inodes_free,
        inodes=measured.inodes,
        inodes_used=measured.inodes_used,
        name=volume.name,
        pvc_ref=api.PVCReference(name=volume.claim, namespace=namespace) if volume.claim else None,
        volume_health_stats=(
            api.VolumeHealthStats(abnormal=measured.abnormal) if measured.abnormal is not None else None
        ),
    )


# One cgroup


def container_stats(
    name: str, started: float, record: Record, *, only_cpu_and_memory: bool
) -> api.ContainerStats:
    """Return the usage of a cgroup as that of a container, without file systems."""
    return api.ContainerStats(
        name=name,
        start_time=stats_time(started),
        cpu=cpu_stats(record),
        memory=memory_stats(record),
        io=None if only_cpu_and_memory else io_stats(record),
        swap=swap_stats(record),
    )


def cpu_stats(record: Record) -> api.CPUStats | None:
    """Return the processor usage of a cgroup; None before its first sample."""
    usage = record.usage
    if usage is None:
        return None
    return api.CPUStats(
        time=stats_time(usage.time),
        usage_nano_cores=record.nano_cores,
        usage_core_nano_seconds=usage.cpu,
        psi=_psi(usage.cpu_psi),
    )


def memory_stats(record: Record) -> api.MemoryStats | None:
    """Return the memory usage of a cgroup; None before its first sample."""
    usage = record.usage
    if usage is None:
        return None
    limit = record.limits.memory_limit
    return api.MemoryStats(
        time=stats_time(usage.time),
        available_bytes=max(0, limit - usage.working_set) if 0 < limit <= UNLIMITED else None,
        usage_bytes=usage.memory,
        working_set_bytes=usage.working_set,
        rss_bytes=usage.rss,
        page_faults=usage.page_faults,
        major_page_faults=usage.major_page_faults,
        psi=_psi(usage.memory_psi),
    )


def swap_stats(record: Record) -> api.SwapStats | None:
    """Return the swap usage of a cgroup; None before its first sample."""
    usage = record.usage
    if usage is None:
        return None
    limit = record.limits.memory_swap_limit
    return api.SwapStats(
        time=stats_time(usage.time),
        swap_available_bytes=max(0, limit - usage.swap) if limit <= UNLIMITED else None,
        swap_usage_bytes=usage.swap,
    )


def io_stats(record: Record) -> api.IOStats | None:
    """Return the I/O pressure of a cgroup; None before its first sample."""
    usage = record.usage
    return None if usage is None else api.IOStats(time=stats_time(usage.time), psi=_psi(usage.io_psi))


def network_stats(record: Record) -> api.NetworkStats | None:
    """Return the network usage of the root or of a sandbox; None if it is not measured."""
    if record.network is None:
        return None
    interfaces = [_interface(interface) for interface in record.network]
    default = next((found for found in interfaces if found.name == DEFAULT_INTERFACE), None)
    time = stats_time(record.network_time)
    if default is None:
        return api.NetworkStats(time=time, name="", interfaces=interfaces)
    return api.NetworkStats(
        time=time,
        name=default.name,
        rx_bytes=default.rx_bytes,
        rx_errors=default.rx_errors,
        tx_bytes=default.tx_bytes,
        tx_errors=default.tx_errors,
        interfaces=interfaces,
    )


def _interface(interface: NetworkInterface) -> api.InterfaceStats:
    return api.InterfaceStats(
        name=interface.name,
        rx_bytes=interface.rx_bytes,
        rx_errors=interface.rx_errors,
        tx_bytes=interface.tx_bytes,
        tx_errors=interface.tx_errors,
    )


def _remove_pressure(*parts: api.NodeStats | api.PodStats | api.ContainerStats) -> None:
    for part in parts:
        part.io = None
        if part.cpu is not None:
            part.cpu.psi = None
        if part.memory is not None:
            part.memory.psi = None


def _psi(psi: Psi) -> api.PSIStats:
    if psi is NO_PSI:
        return _ZERO_PSI
    return api.PSIStats(full=_psi_data(psi.full), some=_psi_data(psi.some))


def _psi_data(line: PsiLine) -> api.PSIData:
    return api.PSIData(total=line.total, avg10=line.avg10, avg60=line.avg60, avg300=line.avg300)


_ZERO_PSI = api.PSIStats(full=_psi_data(PsiLine()), some=_psi_data(PsiLine()))
