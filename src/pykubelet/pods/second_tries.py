"""Asking again an API server that has not noticed a new pod yet.

The part of the API server that judges a node's requests follows the pods by a watch of its own, and
an agent that is quick asks for what a pod needs before the pod was seen there. Then a moment's
patience saves the pod a failed start or mount, its event, and half a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from pykubelet.kube.calls import Params
from pykubelet.kube.client import RawPage
from pykubelet.kube.errors import Forbidden, NotFound
from pykubelet.kube.reflector import Source
from pykubelet.kube.resources import Resource

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


class PatientSource:
    """Where a reflector has its objects from; the first list is asked for until the pod was seen."""

    def __init__(self, source: Source) -> None:
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
