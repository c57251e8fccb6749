"""Stage of the allocated resources: CPUs, memory and devices, and the allocation of a resize.

They are allocated at admission (`resource_allocator.py`), before the first sync.
"""

from __future__ import annotations

from collections.abc import Callable

from pykubelet.api.pod import Pod
from pykubelet.podsync.resource_allocator import ResourceAllocator
from pykubelet.podsync.stages.base import Stage
from pykubelet.resize.allocation_manager import AllocationManager


class AllocationStage(Stage):
    """CPUs, memory, devices and the allocated resources of a pod."""

    name = "allocation"

    def __init__(
        self,
        resources: ResourceAllocator,
        allocation: AllocationManager,
        is_restarting: Callable[[str], bool],
    ) -> None:
        """Initialize; `is_restarting` returns whether the same pod starts again and keeps its resources."""
        self._resources = resources
        self._allocation = allocation
        self._is_restarting = is_restarting

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Release CPUs, memory and devices; other pods may get them before volumes are unmounted."""
        self._allocation.on_pod_terminated(uid)
        if not self._is_restarting(uid):
            self._resources.forget(uid)

    def forget(self, uid: str) -> None:
        """Drop the checkpoint entries of the allocated and actuated resources."""
        self._allocation.on_pod_removed(uid)
