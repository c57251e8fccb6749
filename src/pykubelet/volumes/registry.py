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
from pykubelet.util.third_party import load_entry_points
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
    accepted: list[EntryPoint[PluginFactory]] = []
    for entry in sorted(found, key=lambda entry: (entry.name, entry.value)):
        is_supported = not isinstance(builtin.get(entry.name), UnsupportedVolumePlugin | None)
        if is_supported or any(entry.name == other.name for other in accepted):
            log.error(
                None,
                "Ignored volume plugin of an already supported type",
                name=entry.name,
                entryPoint=entry.value,
            )
        else:
            accepted.append(entry)
    for loaded in load_entry_points(GROUP, "volume plugin", accepted, lambda make: _build(make, host)):
        plugin = loaded.result
        if plugin is None:
            continue
        if plugin.directory_name and any(
            plugin.directory_name == other.directory_name for other in (*builtin.values(), *plugins.values())
        ):
            log.error(
                None,
                "Ignored volume plugin with a duplicate directory",
                directory=plugin.directory_name,
                name=loaded.name,
                entryPoint=loaded.value,
            )
            continue
        plugins[loaded.name] = plugin
    return plugins


def _build(factory: PluginFactory, host: VolumeHost) -> VolumePlugin:
    """Return a third-party plugin. Raises TypeError for an object that is not one."""
    plugin = factory(host)
    if missing := [member for member in _MEMBERS if not hasattr(plugin, member)]:
        raise TypeError(f"it is not a VolumePlugin, it has no {', '.join(missing)}")
    if not isinstance(plugin.directory_name, str):
        raise TypeError("its directory_name is not text")
    return plugin
