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
