"""Volumes as a pod names them.

The kinds that the agent mounts today are typed; of any other only the name is kept (`other_kinds`
in the volumes room says which these are), so that a pod that uses one is refused with its name.
"""

from __future__ import annotations

from pykubelet.api.meta import ObjectStruct
from pykubelet.api.quantity import Quantity


class EmptyDir(ObjectStruct):
    """A folder that lives and dies with the pod: on disk, `Memory` or huge pages."""

    medium: str = ""
    size_limit: Quantity | None = None


class HostPath(ObjectStruct):
    """A path of the machine."""

    path: str
    type: str | None = None


class Volume(ObjectStruct):
    """A named volume of exactly one kind."""

    name: str
    empty_dir: EmptyDir | None = None
    host_path: HostPath | None = None
