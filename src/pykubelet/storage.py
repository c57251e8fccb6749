"""The node's volumes, put together: what they are made of, who serves them, and what runs for them.

`make_volumes` before the engine, which mounts through them; `start_volumes` when it is there to be woken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.cluster import AgentSettings, Cluster
from pykubelet.cri.connect import Cri
from pykubelet.host.plugin_registration import PluginHandler
from pykubelet.pods.local_objects import LocalObjects
from pykubelet.resources.cgroup_values import memory_limit
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.runtime_skills import can_mount_images
from pykubelet.sync.engine import PodEngine
from pykubelet.tasks import TaskScope
from pykubelet.volumes.csi.kind import CsiKind
from pykubelet.volumes.metrics import VolumeMetrics, VolumeNumbers
from pykubelet.volumes.pod_volumes import PodVolumes
from pykubelet.volumes.usage import VolumeUsage
from pykubelet.volumes.usage_others import OtherUsage


async def make_volumes(
    settings: AgentSettings,
    cri: Cri,
    node: NodeFacts,
    local_objects: LocalObjects,
    cluster: Cluster | None,
    tasks: TaskScope,
    registry: CollectorRegistry,
) -> PodVolumes:
    """Give all that mounts volumes; configMaps and secrets are the cluster's where there is one."""
    # A runtime that cannot mount images would show an empty folder, and say nothing.
    runtime = await cri.runtime.version()
    return PodVolumes(
        Path(settings.flags.root_dir),
        objects=cluster.objects if cluster is not None else local_objects,
        node=node,
        memory_limit=memory_limit,
        allocatable_memory=int(node.allocatable["memory"]),
        pod_level=node.pod_level,
        api=cluster.clients.objects if cluster is not None else None,
        node_name=settings.node_name,
        node_labels=cluster.node_labels if cluster is not None else lambda: None,
        image_volumes=can_mount_images(runtime.runtime_name, runtime.runtime_version),
        flex_drivers=Path(settings.config.volume_plugin_dir),
        attach_detach=settings.config.enable_controller_attach_detach,
        tasks=tasks,
        metrics=VolumeMetrics(registry),
    )


def start_volumes(
    volumes: PodVolumes,
    settings: AgentSettings,
    engine: PodEngine,
    cluster: Cluster | None,
    tasks: TaskScope,
    registry: CollectorRegistry,
) -> VolumeUsage:
    """Begin to sweep, and to keep up with drivers; gives what measures how full pods' volumes are."""
    root = Path(settings.flags.root_dir)
    volumes.listen(engine.workers.wake, engine.book.event, engine.workers.pod)
    if cluster is not None:
        cluster.use_volumes(volumes)
    tasks.start(volumes.run(), name="volumes")
    csi = volumes.kinds.get("csi")
    if isinstance(csi, CsiKind):
        tasks.start(csi.run(), name="csi")
    usage = VolumeUsage(
        root,
        engine.store.pods,
        settings.config.volume_stats_agg_period.seconds,
        others=OtherUsage(volumes.held, volumes.kinds).of_pod,
    )
    tasks.start(usage.run(), name="volume-usage")
    registry.register(VolumeNumbers(volumes.metrics.count, engine.store.pods, usage.of))
    return usage


def volume_plugins(volumes: PodVolumes) -> Mapping[str, PluginHandler]:
    """Give who takes plugins that register as drivers of volumes."""
    csi = volumes.kinds.get("csi")
    return csi.handlers if isinstance(csi, CsiKind) else {}
