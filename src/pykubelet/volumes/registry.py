"""Volume plugins by the API field of their volume type.

A built-in plugin is one class and one line here. Third-party plugins are entry points of the group
`pykubelet.volumes`: the name is the API field of the volume type, the object is called with the `VolumeHost`.
They can provide volume types that the kubelet rejects or does not know, and cannot replace a plugin that the
kubelet has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pykubelet.logs import get_logger
from pykubelet.util.entry_points import EntryPoint, installed
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.plugin import VolumeHost, VolumePlugin
from pykubelet.volumes.plugins.config_map import ConfigMapPlugin
from pykubelet.volumes.plugins.downward_api import DownwardApiPlugin
from pykubelet.volumes.plugins.empty_dir import EmptyDirPlugin
from pykubelet.volumes.plugins.fc import FcPlugin
from pykubelet.volumes.plugins.flex import FlexVolumePlugin
from pykubelet.volumes.plugins.host_path import HostPathPlugin
from pykubelet.volumes.plugins.image import REASONS, ImagePlugin, UnsupportedVolumePlugin
from pykubelet.volumes.plugins.iscsi import IscsiPlugin
from pykubelet.volumes.plugins.local import LocalPlugin
from pykubelet.volumes.plugins.nfs import NfsPlugin
from pykubelet.volumes.plugins.projected import ProjectedPlugin
from pykubelet.volumes.plugins.secret import SecretPlugin

log = get_logger(__name__)
GROUP = "pykubelet.volumes"
PluginFactory = Callable[[VolumeHost], VolumePlugin]
_MEMBERS = (
    "directory_name",
    "live",
    "slow",
    "blocks",
    "options",
    "set_up",
    "tear_down",
    "in_use",
    "unmount_unused",
)


def load_plugins(host: VolumeHost) -> dict[str, VolumePlugin]:
    """Return all plugins, ready to use."""
    builtin: dict[str, VolumePlugin] = {
        "configMap": ConfigMapPlugin(host),
        "csi": CsiPlugin(host),
        "downwardAPI": DownwardApiPlugin(host),
        "emptyDir": EmptyDirPlugin(host),
        "fc": FcPlugin(host),
        "flexVolume": FlexVolumePlugin(host),
        "hostPath": HostPathPlugin(),
        "image": ImagePlugin(host),
        "iscsi": IscsiPlugin(host),
        "local": LocalPlugin(host),
        "nfs": NfsPlugin(host),
        "projected": ProjectedPlugin(host),
        "secret": SecretPlugin(host),
        **dict.fromkeys(REASONS, UnsupportedVolumePlugin()),
    }
    return builtin | load_third_party_plugins(host, builtin, installed(GROUP))


def load_third_party_plugins(
    host: VolumeHost, builtin: Mapping[str, VolumePlugin], found: Iterable[EntryPoint[PluginFactory]]
) -> dict[str, VolumePlugin]:
    """Return the third-party plugins that can be used; an error is logged for each of the rest."""
    plugins: dict[str, VolumePlugin] = {}
    for entry in found:
        where = {"kind": entry.name, "entryPoint": entry.value}
        is_supported = not isinstance(builtin.get(entry.name), UnsupportedVolumePlugin | None)
        if is_supported or entry.name in plugins:
            log.error(None, "Ignored volume plugin of an already supported type", **where)
            continue
        try:
            plugin = entry.load()(host)
        except Exception as err:  # third-party code may raise anything
            log.error(err, "Failed to load volume plugin", **where)
            continue
        if missing := [member for member in _MEMBERS if not hasattr(plugin, member)]:
            log.error(None, "Ignored invalid volume plugin", missing=missing, **where)
            continue
        if plugin.directory_name and any(
            plugin.directory_name == other.directory_name for other in (*builtin.values(), *plugins.values())
        ):
            log.error(
                None,
                "Ignored volume plugin with a duplicate directory",
                directory=plugin.directory_name,
                **where,
            )
            continue
        log.info("Loaded volume plugin", **where)
        plugins[entry.name] = plugin
    return plugins
