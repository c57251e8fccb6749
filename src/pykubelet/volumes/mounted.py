"""The result of mounting, as the makers of containers need it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume of the pod that is ready to be mounted into containers."""

    path: str
    read_only: bool = False
    """The volume cannot be written, whatever the mount says."""
    relabel: bool = False
    """Its files may be relabelled for SELinux."""
    device: str = ""
    """The block device on the host, of a volume that is wanted as one; then `path` is empty."""
    bound: str = ""
    """The folder in which the device is bound for each pod; empty for the usual one of its kind."""
    attached: str = ""
    """The name by which the volume is in use on this node (`status.volumesInUse`); most have none."""
    image: str = ""
    """The image that the runtime shall mount by itself; then `path` is empty."""
    name: str = ""
    """The name of its folder if it is another than the pod's own name for it: the persistent volume's."""
    group: int | None = None
    """A group that the pod's processes need to use the volume."""
