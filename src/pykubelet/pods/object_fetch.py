"""Getting one object from the API server, with failures in the words that pods' owners read.

The API server's own sentence is what people search for, so it is passed on as it is; the request
and what to do about it are in the log.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from pykubelet.kube.calls import Params
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import ApiError, KubeError, NotFound
from pykubelet.kube.object_copy import Key
from pykubelet.kube.resources import HasMetadata, Resource, T
from pykubelet.pods.objects import ObjectError, ObjectMissing
from pykubelet.pods.second_tries import until_seen

FROM_SERVERS_CACHE = (("resourceVersion", "0"),)
"""Asks for an answer that costs the API server little and may be a moment old."""


class Lasting(HasMetadata, Protocol):
    """An object that its author may have declared unchangeable."""

    @property
    def immutable(self) -> bool | None:
        """Whether it never changes."""


L = TypeVar("L", bound=Lasting)
L_co = TypeVar("L_co", bound=Lasting, covariant=True)


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
        raise ObjectMissing(err_text(err)) from err
    except KubeError as err:
        raise ObjectError(err_text(err)) from err


def err_text(err: KubeError) -> str:
    """Give what the API server said, or why it said nothing."""
    return (isinstance(err, ApiError) and err.message) or str(err)
