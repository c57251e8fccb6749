"""Requests to CSI drivers and their results as plain types, which do not load the generated protobuf code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VolumeCapability:
    """Requested access to a volume (CSI VolumeCapability)."""

    access_mode: str
    """Access mode in the spelling of the API: `ReadWriteOnce`."""
    block: bool = False
    """Access as a block device; then the following fields have no effect."""
    fs_type: str = ""
    mount_options: tuple[str, ...] = ()
    group: int | None = None
    """GID to which the driver grants access to the files, if it supports `VOLUME_MOUNT_GROUP`."""


@dataclass(frozen=True, slots=True)
class Context:
    """Publish context, volume context and secrets of a request; the latter two are excluded from `repr`."""

    published: Mapping[str, str] = field(default_factory=dict)
    """Publish context that the driver's controller returned when it attached the volume."""
    attributes: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Response to NodeGetInfo: the driver's ID, volume limit and topology of this node."""

    node_id: str
    max_volumes: int = 0
    """Maximum number of the driver's volumes on this node; 0 if the driver sets no limit."""
    topology: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DriverUsage:
    """Response to NodeGetVolumeStats: bytes, inodes and condition; `abnormal` is None if it is unknown."""

    capacity: int = 0
    available: int = 0
    used: int = 0
    inodes: int = 0
    inodes_free: int = 0
    inodes_used: int = 0
    abnormal: bool | None = None
    message: str = ""
