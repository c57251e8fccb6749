"""A copy of all objects of a kind that most nodes never need: mirrored from the first question on.

A watch costs a connection and its memory at all times, on both sides; runtime classes and bundles
of root certificates are used by few pods, or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic

from pykubelet.kube.client import ApiClient
from pykubelet.kube.object_copy import Key, Update
from pykubelet.kube.reflector import Reflector
from pykubelet.kube.resources import Resource, T
from pykubelet.tasks import TaskScope


class LazyCopy(Generic[T]):
    """All objects of one kind."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[T],
        scope: TaskScope,
        on_update: Callable[[Update[T]], Awaitable[None]] | None = None,
    ) -> None:
        self._scope = scope
        self._name = f"copy of {resource.plural}"
        self._reflector = Reflector(client, resource, on_update or _ignore)
        self._started = False

    async def objects(self, seconds: float) -> Mapping[Key, T]:
        """Give the objects by namespace and name; raises TimeoutError when they are not known in time."""
        if not self._started:
            self._started = True
            self._scope.start(self._reflector.run(), name=self._name)
        if not self._reflector.has_synced:
            async with asyncio.timeout(seconds):
                await self._reflector.synced()
        return self._reflector.objects


async def _ignore(update: Update[T]) -> None:
    pass
