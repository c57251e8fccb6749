"""What runtimes can do that CRI does not let one ask for: known by their names and versions."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)")
_MOUNTS_IMAGES = {"containerd": (2, 1), "cri-o": (1, 31)}
_KNOWS_CDI = {"containerd": (1, 7)}


def can_mount_images(name: str, version: str) -> bool:
    """Whether a runtime mounts an image as a volume; one that is not known is taken to."""
    return _is_new_enough(name, version, _MOUNTS_IMAGES)


def knows_cdi(name: str, version: str) -> bool:
    """Whether a runtime knows devices by their CDI names; one that is not known is taken to."""
    return _is_new_enough(name, version, _KNOWS_CDI)


def _is_new_enough(name: str, version: str, table: Mapping[str, tuple[int, int]]) -> bool:
    first = table.get(name)
    found = _NUMBERS.match(version)
    if first is None or found is None:
        return True
    return (int(found[1]), int(found[2])) >= first
