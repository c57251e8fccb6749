"""Which of the runtime's handlers runs a pod: what its RuntimeClass says."""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import RUNTIME_CLASSES, ApiClient
from pykubelet.objects.base import ObjectError, ObjectNotFound, fetch
from pykubelet.objects.watch_based import LazyInformer
from pykubelet.util.tasks import TaskScope

SYNC_SECONDS = 5.0


class RuntimeClasses:
    """The cluster's runtime classes, asked for when the first pod names one."""

    def __init__(self, client: ApiClient, scope: TaskScope) -> None:
        self._client = client
        self._copy = LazyInformer(client, RUNTIME_CLASSES, scope)

    async def handler(self, pod: Pod) -> str:
        """Give the name of the pod's handler, empty for the runtime's default.

        Raises ObjectError, ObjectMissing when the class does not exist.
        """
        name = pod.spec.runtime_class_name
        if not name:
            return ""
        try:
            classes = await self._copy.objects(SYNC_SECONDS)
        except TimeoutError:
            message = f"failed to lookup RuntimeClass {name}: runtime classes are not known yet"
            raise ObjectError(message) from None
        found = classes.get(("", name))
        if found is None:
            # It may be newer than the copy.
            try:
                found = await fetch(self._client, RUNTIME_CLASSES, ("", name))
            except ObjectNotFound:
                raise ObjectNotFound(f'runtimeclass.node.k8s.io "{name}" not found') from None
            except ObjectError as err:
                raise ObjectError(f"failed to lookup RuntimeClass {name}: {err}") from err
        return found.handler


async def default_handler(pod: Pod) -> str:
    """Give the runtime's default handler: a node without an API server knows no runtime classes."""
    return ""
