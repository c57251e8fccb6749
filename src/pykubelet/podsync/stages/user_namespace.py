"""Stage of the pod's user namespace: an ID range, kept in the pod's directory and returned with it."""

from __future__ import annotations

from pykubelet.kuberuntime.configuration.user_namespaces import UserNamespaces
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.objects.base import ObjectError
from pykubelet.objects.runtime_classes import HandlerLookup
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.stages.base import PodStart, Stage


class UserNamespaceStage(Stage):
    """ID mappings of a pod with `hostUsers: false`."""

    name = "user-namespace"

    def __init__(self, namespaces: UserNamespaces, handler_of: HandlerLookup, history: PodHistory) -> None:
        self._namespaces = namespaces
        self._handler_of = handler_of
        self._history = history

    async def prepare(self, start: PodStart) -> None:
        """Allocate the ID range with the first start, read it afterwards."""
        if start.pod.spec.host_users is not False:
            return
        try:
            handler = await self._handler_of(start.pod)
            start.id_mappings = self._namespaces.mappings_for(start.pod, handler)
        except (ContainerConfigError, ObjectError, OSError) as err:
            message = f"Failed to create pod sandbox: {err}"
            self._history.event(start.pod, "Warning", "FailedCreatePodSandBox", message)
            raise SyncError(str(err)) from err
