"""Builds and starts the statistics: what is sampled on this node, and the sources of the endpoints.

`NodeTargets` tells the collector which cgroups belong to the node and to its pods. Once a second it compares
the pods that the workers have observed with those it has seen; only a pod that has changed costs more than a
comparison. `NodeStatistics` brings the samples together for the endpoints.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.host_setup import StartupError
from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.driver import CgroupWriteError
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.qos import pod_limits
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.client import info_field
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.paths import PodDirs, pod_log_dir
from pykubelet.linux.cgroupfs import Cgroups, detect_cgroups
from pykubelet.linux.hardware import Hardware
from pykubelet.logs import get_logger
from pykubelet.podworkers.engine import PodEngine
from pykubelet.stats.cgroups.readers import cgroup_reader_factory
from pykubelet.stats.cgroups.search import find_nested
from pykubelet.stats.collector import NESTED, NODE, TICK_SECONDS, Collector
from pykubelet.stats.container_hints import HintsError, read_container_hints
from pykubelet.stats.cpu_load import CpuLoadReader, cpu_load_reader
from pykubelet.stats.cri.runtime_stats import CriMetricList, LayerUsage, RuntimeFacts, RuntimeStatistics
from pykubelet.stats.machine import MachineFactsCache, machine_info, read_rlimit
from pykubelet.stats.samples import FilesystemUsage, MachineFacts, Record, Target, TargetKind
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.stats.storage.metrics import PodStorageMetrics, PodStorageRow
from pykubelet.stats.storage.pod_storage import (
    FileUsage,
    LoggedPod,
    LoggingContainer,
    LogMetrics,
    PodStorage,
    PodStorageMeter,
    VolumeUsage,
    volume_usage,
)
from pykubelet.stats.summary import SummaryInputs
from pykubelet.stats.usage_log import UsageLog, own_cadvisor_cgroup
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope, finish_in_thread, seconds_to_tick
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.usage import VolumeStatCalculator, VolumeStats

log = get_logger(__name__)
_PREFIXES = {"containerd": "cri-containerd-", "cri-o": "crio-"}
"""Prefix of the names of containers' cgroups by runtime, with the systemd driver."""
_IMAGE_RETRY_SECONDS = 5.0
"""Seconds after which a runtime that failed to report the image of a sandbox is called again."""
VOLUME_REFRESH_SECONDS = 5.0
"""Seconds for which an eviction waits until the volumes of pods are measured."""
_LONG_SEARCH_SECONDS = 0.1
"""Seconds from which on the duration of a search for cgroups is logged."""


def container_cgroup(parent: str, runtime_id: str, driver: str, runtime: str) -> str:
    """Return the path of the cgroup of a container or sandbox, as its runtime names it."""
    name = runtime_id
    if driver == "systemd":
        name = f"{_PREFIXES.get(runtime, '')}{runtime_id}.scope"
    elif runtime == "cri-o":
        name = f"{_PREFIXES[runtime]}{runtime_id}"
    return f"{parent.rstrip('/')}/{name}"


def pod_targets(
    observed: ObservedPod, parent: str, path_of: Callable[[str, str], str], sandbox_images: Mapping[str, str]
) -> Iterator[Target]:
    """Yield the targets of a pod whose cgroup is `parent`: itself, its sandbox and its running containers.

    `sandbox_images` has the images of sandboxes by id, as far as they are known.
    """

    def target(kind: TargetKind, path: str, runtime_id: str = "", created: int = 0, **facts: str) -> Target:
        return Target(
            path=path,
            kind=kind,
            namespace=observed.namespace,
            pod=observed.name,
            pod_uid=observed.uid,
            runtime_id=runtime_id,
            created=created / 1e9,
            **facts,
        )

    if parent and observed.is_alive:
        yield target("pod", parent)
    for sandbox in observed.sandboxes:
        if sandbox.ready:
            path = path_of(parent, sandbox.id)
            image = sandbox_images.get(sandbox.id, "")
            yield target("sandbox", path, sandbox.id, sandbox.created_at, image=image)
    for container in observed.running:
        yield target(
            "container",
            path_of(parent, container.id),
            container.id,
            container.created_at,
            container=container.name,
            image=container.image,
        )


class NodeTargets:
    """Keeps the collector's targets equal to what runs on the node."""

    def __init__(
        self,
        collector: Collector,
        observed: Callable[[], Iterable[tuple[Pod, ObservedPod]]],
        cgroup_of: Callable[[Pod], str],
        path_of: Callable[[str, str], str],
        on_change: Callable[[], None] = lambda: None,
        version: Callable[[], object] = object,
    ) -> None:
        """Initialize; `observed` returns the pods of all workers with their last observed states.

        `version` returns a value that is equal to the last one while `observed` returns the same.
        `cgroup_of` returns the cgroup of a pod, `path_of` that of a container in it, by its runtime id.
        `on_change` is called when containers were started or have ended.
        """
        self._collector = collector
        self._observed = observed
        self._cgroup_of = cgroup_of
        self._path_of = path_of
        self._on_change = on_change
        self._version = version
        self._last_version: object = None
        self._seen: dict[str, ObservedPod] = {}
        self._sandboxes: dict[str, frozenset[str]] = {}
        """Ready sandboxes by pod uid."""
        self._images: dict[str, str] = {}
        """Images of ready sandboxes by id."""
        self._without_image: dict[str, str] = {}
        """Ready sandboxes whose image is not known, with the uids of their pods."""
        self._is_image_missing = asyncio.Event()

    async def find_sandbox_images(self, image_of: Callable[[str], Awaitable[str]]) -> NoReturn:
        """Set the image of each new sandbox, one after the other, until cancelled.

        `image_of` returns the image of a sandbox by id, empty if the runtime does not report it, and raises
        CriError or ValueError: then it is called again, after a delay.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_IMAGE_RETRY_SECONDS if self._without_image else None):
                    await self._is_image_missing.wait()
            self._is_image_missing.clear()
            for sandbox in tuple(self._without_image):
                try:
                    image = await image_of(sandbox)
                except (CriError, ValueError) as err:
                    log.v(2).info("Failed to find the image of a sandbox", sandboxID=sandbox, err=str(err))
                    continue
                if (uid := self._without_image.pop(sandbox, None)) is not None:
                    self._images[sandbox] = image
                    self._seen.pop(uid, None)
                    self._last_version = None

    def update(self) -> None:
        """Apply the changes of pods since the last update."""
        version = self._version()
        if version == self._last_version:
            return
        self._last_version = version
        alive, changed = set(), False
        for pod, observed in self._observed():
            uid = pod.uid
            alive.add(uid)
            if self._seen.get(uid) is observed:
                continue
            self._seen[uid] = observed
            self._update_images(uid, observed)
            changed = True
            try:
                parent = self._cgroup_of(pod)
            except CgroupWriteError as err:
                log.v(2).info("Pod has no cgroup, it is not sampled", pod=pod.full_name, err=str(err))
                continue
            self._collector.set_targets(uid, pod_targets(observed, parent, self._path_of, self._images))
        alive |= {NODE, NESTED}
        for uid in [owner for owner in self._collector.owners() if owner not in alive]:
            self._seen.pop(uid, None)
            self._update_images(uid, None)
            self._collector.set_targets(uid, ())
            changed = True
        if changed:
            self._on_change()

    def _update_images(self, uid: str, observed: ObservedPod | None) -> None:
        """Drop the images of a pod's former sandboxes, and note the new ones."""
        ready = {box.id for box in observed.sandboxes if box.ready} if observed is not None else set()
        former = self._sandboxes.pop(uid, frozenset())
        for sandbox in former - ready:
            self._images.pop(sandbox, None)
            self._without_image.pop(sandbox, None)
        if ready:
            self._sandboxes[uid] = frozenset(ready)
        for sandbox in ready:
            if sandbox not in self._images:
                self._without_image[sandbox] = uid
                self._is_image_missing.set()


class NodeStatistics:
    """Statistics of the node for the endpoints (`server.stats`, `server.stats_metrics`)."""

    def __init__(
        self,
        settings: AgentSettings,
        collector: Collector,
        filesystems: Filesystems,
        runtime: RuntimeStatistics,
        storage: PodStorageMeter,
        engine: PodEngine,
        volumes: VolumeStatCalculator,
        *,
        machine: MachineFactsCache,
        started: float,
        system_containers: Mapping[str, str],
    ) -> None:
        """Initialize with the kubelet's start time, and the cgroup paths of system containers by name."""
        self._settings = settings
        self.collector = collector
        self.host_filesystems = filesystems
        self.runtime = runtime
        self._storage = storage
        self._engine = engine
        self._volumes = volumes
        self._started = started
        self._system_containers = system_containers
        self._boot_time = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._machine = machine
        self._has_pressure = has_pressure(settings)

    async def prepare(self, *, detailed: bool) -> None:
        """Refresh samples that are older than the housekeeping interval; `detailed` includes details."""
        if detailed:
            await asyncio.gather(
                self.collector.refresh_details(), self.host_filesystems.refresh(self.collector.interval)
            )

    def records(self) -> Sequence[Record]:
        """Return the records of all sampled cgroups."""
        return self.collector.records()

    def filesystems(self) -> Sequence[FilesystemUsage]:
        """Return the mounted file systems."""
        return self.host_filesystems.all()

    def machine(self) -> MachineFacts:
        """Return the facts about the host."""
        return self._machine.latest()

    async def machine_info(self) -> Hardware:
        """Return cAdvisor's MachineInfo of this host, for `/spec/`."""
        flags = self._settings.flags
        return await machine_info(self.host_filesystems, flags.machine_id_file, flags.boot_id_file)

    def device_name(self, major: int, minor: int) -> str:
        """Return the name of a block device; empty for an unknown one."""
        return self.host_filesystems.device_name(major, minor)

    def has_pressure(self) -> bool:
        """Return whether pressure stall information is reported."""
        return self._has_pressure

    async def runtime_metrics(self) -> CriMetricList | None:
        """Return the metrics of the runtime, with `PodAndContainerStatsFromCRI`; None if it has none."""
        return await self.runtime.metrics()

    async def runtime_sandboxes(self) -> Mapping[str, pb.PodSandboxStats] | None:
        """Return the usage of pods from the runtime, with `PodAndContainerStatsFromCRI`, by sandbox id.

        None without the gate or the runtime's support.
        """
        return await self.runtime.sandboxes()

    async def summary_inputs(self, only_cpu_and_memory: bool, *, detailed: bool = True) -> SummaryInputs:
        """Return the facts of a summary; without `detailed`, details of cgroups may be old or missing."""
        inputs = SummaryInputs(
            node_name=self._settings.node_name,
            boot_time=self._boot_time,
            kubelet_started=self._started,
            records=self.collector.records(),
            system_containers=self._system_containers,
            has_pressure=self._settings.gates.enabled("KubeletPSI"),
        )
        if only_cpu_and_memory:
            runtime = RuntimeFacts(sandboxes=await self.runtime.sandboxes())
            return dataclasses.replace(inputs, records=self.collector.records(), runtime=runtime)
        _, runtime, storage, root_fs = await asyncio.gather(
            self.collector.refresh_summary() if detailed else asyncio.sleep(0),
            self.runtime.facts(),
            self._storage.get(),
            self.host_filesystems.of_directory(Path(self._settings.flags.root_dir), self.collector.interval),
        )
        filesystems = {}
        for path in runtime.mount_points():
            found = await self.host_filesystems.of_directory(Path(path), self.collector.interval)
            if found is not None:
                filesystems[path] = found
        return dataclasses.replace(
            inputs,
            records=self.collector.records(),
            runtime=runtime,
            storage=storage,
            root_fs=root_fs,
            filesystems=filesystems,
            volumes=self.volume_usage,
            rlimit=read_rlimit(time.time()),
        )

    async def refresh_volumes(self, uids: Collection[str]) -> None:
        """Measure the volumes of pods now instead of when they are due, for a bounded time."""
        await self._volumes.refresh(uids, VOLUME_REFRESH_SECONDS)

    def latest_storage(self) -> Mapping[str, PodStorage]:
        """Return the latest usage of logs by pod uid without waiting, and start a pass if it is due."""
        return self._storage.latest()

    def volume_usage(self, uid: str) -> Sequence[VolumeUsage]:
        """Return the usage of a pod's volumes, ephemeral ones first."""
        pod = self._engine.store.get(uid) or self._engine.workers.pod(uid)
        return volume_usage(pod, self._volumes.for_pod(uid)) if pod is not None else ()


def build_statistics(
    settings: AgentSettings,
    cri: RuntimeConnection,
    pod_cgroups: PodCgroups,
    engine: PodEngine,
    volumes: VolumeStatCalculator,
    volume_metrics: VolumeMetrics,
    tasks: TaskScope,
    registry: CollectorRegistry,
    *,
    started: float,
) -> tuple[NodeStatistics, Callable[[], None]]:
    """Return the statistics and the function that starts to sample.

    Raises StartupError if the file of container hints cannot be used.
    """
    config, flags = settings.config, settings.flags
    try:
        hints = read_container_hints(Path(flags.container_hints)) if flags.container_hints else {}
    except HintsError as err:
        raise StartupError(str(err)) from err
    cgroups = detect_cgroups()
    interval = flags.housekeeping_interval.seconds
    collector = Collector(cgroup_reader_factory(cgroups), tasks, interval)
    load = add_sample_listeners(flags, cgroups, collector)
    runtime_name = cri.version.runtime_name

    def observed() -> Iterator[tuple[Pod, ObservedPod]]:
        for worker, found in engine.observed_pods():
            if worker.pod is not None:
                yield worker.pod, found

    runtime = RuntimeStatistics(
        cri.stats,
        cri.images,
        tasks,
        pods_from_cri=settings.gates.enabled("PodAndContainerStatsFromCRI"),
    )
    targets = NodeTargets(
        collector,
        observed,
        pod_cgroups.path,
        lambda parent, runtime_id: container_cgroup(parent, runtime_id, config.cgroup_driver, runtime_name),
        runtime.invalidate,
        lambda: engine.observed_version,
    )
    system = system_containers(settings, pod_cgroups, cgroups)
    paths = dict.fromkeys([*pod_cgroups.tree_paths(), *system.values()])
    collector.set_targets(
        NODE,
        [Target(path="/", kind="root"), *(Target(path=path, kind="node") for path in paths if path != "/")],
    )
    dirs, logs = PodDirs(Path(flags.root_dir)), config.pod_logs_dir

    def logged_pods() -> Iterator[LoggedPod]:
        for pod, found in observed():
            log_dir = pod_log_dir(logs, found.namespace, found.name, pod.uid)
            yield LoggedPod(pod.uid, str(log_dir), str(dirs.hosts_file(pod.uid)))

    def logging_containers() -> Iterator[LoggingContainer]:
        for record in collector.records():
            target = record.target
            if target.kind == "container":
                yield LoggingContainer(target.pod_uid, target.namespace, target.pod, target.container)

    storage = PodStorageMeter(
        logged_pods, tasks, observe_duration=partial(volume_metrics.record_measurement, "du")
    )
    registry.register(LogMetrics(logging_containers, storage.latest))
    registry.register(
        PodStorageMetrics(
            lambda: storage_rows(observed(), storage.latest(), runtime.latest_layers(), volumes.for_pod)
        )
    )
    statistics = NodeStatistics(
        settings,
        collector,
        Filesystems(Path(flags.root_dir), tasks, hints=hints),
        runtime,
        storage,
        engine,
        volumes,
        machine=MachineFactsCache(tasks, flags.machine_id_file, flags.boot_id_file),
        started=started,
        system_containers=system,
    )

    async def sample() -> None:
        try:
            await collector.run(targets.update)
        finally:
            if load is not None:
                load.close()

    hierarchy = cgroups.root if cgroups.unified else cgroups.mounts.get("cpuacct")
    housekeeping = flags.global_housekeeping_interval.seconds

    def start() -> None:
        tasks.start(sample(), name="statistics")
        if hierarchy is not None:
            search = GlobalHousekeeping(collector, hierarchy, pod_cgroups.tree_paths(), housekeeping)
            tasks.start(search.run(), name="global-housekeeping")
        if settings.gates.enabled("PodAndContainerStatsFromCRI"):
            # Shows whether the runtime supports it, before the first scrape.
            tasks.start(runtime.metrics(), name="cri-metrics")
        tasks.start(targets.find_sandbox_images(partial(sandbox_image, cri)), name="sandbox-images")

    return statistics, start


class GlobalHousekeeping:
    """Search for cgroups that no part of the kubelet has created, every `--global-housekeeping-interval`.

    They are sampled as cgroups of the node, without labels but `id`. cAdvisor watches the tree with inotify
    as well; here a nested cgroup is found by the next search.
    """

    def __init__(self, collector: Collector, root: Path, pod_trees: Collection[str], interval: float) -> None:
        """Initialize with the directory of a hierarchy; `pod_trees` are the cgroups that pods are in.

        The search is below containers, sandboxes and the cgroups of the node, not in `pod_trees` themselves:
        a cgroup there that belongs to no known pod may become a target of a pod at any time.
        """
        self._collector = collector
        self._root = str(root).rstrip("/")
        self._pod_trees = frozenset(pod_trees) | {"/"}
        self._interval = max(interval, TICK_SECONDS)

    async def run(self) -> NoReturn:
        """Search until cancelled."""
        while True:
            await asyncio.sleep(seconds_to_tick(self._interval))
            started = time.monotonic()
            await self.search()
            duration = time.monotonic() - started
            if duration >= min(_LONG_SEARCH_SECONDS, self._interval / 2):
                log.v(3).info("Global housekeeping took long", duration=f"{duration:.3f}s")

    async def search(self) -> None:
        """Search once, and set the targets."""
        nested = {target.path for target in self._collector.targets_of(NESTED)}
        targets = [target for target in self._collector.targets() if target.path not in nested]
        parents = [
            target.path
            for target in targets
            if target.kind in ("container", "sandbox")
            or (target.kind == "node" and target.path not in self._pod_trees)
        ]
        known = {target.path for target in targets} | self._pod_trees
        found = await finish_in_thread(partial(find_nested, self._root, parents, known))
        known.update(target.path for target in self._collector.targets() if target.path not in nested)
        self._collector.set_targets(
            NESTED, [Target(path=path, kind="node") for path in found if path not in known]
        )


def add_sample_listeners(flags: KubeletFlags, cgroups: Cgroups, collector: Collector) -> CpuLoadReader | None:
    """Add the listeners of `--enable-load-reader` and `--log-cadvisor-usage` to the collector.

    The caller closes the reader of the load that is returned.
    """
    load = cpu_load_reader(cgroups, collector.interval) if flags.enable_load_reader else None
    if load is not None:
        collector.add_listener(load.on_sample)
    if flags.log_cadvisor_usage:
        collector.add_listener(UsageLog(own_cadvisor_cgroup(cgroups)).on_sample)
    return load


def storage_rows(
    pods: Iterable[tuple[Pod, ObservedPod]],
    storage: Mapping[str, PodStorage],
    layers: Mapping[str, LayerUsage],
    volumes_of: Callable[[str], Mapping[str, VolumeStats]],
) -> Iterator[PodStorageRow]:
    """Yield the latest ephemeral storage of pods, and of their emptyDir volumes.

    Of a pod, it is the sum of writable layers, logs, hosts file and volumes on the node's disk, as far as
    they were measured.
    """
    for pod, observed in pods:
        usages = volume_usage(pod, volumes_of(pod.uid))
        sources = {volume.name: volume.empty_dir for volume in pod.spec.volumes}
        parts = [FileUsage(usage.stats.used, usage.stats.inodes_used) for usage in usages if usage.ephemeral]
        for usage in usages:
            if (source := sources.get(usage.name)) is not None:
                limit = int(source.size_limit) if source.size_limit is not None else None
                yield PodStorageRow(
                    observed.namespace,
                    observed.name,
                    usage.name,
                    usage.stats.used,
                    usage.stats.inodes_used,
                    limit,
                )
        for container in observed.running:
            if (layer := layers.get(container.id)) is not None:
                parts.append(FileUsage(layer.used, layer.inodes_used))
        if (files := storage.get(pod.uid)) is not None:
            parts += [
                *files.container_logs.values(),
                files.pod_logs or FileUsage(),
                files.hosts or FileUsage(),
            ]
        if parts:
            limited = pod_limits(pod).get("ephemeral-storage")
            yield PodStorageRow(
                observed.namespace,
                observed.name,
                "",
                sum(part.used or 0 for part in parts),
                sum(part.inodes or 0 for part in parts),
                int(limited) if limited is not None else None,
            )


def has_pressure(settings: AgentSettings) -> bool:
    """Return whether pressure is reported: the kernel has it for cgroups, and the gate is enabled."""
    cgroups = detect_cgroups()
    return (
        settings.gates.enabled("KubeletPSI") and cgroups.unified and (cgroups.root / "cpu.pressure").exists()
    )


def system_containers(settings: AgentSettings, pods: PodCgroups, cgroups: Cgroups) -> dict[str, str]:
    """Return the cgroups of the system containers by name, as far as they are known."""
    config = settings.config
    all_pods = next(iter(pods.tree_paths()), config.cgroup_root or "/")
    found = {
        "kubelet": config.kubelet_cgroups or own_cgroup(cgroups),
        "runtime": settings.flags.runtime_cgroups,
        "misc": config.system_cgroups,
        "pods": all_pods,
    }
    return {name: path for name, path in found.items() if path}


def own_cgroup(cgroups: Cgroups) -> str:
    """Return the cgroup of this process; empty if it is not the same for processor time and memory."""
    own = cgroups.own
    if cgroups.unified:
        return own.get("", "")
    if not own.get("cpu") or own.get("cpu") != own.get("memory"):
        return ""
    return own.get("name=systemd") or own["cpu"]


async def sandbox_image(cri: RuntimeConnection, sandbox: str) -> str:
    """Return the image that a sandbox was created from; empty if the runtime does not report it.

    containerd and CRI-O report the image that is recorded in the sandbox's container, as cAdvisor reads it.
    Raises CriError.
    """
    return info_field(await cri.runtime.pod_sandbox_status(sandbox, verbose=True), "info", "image")
