"""Lookup of the runtime handler of a pod's RuntimeClass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import RUNTIME_CLASSES, ApiClient
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.fetch import fetch
from pykubelet.objects.watch_based import LazyInformer
from pykubelet.util.tasks import TaskScope

SYNC_SECONDS = 5.0
HandlerLookup = Callable[[Pod], Awaitable[str]]
"""Returns the runtime handler of a pod, empty for the runtime's default. Raises ObjectError."""


class RuntimeClasses:
    """RuntimeClass informer, started when the first pod has a `runtimeClassName`."""

    def __init__(self, client: ApiClient, scope: TaskScope) -> None:
        self._client = client
        self._informer = LazyInformer(client, RUNTIME_CLASSES, scope)

    async def handler(self, pod: Pod) -> str:
        """Return the name of the pod's runtime handler, empty for the runtime's default.

        Raises ObjectError, ObjectNotFound if the RuntimeClass does not exist.
        """
        name = pod.spec.runtime_class_name
        if not name:
            return ""
        try:
            classes = await self._informer.objects(SYNC_SECONDS)
        except TimeoutError:
            message = f"failed to lookup RuntimeClass {name}: runtime classes are not known yet"
            raise ObjectError(message) from None
        found = classes.get(("", name))
        if found is None:
            # It may be newer than the informer's state.
            try:
                found = await fetch(self._client, RUNTIME_CLASSES, ("", name))
            except ObjectNotFound:
                raise ObjectNotFound(f'runtimeclass.node.k8s.io "{name}" not found') from None
            except ObjectError as err:
                raise ObjectError(f"failed to lookup RuntimeClass {name}: {err}") from err
        return found.handler


async def default_handler(pod: Pod) -> str:
    """Return the runtime's default handler, for a node without an API server."""
    return ""
