"""What pods need from the API server, as those who need it see it: secrets, configMaps, tokens.

Volumes, environments and pulls ask through `PodObjects` and need not know how the objects are had
(`cluster_objects.py`), nor whether there is an API server at all (`NoObjects`).

Getting one object from the API server, with failures in the words that pods' owners read.

The API server's own sentence is what people search for, so it is passed on as it is; the request
and what to do about it are in the log.

Asking again an API server that has not noticed a new pod yet.

The part of the API server that judges a node's requests follows the pods by a watch of its own, and
an agent that is quick asks for what a pod needs before the pod was seen there. Then a moment's
patience saves the pod a failed start or mount, its event, and half a second.
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
    """An object cannot be had now; the text is for people."""


class ObjectNotFound(ObjectError):
    """An object certainly does not exist; whoever calls it optional goes on."""


class PodObjects(Protocol):
    """Secrets, configMaps, tokens and trust bundles that pods on this node may use.

    A pod is registered for as long as it may need something: what it refers to is kept at hand for
    that long. Whoever is not registered can still ask; it takes a request each time.
    """

    def register(self, pod: Pod) -> None:
        """Keep what a pod refers to from now on; a new version of the pod replaces the old one."""

    def unregister(self, uid: str) -> None:
        """Let go of what a pod needed; one that is not registered is none of our business."""

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        """Give a configMap of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""

    async def secret(self, pod: Pod, name: str) -> Secret:
        """Give a secret of the pod's namespace; raises ObjectError, ObjectMissing when there is none."""

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        """Give a token of the pod's service account, bound to the pod; raises ObjectError.

        An empty `audience` is the API server itself; `seconds` is the life that is asked for. The
        same is given until a new one is due, so ask again every time.
        """

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        """Give root certificates as PEM, each once: one bundle by name, or those of a signer.

        No selector chooses none of the signer's bundles, an empty one all. Raises ObjectError,
        ObjectMissing when there is nothing to give.
        """

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a pod's uid when something that it uses has changed; it must not block."""


class NoObjects:
    """The objects of a node without an API server: there are none."""

    def register(self, pod: Pod) -> None:
        """Take no note: nothing is kept."""

    def unregister(self, uid: str) -> None:
        """Take no note."""

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
        """Take no note: nothing ever changes."""

    def _refuse(self, what: str) -> NoReturn:
        raise ObjectError(f"couldn't get {what}: this node has no API server to ask")


MOMENTS = (0.02, 0.05, 0.1, 0.2)
"""Seconds to wait before asking again."""
R = TypeVar("R")


async def until_seen(ask: Callable[[], Awaitable[R]]) -> R:
    """Make a request for a pod, and a few times more while the API server does not know of the pod.

    Raises what the request raises: at once when it is refused for any other reason.
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
    """Where a reflector has its objects from; the first list is asked for until the pod was seen."""

    def __init__(self, source: ListerWatcher) -> None:
        self._source = source
        self._is_first = True

    async def list_page(self, resource: Resource[Any], namespace: str, params: Params) -> RawPage:
        """List objects as the server wrote them."""
        if not self._is_first:
            return await self._source.list_page(resource, namespace, params)
        # Once: a server that goes on refusing means it, and the reflector's growing pauses are enough.
        self._is_first = False
        return await until_seen(lambda: self._source.list_page(resource, namespace, params))

    def watch(
        self, resource: Resource[Any], namespace: str, params: Params, *, seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""
        return self._source.watch(resource, namespace, params, seconds=seconds)

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""
        await self._source.pause(seconds)


def _is_behind(err: NotFound | Forbidden) -> bool:
    """Whether the API server speaks as one that has not seen the pod, or not that it is this node's."""
    return err.details.kind == "pod" if isinstance(err, NotFound) else err.to_a_stranger


FROM_SERVERS_CACHE = (("resourceVersion", "0"),)
"""Asks for an answer that costs the API server little and may be a moment old."""


class ImmutableObject(HasMetadata, Protocol):
    """An object that its author may have declared unchangeable."""

    @property
    def immutable(self) -> bool | None:
        """Whether it never changes."""


L = TypeVar("L", bound=ImmutableObject)
L_co = TypeVar("L_co", bound=ImmutableObject, covariant=True)


class ObjectStore(Protocol[L_co]):
    """Objects of one kind that pods refer to; a key is namespace and name."""

    def hold(self, key: Key) -> None:
        """Keep an object at hand: one more pod refers to it."""

    def drop(self, key: Key) -> None:
        """Let go of an object: no pod refers to it any more."""

    async def get(self, key: Key) -> L_co:
        """Give an object; raises ObjectError, ObjectMissing when there is none."""


async def fetch(client: ApiClient, resource: Resource[T], key: Key, params: Params = ()) -> T:
    """Ask for an object; raises ObjectError, ObjectMissing when there is none."""
    namespace, name = key
    try:
        return await until_seen(lambda: client.get(resource, name, namespace, params=params))
    except NotFound as err:
        raise ObjectNotFound(err_text(err)) from err
    except KubeError as err:
        raise ObjectError(err_text(err)) from err


def err_text(err: KubeError) -> str:
    """Give what the API server said, or why it said nothing."""
    return (isinstance(err, ApiError) and err.message) or str(err)
