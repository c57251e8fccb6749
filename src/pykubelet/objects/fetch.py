"""Single GETs of API objects for pods, with retries while the API server has not observed the pod.

The node authorizer denies requests for a new pod until it has observed the pod by its own watch, and the
kubelet may be faster. `retry_until_observed` retries them: that saves the pod a failed start or mount, its
event, and half a second. `fetch` raises ObjectError with the API server's own message, because users search
for it; the request and a remedy are in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from pykubelet.apiserver.client import ApiClient, HasMetadata, Params, RawPage, Resource, T
from pykubelet.apiserver.errors import ApiError, Forbidden, KubeError, NotFound
from pykubelet.apiserver.reflector import Key, ListerWatcher
from pykubelet.objects.base import ObjectError, ObjectNotFound

RETRY_DELAYS_SECONDS = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each retry."""
R = TypeVar("R")


async def retry_until_observed(request: Callable[[], Awaitable[R]]) -> R:
    """Send a request for a pod, and retry it while the API server has not observed the pod.

    Raises what the request raises: immediately if it fails for any other reason.
    """
    for delay in RETRY_DELAYS_SECONDS:
        try:
            return await request()
        except (NotFound, Forbidden) as err:
            if not _is_pod_unobserved(err):
                raise
        await asyncio.sleep(delay)
    return await request()


class RetryingListerWatcher:
    """ListerWatcher that retries the first list while the API server has not observed the pod."""

    def __init__(self, source: ListerWatcher) -> None:
        self._source = source
        self._is_first = True

    @property
    def streams_lists(self) -> bool:
        """Whether to try a streaming list before an ordinary one."""
        return self._source.streams_lists

    def disable_streaming(self) -> None:
        """Use no streaming lists for some time, because the server has refused one."""
        self._source.disable_streaming()

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects without decoding the items."""
        if not self._is_first:
            return await self._source.list_page(resource, namespace, params)
        # Only once: a persistent denial is permanent, and the reflector's back-off suffices.
        self._is_first = False
        return await retry_until_observed(lambda: self._source.list_page(resource, namespace, params))

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""
        return self._source.watch(resource, namespace, params, seconds=seconds)

    async def pause(self, seconds: float) -> None:
        """Sleep before a retry, or until the server is reachable again."""
        await self._source.pause(seconds)


def _is_pod_unobserved(err: NotFound | Forbidden) -> bool:
    """Return whether the API server has not observed the pod, or not its binding to this node."""
    return err.details.kind == "pod" if isinstance(err, NotFound) else err.lacks_relationship


FROM_SERVERS_CACHE = (("resourceVersion", "0"),)
"""Parameters of a GET from the API server's watch cache: cheap, but possibly slightly stale."""


class ImmutableObject(HasMetadata, Protocol):
    """An object with an `immutable` field."""

    @property
    def immutable(self) -> bool | None:
        """Whether the object never changes."""


L = TypeVar("L", bound=ImmutableObject)
L_co = TypeVar("L_co", bound=ImmutableObject, covariant=True)


class ObjectStore(Protocol[L_co]):
    """Store of the objects of one kind that pods refer to; a key is namespace and name."""

    def register(self, key: Key) -> None:
        """Register an object: a pod refers to it."""

    def unregister(self, key: Key) -> None:
        """Unregister an object: no pod refers to it any more."""

    async def get(self, key: Key) -> L_co:
        """Return an object. Raises ObjectError, ObjectNotFound if it does not exist."""


async def fetch(client: ApiClient, resource: Resource[T], key: Key, params: Params = ()) -> T:
    """Get an object from the API server. Raises ObjectError, ObjectNotFound if it does not exist."""
    namespace, name = key
    try:
        return await retry_until_observed(lambda: client.get(resource, name, namespace, params=params))
    except NotFound as err:
        raise ObjectNotFound(err_text(err)) from err
    except KubeError as err:
        raise ObjectError(err_text(err)) from err


def err_text(err: KubeError) -> str:
    """Return the API server's message, or the description of the failure."""
    return (isinstance(err, ApiError) and err.message) or str(err)
