"""What a kind of volume is: one file with one class, and one line in `kinds.py`.

A kind keeps nothing in memory about the volumes it gave: the agent may be killed at any time, and
another one, or the same, looks at the disk and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.volume import Volume
from pykubelet.pods.objects import PodObjects
from pykubelet.volumes.mounted import MountedVolume


class NodeView(Protocol):
    """What volumes tell pods about their node."""

    @property
    def host_ips(self) -> Sequence[str]:
        """The node's addresses, the preferred family first."""

    @property
    def allocatable(self) -> Resources:
        """What pods may use together."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All that kinds are made of."""

    root: Path
    """The agent's root directory."""
    objects: PodObjects
    node: NodeView
    memory_limit: Callable[[Pod], int | None]
    """What a pod's memory is bounded by, in bytes."""
    allocatable_memory: int
    """What all pods' memory is bounded by, in bytes."""
    pod_level: bool
    """Whether resources of the whole pod count (`PodLevelResources`)."""


class VolumeKind(Protocol):
    """Gives volumes of one kind."""

    @property
    def folder(self) -> str:
        """The folder of this kind in a pod's `volumes`; "" when volumes lie elsewhere.

        What is in it is the agent's own, mounted or written by it: with the pod it is unmounted and
        deleted.
        """

    @property
    def live(self) -> bool:
        """Whether the content follows its source: then setting up again brings it up to date."""

    async def set_up(self, pod: Pod, volume: Volume) -> MountedVolume:
        """Have a volume ready; harmless to repeat, at any time and after any interruption.

        Raises KindError, ValueError, ObjectError or OSError, whose text is for the pod's author.
        """
