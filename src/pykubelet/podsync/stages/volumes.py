"""Stage of the pod's volumes: mounted before the sandbox is created, unmounted when no container runs."""

from __future__ import annotations

from collections.abc import Callable

from pykubelet.api.pod import Pod
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodRejected, SyncError
from pykubelet.podsync.stages.base import PodStart, Stage
from pykubelet.volumes.errors import VolumeError, failure_event
from pykubelet.volumes.manager import PodVolumes

MOUNT_SECONDS = 0.3
"""Seconds that mounting may take before the pod's start slot is released."""
REFRESH_SECONDS = 10.0
"""Seconds until the next attempt to update volumes after a failure."""


class VolumeStage(Stage):
    """Volumes of a pod."""

    name = "volumes"

    def __init__(
        self,
        volumes: PodVolumes,
        history: PodHistory,
        keeps_volumes: Callable[[str], bool] = lambda uid: False,
    ) -> None:
        """Initialize; `keeps_volumes` returns whether a terminated pod's volumes stay mounted."""
        self._volumes = volumes
        self._history = history
        self._keeps_volumes = keeps_volumes

    async def prepare(self, start: PodStart) -> None:
        """Mount all volumes, or update those that are mounted."""
        if not start.pod.spec.volumes:
            return
        try:
            start.volumes = await start.slot.while_away(self._volumes.mount(start.pod), after=MOUNT_SECONDS)
        except VolumeError as err:
            if err.rejection_reason:
                raise PodRejected(err.rejection_reason, str(err)) from err
            self._record(start.pod, err)
            raise SyncError(str(err), err.retry_after) from err

    async def refresh(self, pod: Pod) -> float | None:
        """Update mounted volumes with the current API objects; return the seconds until a retry."""
        if not pod.spec.volumes:
            return None
        try:
            await self._volumes.refresh(pod)
        except VolumeError as err:
            self._record(pod, err)
            return max(REFRESH_SECONDS, err.retry_after or 0.0)
        return None

    async def release(self, uid: str, pod: Pod | None) -> None:
        """Unmount all volumes, unless they stay mounted until the pod is deleted."""
        if self._keeps_volumes(uid):
            self._history.note(uid, "volumes", "they stay mounted: --keep-terminated-pod-volumes")
            return
        try:
            await self._volumes.unmount(uid)
        except VolumeError as err:
            if pod is not None:
                self._history.event(pod, "Warning", "FailedUnMount", str(err))
            raise SyncError(f"cleaning up: {err}") from err
        except OSError as err:
            raise SyncError(f"cleaning up: {err}") from err

    def _record(self, pod: Pod, err: VolumeError) -> None:
        for problem in err.problems:
            self._history.event(pod, "Warning", failure_event(problem), problem)
        self._history.note(pod.uid, "volumes", str(err))
