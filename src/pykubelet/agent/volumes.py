"""Builds and starts the volume manager, and the registration of plugins.

`build_volumes` is called before the pod engine is built, which mounts volumes through them. `start_plugins`
collects the handlers of all packages, by type of plugin (`CSIPlugin`, `DevicePlugin`, `DRAPlugin`); a
standalone node has plugins, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.agent.cluster import AgentSettings, Cluster
from pykubelet.agent.mounter_dns import MounterDns
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.values import memory_limit
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.runtime_features import RuntimeFeatures
from pykubelet.linux.kernel import label_for_containers
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.registration import PluginHandler, PluginRegistration
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podworkers.engine import PodEngine
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.collector import VolumeNumbers
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.ownership import RecordEvent
from pykubelet.volumes.plugin import MemoryLimits, VolumeOptions
from pykubelet.volumes.usage import PluginStatsCollector, VolumeStatCalculator

log = get_logger(__name__)


class VolumeNode:
    """The node as volumes expose it to pods (`volumes.plugin.NodeView`), with settings that can change."""

    def __init__(self, options: RuntimeNodeOptions) -> None:
        self._options = options
        self.memory = MemoryLimits(memory_limit, int(options.allocatable["memory"]))

    def set_options(self, options: RuntimeNodeOptions) -> None:
        """Replace the options for volumes that are mounted or refreshed afterwards."""
        self._options = options
        self.memory.set_allocatable(int(options.allocatable["memory"]))

    @property
    def host_ips(self) -> Sequence[str]:
        """IP addresses of the node."""
        return self._options.host_ips

    @property
    def allocatable(self) -> Resources:
        """Allocatable resources of the node."""
        return self._options.allocatable

    @property
    def pod_level(self) -> bool:
        """Whether pod-level resources count."""
        return self._options.pod_level


async def build_volumes(
    settings: AgentSettings,
    features: RuntimeFeatures,
    node: VolumeNode,
    local_objects: LocalObjects,
    cluster: Cluster | None,
    record_event: RecordEvent,
    find_pod: Callable[[str], Pod | None],
    tasks: TaskScope,
    registry: CollectorRegistry,
) -> PodVolumes:
    """Return the volume manager; configMaps and secrets come from the cluster if there is one.

    `record_event` records events about pods; `find_pod` returns the pod with a uid, also a terminating one.
    """
    if settings.flags.experimental_mounter_path:
        await MounterDns(settings).write(settings.config.cluster_dns)
    return PodVolumes(
        Path(settings.flags.root_dir),
        objects=cluster.objects if cluster is not None else local_objects,
        node=node,
        memory=node.memory,
        cluster=cluster.volume_node() if cluster is not None else None,
        options=VolumeOptions(
            node_name=settings.node_name,
            mounter=settings.flags.experimental_mounter_path,
            se_linux_mount=settings.gates.enabled("SELinuxMount"),
            image_volumes=features.has_image_volumes,
            flex_drivers=Path(settings.config.volume_plugin_dir),
            find_claim=local_objects.claim if cluster is None else None,
        ),
        record_event=record_event,
        find_pod=find_pod,
        tasks=tasks,
        metrics=VolumeMetrics(registry),
    )


def build_volume_usage(
    volumes: PodVolumes, settings: AgentSettings, engine: PodEngine, registry: CollectorRegistry
) -> VolumeStatCalculator:
    """Return the periodic measurement of the pods' volumes."""
    usage = VolumeStatCalculator(
        Path(settings.flags.root_dir),
        engine.store.pods,
        settings.config.volume_stats_agg_period.seconds,
        plugin_stats=PluginStatsCollector(
            volumes.records_for_pod, volumes.plugins, observe_duration=volumes.metrics.record_measurement
        ).for_pod,
        observe_duration=volumes.metrics.record_measurement,
    )
    registry.register(VolumeNumbers(volumes.metrics.count, engine.store.pods, usage.for_pod))
    return usage


def start_volumes(volumes: PodVolumes, usage: VolumeStatCalculator, tasks: TaskScope) -> None:
    """Start the volume garbage collection, the CSI driver watches and the measurement of volumes."""
    tasks.start(volumes.run(), name="volumes")
    csi = volumes.plugins.get("csi")
    if isinstance(csi, CsiPlugin):
        tasks.start(csi.run(), name="csi")
    tasks.start(usage.run(), name="volume-usage")


def volume_plugins(volumes: PodVolumes) -> Mapping[str, PluginHandler]:
    """Return the handlers of plugins that register as CSI drivers."""
    csi = volumes.plugins.get("csi")
    return csi.handlers if isinstance(csi, CsiPlugin) else {}


REGISTRATION_DIR = "plugins_registry"
PLUGIN_SOCKET_DIR = "plugins"
"""Directory of plugin sockets, which manifests of plugins mount and expect to exist."""
_DIRECTORY_MODE = 0o750


def start_plugins(
    root: Path, registry: CollectorRegistry, tasks: TaskScope, *handlers_by_type: Mapping[str, PluginHandler]
) -> None:
    """Watch the registration directory below `root` and register plugins with the handlers of their type."""
    handlers = {kind: handler for by_type in handlers_by_type for kind, handler in by_type.items()}
    for directory in (root / REGISTRATION_DIR, root / PLUGIN_SOCKET_DIR):
        _share(directory)
    plugins = PluginRegistration(root / REGISTRATION_DIR, handlers)
    registry.register(_Plugins(plugins))
    tasks.start(plugins.run(), name="plugins")


def _share(directory: Path) -> None:
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as err:
        log.error(err, "Failed to create plugin directory", path=directory)
    else:
        label_for_containers(directory)


class _Plugins(Collector):
    """Metrics of the present and the registered plugins."""

    def __init__(self, plugins: PluginRegistration) -> None:
        self._plugins = plugins

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = GaugeMetricFamily(
            "plugin_manager_total_plugins",
            "Plugins by socket path, present or registered.",
            labels=["socket_path", "state"],
        )
        for socket, registered in sorted(self._plugins.sockets().items()):
            found.add_metric([socket, "desired_state_of_world"], 1)
            if registered:
                found.add_metric([socket, "actual_state_of_world"], 1)
        yield found
