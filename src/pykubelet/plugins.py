"""Plugins of all kinds, put together: one folder where they make themselves known, one handler per type.

Each room that plugins can serve offers its handlers, `{"CSIPlugin": ...}`, `{"DevicePlugin": ...}`,
`{"DRAPlugin": ...}`; `start_plugins` is where they are collected. A node without a cluster has plugins, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pykubelet.host.plugin_registration import PluginHandler, PluginRegistration
from pykubelet.host.selinux import share_with_containers
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

FOLDER = "plugins_registry"
SOCKETS_FOLDER = "plugins"
"""Where plugins have what they serve on: their manifests mount it, and may expect it to be there."""

_FOLDER_MODE = 0o750


def start_plugins(
    root: Path, registry: CollectorRegistry, tasks: TaskScope, *rooms: Mapping[str, PluginHandler]
) -> None:
    """Attend to plugins in the folder below `root`; each room gives its handlers, by type of plugin."""
    handlers = {kind: handler for room in rooms for kind, handler in room.items()}
    for folder in (root / FOLDER, root / SOCKETS_FOLDER):
        _share(folder)
    plugins = PluginRegistration(root / FOLDER, handlers)
    registry.register(_Plugins(plugins))
    tasks.start(plugins.run(), name="plugins")


def _share(folder: Path) -> None:
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as err:
        log.error(err, "Cannot make a folder of plugins", path=folder)
    else:
        share_with_containers(folder)


class _Plugins(Collector):
    """Shows the plugins that there are, and those that are registered."""

    def __init__(self, plugins: PluginRegistration) -> None:
        self._plugins = plugins

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = GaugeMetricFamily(
            "plugin_manager_total_plugins",
            "Plugins by their sockets: those that are there, and those that are registered.",
            labels=["socket_path", "state"],
        )
        for socket, registered in sorted(self._plugins.sockets().items()):
            found.add_metric([socket, "desired_state_of_world"], 1)
            if registered:
                found.add_metric([socket, "actual_state_of_world"], 1)
        yield found
