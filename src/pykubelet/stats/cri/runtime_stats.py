"""Statistics that only the container runtime has: writable layers, image file systems, and, with the
`PodAndContainerStatsFromCRI` feature gate, the usage of pods and the metrics of `/metrics/cadvisor`.

The runtime is called when a client requests statistics and the last result is older than `REFRESH_SECONDS`,
or when containers were started or removed since (`invalidate`). containerd itself measures layers every ten
seconds. Each list has one call in flight, with a deadline; a runtime that hangs delays a response by at most
`WAIT_SECONDS`, and values older than `MAX_AGE_SECONDS` are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import msgspec

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.client import ImageClient, StatsClient
from pykubelet.logs import get_logger
from pykubelet.stats.cached_call import CachedCall
from pykubelet.transport.errors import CriError, Unimplemented
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
REFRESH_SECONDS = 10.0
WAIT_SECONDS = 2.0
CALL_TIMEOUT_SECONDS = 10.0
MAX_AGE_SECONDS = 60.0
KEEP_FRESH_SECONDS = 90.0
"""Seconds after a request for which statistics are refreshed without one; most clients return each minute."""
_NANOSECONDS = 1e9
_ITEMS_PER_STEP = 200
"""Messages that are converted before other tasks run."""


class LayerUsage(msgspec.Struct, frozen=True, gc=False):
    """Usage of a writable layer, or of all images, on one file system."""

    time: float
    mount_point: str
    """Path on the file system, as the runtime reports it; empty if unknown."""
    used: int | None
    inodes_used: int | None


@dataclass(frozen=True, slots=True)
class ImageFilesystems:
    """The first file system of images, and of writable layers."""

    images: LayerUsage | None = None
    containers: LayerUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """The latest results; those that are unknown or too old are empty."""

    layers: Mapping[str, LayerUsage] = field(default_factory=lambda: MappingProxyType({}))
    """Writable layers by container id."""
    filesystems: ImageFilesystems = ImageFilesystems()
    sandboxes: Mapping[str, pb.PodSandboxStats] | None = None
    """Usage of pods by sandbox id; None if the kubelet measures by itself."""

    def mount_points(self) -> set[str]:
        """Return the paths whose file systems are part of the summary."""
        parts = (self.filesystems.images, self.filesystems.containers)
        found = {part.mount_point for part in parts if part is not None}
        found.update(layer.mount_point for layer in self.layers.values())
        return found - {""}


@dataclass(frozen=True, slots=True)
class _PodFacts:
    layers: Mapping[str, LayerUsage]
    sandboxes: Mapping[str, pb.PodSandboxStats] | None = None


@dataclass(frozen=True, slots=True)
class CriMetricList:
    """Metrics that the runtime renders for `/metrics/cadvisor`, and their descriptors."""

    descriptors: list[pb.MetricDescriptor]
    pods: list[pb.PodSandboxMetrics]


class RuntimeStatistics:
    """Cached statistics of one runtime; `pods_from_cri` is the gate `PodAndContainerStatsFromCRI`."""

    def __init__(
        self,
        stats: StatsClient,
        images: ImageClient,
        tasks: TaskScope,
        *,
        pods_from_cri: bool = False,
        interval: float = REFRESH_SECONDS,
        wait: float = WAIT_SECONDS,
        timeout: float = CALL_TIMEOUT_SECONDS,
        max_age: float = MAX_AGE_SECONDS,
        keep_fresh: float = KEEP_FRESH_SECONDS,
    ) -> None:
        self._stats = stats
        self._images = images
        self._pods_from_cri = pods_from_cri
        self._timeout = timeout
        self._descriptors: list[pb.MetricDescriptor] | None = None
        self._has_metrics = pods_from_cri
        cached = partial(
            CachedCall,
            tasks=tasks,
            interval=interval,
            wait=wait,
            max_age=max_age,
            keep_fresh=keep_fresh,
            errors=_FAILURES,
        )
        self._layers: CachedCall[dict[str, LayerUsage]] = cached("writable-layers", self._list_layers)
        self._filesystems: CachedCall[ImageFilesystems] = cached("image-filesystems", self._image_filesystems)
        self._sandboxes: CachedCall[_PodFacts | None] = cached("sandboxes", self._list_sandboxes)
        self._metrics: CachedCall[CriMetricList | None] = cached("cri-metrics", self._list_metrics)

    def invalidate(self) -> None:
        """Record that containers were started or removed, or images pulled or removed."""
        self._layers.invalidate()
        self._filesystems.invalidate()
        self._sandboxes.invalidate()

    async def facts(self) -> RuntimeFacts:
        """Return the latest facts, refreshed if they are due; waits at most `wait` seconds. Never raises."""
        pods, filesystems = await asyncio.gather(self._usage_of_pods(), self._filesystems.get())
        return RuntimeFacts(
            layers=pods.layers, filesystems=filesystems or ImageFilesystems(), sandboxes=pods.sandboxes
        )

    async def image_filesystems(self) -> ImageFilesystems:
        """Request the file systems of images and writable layers; empty if that fails. Never raises.

        For a caller that needs only their paths, and rarely: it does not keep statistics fresh.
        """
        try:
            return await self._image_filesystems()
        except _FAILURES as err:
            log.v(2).info("Failed to request the image file systems", err=str(err))
            return ImageFilesystems()

    def latest_layers(self) -> Mapping[str, LayerUsage]:
        """Return the latest writable layers by container id without waiting, and refresh them if due."""
        self._layers.refresh()
        return self._layers.latest() or {}

    async def _usage_of_pods(self) -> _PodFacts:
        if self._pods_from_cri and (found := await self._sandboxes.get()) is not None:
            return found
        return _PodFacts(await self._layers.get() or {})

    async def sandboxes(self) -> Mapping[str, pb.PodSandboxStats] | None:
        """Return the usage of pods by sandbox id; None without the gate or the runtime's support."""
        found = await self._sandboxes.get() if self._pods_from_cri else None
        return found.sandboxes if found is not None else None

    @property
    def has_metrics(self) -> bool:
        """Whether `metrics` comes from the runtime: the gate is enabled, and the runtime supports it."""
        return self._has_metrics

    async def metrics(self) -> CriMetricList | None:
        """Return the runtime's own metrics; None without the gate or the runtime's support."""
        return await self._metrics.get() if self._pods_from_cri else None

    async def _list_layers(self) -> dict[str, LayerUsage]:
        async with asyncio.timeout(self._timeout):
            listed = await self._stats.list_container_stats()
        found = {}
        for number, stats in enumerate(listed):
            if number % _ITEMS_PER_STEP == _ITEMS_PER_STEP - 1:
                await asyncio.sleep(0)
            if stats.attributes.id and stats.HasField("writable_layer"):
                found[stats.attributes.id] = layer_usage(stats.writable_layer)
        return found

    async def _image_filesystems(self) -> ImageFilesystems:
        async with asyncio.timeout(self._timeout):
            response = await self._images.image_fs_info()
        return ImageFilesystems(
            images=next(map(layer_usage, response.image_filesystems), None),
            containers=next(map(layer_usage, response.container_filesystems), None),
        )

    async def _list_sandboxes(self) -> _PodFacts | None:
        try:
            async with asyncio.timeout(self._timeout):
                listed = await self._stats.list_pod_sandbox_stats()
        except Unimplemented as err:
            log.v(5).info("Container runtime does not implement ListPodSandboxStats", err=err)
            return None
        sandboxes, layers = {}, {}
        for number, stats in enumerate(listed):
            if number % _ITEMS_PER_STEP == _ITEMS_PER_STEP - 1:
                await asyncio.sleep(0)
            if not stats.attributes.id or not stats.HasField("linux"):
                continue
            sandboxes[stats.attributes.id] = stats
            for container in stats.linux.containers:
                if container.HasField("writable_layer"):
                    layers[container.attributes.id] = layer_usage(container.writable_layer)
        return _PodFacts(layers, sandboxes)

    async def _list_metrics(self) -> CriMetricList | None:
        try:
            async with asyncio.timeout(self._timeout):
                if self._descriptors is None:
                    self._descriptors = await self._stats.list_metric_descriptors()
                pods = await self._stats.list_pod_sandbox_metrics()
        except Unimplemented as err:
            log.v(5).info("Container runtime does not implement ListPodSandboxMetrics", err=err)
            self._has_metrics = False
            return None
        self._has_metrics = True
        return CriMetricList(self._descriptors, pods)


_FAILURES = (CriError, TimeoutError)


def layer_usage(usage: pb.FilesystemUsage) -> LayerUsage:
    """Convert the usage of a file system as CRI reports it."""
    return LayerUsage(
        time=usage.timestamp / _NANOSECONDS,
        mount_point=usage.fs_id.mountpoint,
        used=usage.used_bytes.value if usage.HasField("used_bytes") else None,
        inodes_used=usage.inodes_used.value if usage.HasField("inodes_used") else None,
    )
