"""What runtimes can do that CRI does not let one ask for: known by their names and versions."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)")
_MOUNTS_IMAGES = {"containerd": (2, 1), "cri-o": (1, 31)}


def can_mount_images(name: str, version: str) -> bool:
    """Whether a runtime mounts an image as a volume; one that is not known is taken to."""
    first = _MOUNTS_IMAGES.get(name)
    found = _NUMBERS.match(version)
    if first is None or found is None:
        return True
    return (int(found[1]), int(found[2])) >= first
