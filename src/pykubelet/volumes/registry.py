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
from pykubelet.volumes.plugins.config_map import ConfigMapKind
from pykubelet.volumes.plugins.downward_api import DownwardKind
from pykubelet.volumes.plugins.empty_dir import EmptyDirKind
from pykubelet.volumes.plugins.fc import FcKind
from pykubelet.volumes.plugins.flex import FlexKind
from pykubelet.volumes.plugins.host_path import HostPathKind
from pykubelet.volumes.plugins.image import REASONS, ImageKind, UnsupportedVolumePlugin
from pykubelet.volumes.plugins.iscsi import IscsiKind
from pykubelet.volumes.plugins.local import LocalKind
from pykubelet.volumes.plugins.nfs import NfsKind
from pykubelet.volumes.plugins.projected import ProjectedKind
from pykubelet.volumes.plugins.secret import SecretKind

log = get_logger(__name__)
GROUP = "pykubelet.volumes"
Maker = Callable[[VolumeHost], VolumePlugin]
_PARTS = ("folder", "live", "slow", "blocks", "options", "set_up", "take_down", "in_use", "sweep")


def make_kinds(given: VolumeHost) -> dict[str, VolumePlugin]:
    """Return all plugins, ready to use."""
    own: dict[str, VolumePlugin] = {
        "configMap": ConfigMapKind(given),
        "csi": CsiPlugin(given),
        "downwardAPI": DownwardKind(given),
        "emptyDir": EmptyDirKind(given),
        "fc": FcKind(given),
        "flexVolume": FlexKind(given),
        "hostPath": HostPathKind(),
        "image": ImageKind(given),
        "iscsi": IscsiKind(given),
        "local": LocalKind(given),
        "nfs": NfsKind(given),
        "projected": ProjectedKind(given),
        "secret": SecretKind(given),
        **dict.fromkeys(REASONS, UnsupportedVolumePlugin()),
    }
    return own | others_kinds(given, own, installed(GROUP))


def others_kinds(
    given: VolumeHost, own: Mapping[str, VolumePlugin], found: Iterable[EntryPoint[Maker]]
) -> dict[str, VolumePlugin]:
    """Return the third-party plugins that can be used; an error is logged for each of the rest."""
    kinds: dict[str, VolumePlugin] = {}
    for entry in found:
        where = {"kind": entry.name, "entryPoint": entry.value}
        given_already = not isinstance(own.get(entry.name), UnsupportedVolumePlugin | None)
        if given_already or entry.name in kinds:
            log.error(None, "Ignored volume plugin of an already supported type", **where)
            continue
        try:
            kind = entry.load()(given)
        except Exception as err:  # third-party code may raise anything
            log.error(err, "Failed to load volume plugin", **where)
            continue
        if missing := [part for part in _PARTS if not hasattr(kind, part)]:
            log.error(None, "Ignored invalid volume plugin", missing=missing, **where)
            continue
        if kind.folder and any(kind.folder == other.folder for other in (*own.values(), *kinds.values())):
            log.error(
                None, "Ignored volume plugin with a duplicate directory", directory=kind.folder, **where
            )
            continue
        log.info("Loaded volume plugin", **where)
        kinds[entry.name] = kind
    return kinds
