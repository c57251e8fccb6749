"""Stage of the pod's directory below the root directory of the kubelet."""

from __future__ import annotations

from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart, Stage


class DirectoryStage(Stage):
    """Directory of a pod; the worker removes it with the pod's other remnants."""

    name = "directory"

    def __init__(self, dirs: PodDirs, history: PodHistory) -> None:
        self._dirs = dirs
        self._history = history

    async def prepare(self, start: PodStart) -> None:
        """Create the directory."""
        try:
            self._dirs.make(start.pod.uid)
        except OSError as err:
            message = f"error making pod data directories: {err}"
            self._history.event(start.pod, "Warning", "Failed", message)
            raise SyncError(message) from err
