"""Access of pods to API objects: interface, errors, and a single GET with retry.

Volumes, environment variables and image pulls use `PodObjects`, independent of its implementation
(`cluster_objects.py`, or `NoObjects` without an API server).

`fetch` raises ObjectError with the API server's own message, because users search for it; the request and
a remedy are in the log.

`until_seen` retries requests that the node authorizer denies because it has not observed a new pod yet: it
follows the pods by its own watch, and the kubelet may be faster. The short retry saves the pod a failed
start or mount, its event, and half a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol, TypeVar

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.pod import Pod
from pykubelet.api.selector import LabelSelector
from pykubelet.apiserver.client import ApiClient, HasMetadata, Params, RawPage, Resource, T
from pykubelet.apiserver.errors import ApiError, Forbidden, KubeError, NotFound
from pykubelet.apiserver.reflector import Key, ListerWatcher


class ObjectError(Exception):
    """An object is currently not available; the text is for users."""


class ObjectNotFound(ObjectError):
    """The object does not exist; callers for which it is optional continue."""


class PodObjects(Protocol):
    """Secrets, configMaps, tokens and trust bundles that pods on this node may use.

    A pod is registered while it may need objects; the objects that it refers to are cached for that long.
    Unregistered pods are served too, with one API request each time.
    """

    def register(self, pod: Pod) -> None:
        """Cache the objects of a pod from now on; a new version of the pod replaces the old one."""

    def unregister(self, uid: str) -> None:
        """Release the objects of a pod; a pod that is not registered is ignored."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Return a configMap of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Return a secret of the pod's namespace. Raises ObjectError, ObjectNotFound if it is missing."""

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Return a token of the pod's service account, bound to the pod. Raises ObjectError.

        An empty `audience` means the API server; `seconds` is the requested lifetime. The same token is
        returned until its renewal is due, so callers request it for every use.
        """

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Return root certificates as PEM without duplicates: one bundle by name, or those of a signer.

        Without a selector no bundle of the signer matches, with an empty one all do. Raises ObjectError,
        ObjectNotFound if no bundle matches.
        """

    def listen(self, listener: Callable[[str], None]) -> None:
        """Add a listener, called with the UID of a pod when an object it uses changed; it must not block."""


class NoObjects:
    """PodObjects of a node without an API server: every request fails."""

    def register(self, pod: Pod) -> None:
        """Do nothing: there is no cache."""

    def unregister(self, uid: str) -> None:
        """Do nothing."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Raise ObjectError."""
        self._refuse(f"configMap {pod.metadata.namespace}/{name}")

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Raise ObjectError."""
        self._refuse(f"secret {pod.metadata.namespace}/{name}")

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Raise ObjectError."""
        self._refuse(f"a token of service account {pod.metadata.namespace}/{pod.spec.service_account_name}")

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Raise ObjectError."""
        self._refuse(f"clusterTrustBundle {name or signer}")

    def listen(self, listener: Callable[[str], None]) -> None:
        """Do nothing: no object ever changes."""

    def _refuse(self, what: str) -> NoReturn:
        raise ObjectError(f"couldn't get {what}: this node has no API server to ask")


MOMENTS = (0.02, 0.05, 0.1, 0.2)
"""Seconds before each retry."""
R = TypeVar("R")


async def until_seen(ask: Callable[[], Awaitable[R]]) -> R:
    """Send a request for a pod, and retry it while the API server has not observed the pod.

    Raises what the request raises: immediately if it fails for any other reason.
    """
    for moment in MOMENTS:
        try:
            return await ask()
        except (NotFound, Forbidden) as err:
            if not _is_behind(err):
                raise
        await asyncio.sleep(moment)
    return await ask()


class RetryingListerWatcher:
    """ListerWatcher that retries the first list while the API server has not observed the pod."""

    def __init__(self, source: ListerWatcher) -> None:
        self._source = source
        self._is_first = True

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects without decoding the items."""
        if not self._is_first:
            return await self._source.list_page(resource, namespace, params)
        # Only once: a persistent denial is permanent, and the reflector's back-off suffices.
        self._is_first = False
        return await until_seen(lambda: self._source.list_page(resource, namespace, params))

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""
        return self._source.watch(resource, namespace, params, seconds=seconds)

    async def pause(self, seconds: float) -> None:
        """Sleep before a retry, or until the server is reachable again."""
        await self._source.pause(seconds)


def _is_behind(err: NotFound | Forbidden) -> bool:
    """Return whether the API server has not observed the pod, or not its binding to this node."""
    return err.details.kind == "pod" if isinstance(err, NotFound) else err.to_a_stranger


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

    def hold(self, key: Key) -> None:
        """Register an object: a pod refers to it."""

    def drop(self, key: Key) -> None:
        """Unregister an object: no pod refers to it any more."""

    async def get(self, key: Key) -> L_co:
        """Return an object. Raises ObjectError, ObjectNotFound if it does not exist."""


async def fetch(client: ApiClient, resource: Resource[T], key: Key, params: Params = ()) -> T:
    """Get an object from the API server. Raises ObjectError, ObjectNotFound if it does not exist."""
    namespace, name = key
    try:
        return await until_seen(lambda: client.get(resource, name, namespace, params=params))
    except NotFound as err:
        raise ObjectNotFound(err_text(err)) from err
    except KubeError as err:
        raise ObjectError(err_text(err)) from err


def err_text(err: KubeError) -> str:
    """Return the API server's message, or the description of the failure."""
    return (isinstance(err, ApiError) and err.message) or str(err)
