"""Stage of the pod's cgroup: created with its limits, removed when no container runs."""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart, Stage
from pykubelet.resize.allocation_manager import AllocationManager


class CgroupStage(Stage):
    """Cgroup of a pod; its limits are the allocated resources, so its creation also actuates a resize."""

    name = "cgroup"

    def __init__(self, cgroups: PodCgroups, allocation: AllocationManager, history: PodHistory) -> None:
        self._cgroups = cgroups
        self._allocation = allocation
        self._history = history

    async def prepare(self, start: PodStart) -> None:
        """Ensure that the cgroup exists with the pod's limits."""
        try:
            start.cgroup_parent = await self._cgroups.ensure(start.pod)
        except OSError as err:
            message = f"unable to ensure pod container exists: {err}"
            self._history.event(start.pod, "Warning", "FailedCreatePodContainer", message)
            raise SyncError(message) from err
        self._allocation.on_cgroup_created(start.pod)

    def is_intact(self, pod: Pod) -> bool:
        """Return whether the cgroup exists: without it, the pod runs without limits."""
        return self._cgroups.exists(pod)

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Remove the cgroup and kill processes in it."""
        try:
            await self._cgroups.remove(uid)
        except OSError as err:
            raise SyncError(f"cleaning up: {err}") from err
