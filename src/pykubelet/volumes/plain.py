"""Volumes of a node without an API server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.pods.objects import NoObjects
from pykubelet.volumes.pod_volumes import PodVolumes


@dataclass(frozen=True, slots=True)
class _Nowhere:
    host_ips: tuple[str, ...] = ()
    allocatable: Resources = field(default_factory=dict)


class PlainVolumes(PodVolumes):
    """What `PodVolumes` gives without objects and addresses."""

    def __init__(
        self,
        root: Path,
        *,
        memory_limit: Callable[[Pod], int | None],
        allocatable_memory: int,
        pod_level: bool = True,
    ) -> None:
        super().__init__(
            root,
            objects=NoObjects(),
            node=_Nowhere(),
            memory_limit=memory_limit,
            allocatable_memory=allocatable_memory,
            pod_level=pod_level,
        )
