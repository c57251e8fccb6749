"""The kinds of volumes there are, by the name that the API gives them.

Adding one is one file and one line here. Others' kinds come by entry points of the group
`pykubelet.volumes`, whose names are the API's names of the kinds and whose objects are called with the
`VolumeHost`: what is installed beside the agent can give volumes of kinds that the agent refuses or does
not know. It cannot take the place of a kind that the agent gives.
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
    """Give all kinds, ready to use."""
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
    """Give the kinds of others that can be used; what is wrong with the rest is told, each by its name."""
    kinds: dict[str, VolumePlugin] = {}
    for entry in found:
        where = {"kind": entry.name, "entryPoint": entry.value}
        given_already = not isinstance(own.get(entry.name), UnsupportedVolumePlugin | None)
        if given_already or entry.name in kinds:
            log.error(None, "A kind of volumes is there already; the installed one is not used", **where)
            continue
        try:
            kind = entry.load()(given)
        except Exception as err:  # anything may go wrong in others' code, and the agent has to go on
            log.error(err, "A kind of volumes that is installed cannot be used", **where)
            continue
        if missing := [part for part in _PARTS if not hasattr(kind, part)]:
            log.error(None, "A kind of volumes that is installed is none", missing=missing, **where)
            continue
        if kind.folder and any(kind.folder == other.folder for other in (*own.values(), *kinds.values())):
            log.error(None, "Two kinds of volumes have one folder", folder=kind.folder, **where)
            continue
        log.info("Using a kind of volumes that is installed", **where)
        kinds[entry.name] = kind
    return kinds
