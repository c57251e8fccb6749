"""What is asked of a driver and what it answers, in plain types: protobuf stays in `node_client.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VolumeUse:
    """How a volume shall be had."""

    access_mode: str
    """As the API writes it: `ReadWriteOnce`."""
    block: bool = False
    """As a device; then the following mean nothing."""
    fs_type: str = ""
    mount_options: tuple[str, ...] = ()
    group: int | None = None
    """The group that the driver shall let at the files, if it can (`VOLUME_MOUNT_GROUP`)."""


@dataclass(frozen=True, slots=True)
class Context:
    """What drivers are told about a volume besides; secrets are not shown in logs."""

    published: Mapping[str, str] = field(default_factory=dict)
    """What the controller said when it attached the volume."""
    attributes: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a driver calls this node, and where the node is in the driver's eyes."""

    node_id: str
    most_volumes: int = 0
    """How many volumes fit; 0 when the driver sets no limit."""
    topology: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DriverUsage:
    """How full a volume is in its driver's eyes, and whether it is well; None is unknown."""

    capacity: int = 0
    available: int = 0
    used: int = 0
    inodes: int = 0
    inodes_free: int = 0
    inodes_used: int = 0
    abnormal: bool | None = None
    message: str = ""
