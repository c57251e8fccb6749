"""Stage of the pod's user namespace: an ID range, kept in the pod's directory and returned with it."""

from __future__ import annotations

from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.user_namespaces import UserNamespaces
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart, Stage


class UserNamespaceStage(Stage):
    """ID mappings of a pod with `hostUsers: false`."""

    def __init__(self, namespaces: UserNamespaces, history: PodHistory) -> None:
        self._namespaces = namespaces
        self._history = history

    async def prepare(self, start: PodStart) -> None:
        """Allocate the ID range with the first start, read it afterwards."""
        try:
            start.id_mappings = self._namespaces.mappings_for(start.pod)
        except (ContainerConfigError, OSError) as err:
            message = f"Failed to create pod sandbox: {err}"
            self._history.event(start.pod, "Warning", "FailedCreatePodSandBox", message)
            raise SyncError(str(err)) from err
