"""Facts of summaries for tests: made-up pods, and those of the recorded summary."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from pykubelet.api.meta import from_json
from pykubelet.api.stats import RlimitStats, Summary
from pykubelet.stats.cri.runtime_stats import ImageFilesystems, LayerUsage, RuntimeFacts
from pykubelet.stats.samples import (
    FilesystemUsage,
    Limits,
    NetworkInterface,
    Record,
    Target,
    TargetKind,
    Usage,
)
from pykubelet.stats.storage.pod_storage import FileUsage, PodStorage, VolumeUsage
from pykubelet.stats.summary import SummaryInputs
from pykubelet.volumes.usage import VolumeStats
from tests.support.golden import GOLDEN

NOW = 1_800_000_000.0
NO_LIMIT = 9223372036854771712
LAYERS = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"
ROOT_FS = FilesystemUsage(
    time=NOW,
    device="/dev/vda",
    major=254,
    minor=0,
    capacity=1000,
    available=600,
    used=400,
    inodes=100,
    inodes_free=70,
)


def usage(**values: Any) -> Usage:
    return Usage(**{"time": NOW, "cpu": 5_000, "memory": 300, "working_set": 200, "rss": 100} | values)


def eth0(name: str = "eth0", received: int = 7) -> NetworkInterface:
    return NetworkInterface(
        name=name,
        rx_bytes=received,
        rx_packets=1,
        rx_errors=2,
        rx_dropped=0,
        tx_bytes=9,
        tx_packets=1,
        tx_errors=3,
        tx_dropped=0,
    )


def record(
    path: str,
    kind: TargetKind,
    *,
    sample: Usage | None = None,
    limits: Limits | None = None,
    processes: int | None = None,
    network: tuple[NetworkInterface, ...] | None = None,
    nano_cores: int | None = 10,
    **target: Any,
) -> Record:
    return Record(
        target=Target(path=path, kind=kind, **target),
        limits=limits or Limits(created=NOW - 50, memory_limit=NO_LIMIT, memory_swap_limit=NO_LIMIT),
        usage=sample,
        nano_cores=nano_cores if sample is not None else None,
        processes=processes,
        network=network,
        network_time=NOW,
    )


def root(**fields: Any) -> Record:
    limits = Limits(created=NOW - 998, memory_limit=1000, memory_swap_limit=0)
    defaults: dict[str, Any] = {"sample": usage(), "limits": limits, "network": (eth0(),)}
    return record("/", "root", **defaults | fields)


def pod_records(number: int, containers: int = 1, **sandbox: Any) -> list[Record]:
    """Return the records of a pod with a sandbox and containers."""
    uid, name = f"uid-{number}", f"pod-{number}"
    path = f"/kubepods/burstable/pod{uid}"
    owner: dict[str, Any] = {"namespace": "default", "pod": name, "pod_uid": uid}
    fields: dict[str, Any] = {"runtime_id": f"s{number}", "created": NOW - 100} | sandbox
    return [
        record(path, "pod", sample=usage(), **owner),
        record(f"{path}/s{number}", "sandbox", sample=usage(), network=(eth0(),), **owner, **fields),
        *(
            record(
                f"{path}/c{number}-{each}",
                "container",
                sample=usage(),
                processes=2,
                container=f"c{each}",
                runtime_id=f"c{number}-{each}",
                created=NOW - 90,
                **owner,
            )
            for each in range(containers)
        ),
    ]


def layer(used: int = 30, mount_point: str = LAYERS) -> LayerUsage:
    return LayerUsage(NOW, mount_point, used, 3)


def node_inputs(pods: int = 1, containers: int = 1, **fields: Any) -> SummaryInputs:
    """Return the facts of a node with pods that have layers, logs and volumes."""
    records = [root(), record("/kubepods", "node", sample=usage())]
    layers: dict[str, LayerUsage] = {}
    storage: dict[str, PodStorage] = {}
    for number in range(pods):
        records += pod_records(number, containers)
        names = [f"c{each}" for each in range(containers)]
        layers |= {f"c{number}-{each}": layer() for each in range(containers)}
        storage[f"uid-{number}"] = PodStorage(
            time=NOW,
            container_logs=dict.fromkeys(names, FileUsage(8, 1)),
            pod_logs=FileUsage(),
            hosts=FileUsage(4, 1),
        )
    facts: dict[str, Any] = {
        "node_name": "node1",
        "boot_time": NOW - 1000,
        "kubelet_started": NOW - 500,
        "records": records,
        "system_containers": {"pods": "/kubepods"},
        "root_fs": ROOT_FS,
        "filesystems": {LAYERS: ROOT_FS},
        "runtime": RuntimeFacts(layers=layers, filesystems=ImageFilesystems(layer(80), layer(80))),
        "storage": storage,
        "volumes": lambda _: (),
        "rlimit": RlimitStats(time=None, maxpid=32768, curproc=100),
    }
    return SummaryInputs(**facts | fields)


# The recorded summary


def recorded(name: str) -> Any:
    """Return a recorded summary (`summary`, `summary-cpu-memory`) as a document."""
    return json.loads((GOLDEN / "stats" / f"{name}.json").read_text())


def recorded_inputs(name: str) -> SummaryInputs:
    """Return facts from which the recorded summary would be built.

    cAdvisor was not connected to the runtime when it was recorded, so containers lack processes and network.
    """
    summary = from_json(Summary, (GOLDEN / "stats" / f"{name}.json").read_bytes())
    node = summary.node
    records = [_cgroup("/", "root", node)]
    if node.network is not None:
        records[0].network = tuple(_interface(found) for found in node.network.interfaces)
        records[0].network_time = _seconds(node.network.time)
    for system in node.system_containers:
        records.append(_cgroup(f"/{system.name}", "node", system))
    layers, storage, volumes = {}, {}, {}
    for pod in summary.pods:
        uid = pod.pod_ref.uid
        owner: dict[str, Any] = {"namespace": pod.pod_ref.namespace, "pod": pod.pod_ref.name, "pod_uid": uid}
        path = f"/pods/pod{uid}"
        records.append(_cgroup(path, "pod", pod, **owner))
        records.append(
            record(f"{path}/s", "sandbox", runtime_id=f"s-{uid}", created=_seconds(pod.start_time), **owner)
        )
        logs = {}
        for container in pod.containers:
            key = f"{uid}-{container.name}"
            created = _seconds(container.start_time)
            names = {"container": container.name, "runtime_id": key, "created": created}
            records.append(_cgroup(f"{path}/{key}", "container", container, **owner, **names))
            if container.rootfs is not None and container.logs is not None:
                layers[key] = _layer(container.rootfs)
                logs[container.name] = FileUsage(container.logs.used_bytes, container.logs.inodes_used)
        if logs:
            time = max(_seconds(container.logs.time) for container in pod.containers if container.logs)
            hosts = _hosts(pod)
            storage[uid] = PodStorage(time=time, container_logs=logs, pod_logs=FileUsage(), hosts=hosts)
        volumes[uid] = [
            VolumeUsage(
                volume.name,
                VolumeStats(
                    capacity=volume.capacity_bytes or 0,
                    available=volume.available_bytes or 0,
                    used=volume.used_bytes or 0,
                    inodes=volume.inodes or 0,
                    inodes_free=volume.inodes_free or 0,
                    inodes_used=volume.inodes_used or 0,
                    moment=_seconds(volume.time),
                ),
                "",
                volume.name == "d",
            )
            for volume in pod.volume_stats
        ]
    root_fs, images = None, None
    if node.fs is not None and node.runtime is not None:
        found = node.fs
        root_fs = FilesystemUsage(
            time=_seconds(found.time),
            device="/dev/vda",
            major=254,
            minor=0,
            capacity=found.capacity_bytes or 0,
            available=found.available_bytes or 0,
            used=found.used_bytes or 0,
            inodes=found.inodes,
            inodes_free=found.inodes_free,
        )
        images = _layer(node.runtime.image_fs)
    return SummaryInputs(
        node_name=node.node_name,
        boot_time=_seconds(node.start_time),
        kubelet_started=0.0,
        records=records,
        system_containers={system.name: f"/{system.name}" for system in node.system_containers},
        root_fs=root_fs,
        filesystems={LAYERS: root_fs} if root_fs is not None else {},
        runtime=RuntimeFacts(layers=layers, filesystems=ImageFilesystems(images, images)),
        storage=storage,
        volumes=lambda uid: volumes[uid],
        rlimit=node.rlimit,
    )


def _seconds(time: datetime | None) -> float:
    return time.timestamp() + 0.4 if time is not None else 0.0


def _cgroup(path: str, kind: TargetKind, stats: Any, **target: Any) -> Record:
    memory, swap = stats.memory, stats.swap
    available, swap_available = memory.available_bytes, swap.swap_available_bytes
    limits = Limits(
        created=_seconds(stats.start_time),
        memory_limit=NO_LIMIT if available is None else available + memory.working_set_bytes,
        memory_swap_limit=NO_LIMIT if swap_available is None else swap_available + swap.swap_usage_bytes,
    )
    sample = Usage(
        time=_seconds(stats.cpu.time),
        cpu=stats.cpu.usage_core_nano_seconds,
        memory=memory.usage_bytes,
        working_set=memory.working_set_bytes,
        rss=memory.rss_bytes,
        page_faults=memory.page_faults,
        major_page_faults=memory.major_page_faults,
        swap=swap.swap_usage_bytes,
    )
    made = record(path, kind, sample=sample, limits=limits, **target)
    made.nano_cores = stats.cpu.usage_nano_cores
    return made


def _interface(found: Any) -> NetworkInterface:
    return NetworkInterface(
        name=found.name,
        rx_bytes=found.rx_bytes,
        rx_packets=0,
        rx_errors=found.rx_errors,
        rx_dropped=0,
        tx_bytes=found.tx_bytes,
        tx_packets=0,
        tx_errors=found.tx_errors,
        tx_dropped=0,
    )


def _layer(stats: Any) -> LayerUsage:
    return LayerUsage(_seconds(stats.time), LAYERS, stats.used_bytes, stats.inodes_used)


def _hosts(pod: Any) -> FileUsage | None:
    """Return what the recorded ephemeral storage contains beyond containers and the volume on disk."""
    parts = [part for container in pod.containers for part in (container.rootfs, container.logs)]
    parts += [volume for volume in pod.volume_stats if volume.name == "d"]
    used = pod.ephemeral_storage.used_bytes - sum(part.used_bytes for part in parts)
    inodes = pod.ephemeral_storage.inodes_used - sum(part.inodes_used for part in parts)
    return FileUsage(used, inodes) if inodes else None
