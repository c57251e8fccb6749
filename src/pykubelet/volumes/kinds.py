"""The kinds of volumes there are, by the name that the API gives them."""

from __future__ import annotations

from pykubelet.volumes.config_map import ConfigMapKind
from pykubelet.volumes.downward_api import DownwardKind
from pykubelet.volumes.empty_dir import EmptyDirKind
from pykubelet.volumes.host_path import HostPathKind
from pykubelet.volumes.kind import Surroundings, VolumeKind
from pykubelet.volumes.projected import ProjectedKind
from pykubelet.volumes.secret import SecretKind


def make_kinds(given: Surroundings) -> dict[str, VolumeKind]:
    """Give all kinds, ready to use."""
    return {
        "configMap": ConfigMapKind(given),
        "downwardAPI": DownwardKind(given),
        "emptyDir": EmptyDirKind(given),
        "hostPath": HostPathKind(),
        "projected": ProjectedKind(given),
        "secret": SecretKind(given),
    }
