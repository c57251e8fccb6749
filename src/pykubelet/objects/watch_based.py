"""Watched configMaps and secrets, one watch per object, and the informer of rarely used kinds.

`WatchBasedObjects` watches each object while pods on this node refer to it. The node authorizer allows a
node to watch only single objects that its pods refer to, so there is one watch per object, shared by these
pods. The watch of an immutable object ends once the object is known; the watch of an object without recent
requests ends too: containers read their variables once, only volumes request repeatedly.

`LazyInformer` lists and watches all objects of a kind, starting with the first request: a watch costs a
connection and memory on both sides, and few pods use runtime classes or trust bundles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from pykubelet.apiserver.client import ApiClient, Resource, T
from pykubelet.apiserver.reflector import Key, Reflector, StoreDelta
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.fetch import L, RetryingListerWatcher, fetch
from pykubelet.util.backoff import Backoff
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
SYNC_SECONDS = 1.0
"""Seconds that a caller waits for the first list."""
MIN_IDLE_SECONDS = 60.0
_FIRST_DELAY_SECONDS = 0.1
"""Short first back-off delay: pods wait for the first list."""


class WatchBasedObjects(Generic[L]):
    """Watched objects of one kind.

    `on_change` is called for every change after the first list, and after the first list if a caller has
    timed out waiting for it. A watch without a request in `idle_seconds` ends; the next request restarts it.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[L],
        scope: TaskScope,
        on_change: Callable[[Key], None],
        *,
        idle_seconds: float,
    ) -> None:
        self._client = client
        self._resource = resource
        self._scope = scope
        self._on_change = on_change
        self.set_idle_seconds(idle_seconds)
        self._watched: dict[Key, _Watched[L]] = {}

    @property
    def watches(self) -> int:
        """Number of watches that are open or being opened."""
        return sum(watched.task is not None for watched in self._watched.values())

    def register(self, key: Key) -> None:
        """Start to watch an object, unless it is watched already."""
        if key not in self._watched:
            self._watched[key] = self._start(key)

    def unregister(self, key: Key) -> None:
        """Stop the watch of an object."""
        if watched := self._watched.pop(key, None):
            watched.stop()

    async def get(self, key: Key) -> L:
        """Return an object as last observed. Raises ObjectError, ObjectNotFound if it does not exist.

        Waits at most one second for the first list. An unregistered object is fetched from the API server.
        """
        watched = self._watched.get(key)
        if watched is None:
            return await fetch(self._client, self._resource, key)
        if watched.final is not None:
            return watched.final
        if watched.task is None:
            watched = self._watched[key] = self._start(key)
        watched.requested_at = _now()
        await self._synced(watched)
        found = watched.reflector.objects.get(key)
        if found is None:
            found = await self._confirm(key, watched)
        elif found.immutable:
            watched.final = found
            watched.stop()
            log.v(4).info("Stopped watching immutable object", kind=self._resource.kind, object=_ref(key))
        return found

    def set_idle_seconds(self, seconds: float) -> None:
        """Change the seconds without a request after which a watch ends."""
        self._idle_seconds = max(seconds, MIN_IDLE_SECONDS)

    def stop_idle(self) -> None:
        """Stop the watches of objects without recent requests."""
        oldest = _now() - self._idle_seconds
        for key, watched in self._watched.items():
            # The first list is always awaited: cancelling it would only make the API server start over.
            if watched.task is not None and watched.reflector.has_synced and watched.requested_at < oldest:
                watched.stop()
                log.v(4).info("Stopped watching idle object", kind=self._resource.kind, object=_ref(key))

    def _start(self, key: Key) -> _Watched[L]:
        namespace, name = key
        reflector = Reflector(
            RetryingListerWatcher(self._client),
            self._resource,
            lambda update: self._on_update(key, watched, update),
            namespace=namespace,
            field_selector=f"metadata.name={name}",
            backoff=Backoff(first=_FIRST_DELAY_SECONDS),
        )
        task = self._scope.start(reflector.run(), name=f"{self._resource.kind} {_ref(key)}")
        watched = _Watched(reflector, task, _now())
        return watched

    async def _on_update(self, key: Key, watched: _Watched[L], update: StoreDelta[L]) -> None:
        notify = not watched.is_first_update or watched.sync_timed_out
        watched.is_first_update = watched.sync_timed_out = False
        watched.is_missing = not update.listed and not update.changed
        if notify and (update.changed or update.removed):
            self._on_change(key)

    async def _synced(self, watched: _Watched[L]) -> None:
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await watched.reflector.synced()
        except TimeoutError:
            watched.sync_timed_out = True
            kind = self._resource.kind.lower()
            raise ObjectError(f"failed to sync {kind} cache: timed out waiting for the condition") from None

    async def _confirm(self, key: Key, watched: _Watched[L]) -> L:
        """Confirm with a GET that an unobserved object does not exist: the list may be stale."""
        if reason := watched.reflector.unreadable.get(key):
            raise ObjectError(f"{self._resource.kind.lower()} {_ref(key)} cannot be read: {reason}")
        if not watched.is_missing:
            try:
                return await fetch(self._client, self._resource, key)
            except ObjectNotFound:
                watched.is_missing = True
        raise ObjectNotFound(f'{self._resource.kind.lower()} "{key[1]}" not found')


@dataclass(slots=True, eq=False)
class _Watched(Generic[L]):
    reflector: Reflector[L]
    task: asyncio.Task[Any] | None
    requested_at: float
    """Loop time of the last request."""
    final: L | None = None
    """Final state of an immutable object."""
    is_first_update: bool = True
    sync_timed_out: bool = False
    """Whether a caller timed out waiting for the first list."""
    is_missing: bool = False
    """Whether it is certain that the object does not exist."""

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None


def _ref(key: Key) -> str:
    return "/".join(key)


def _now() -> float:
    return asyncio.get_running_loop().time()


class LazyInformer(Generic[T]):
    """Informer of all objects of one kind, or of those that a field selector matches.

    It is started by the first request.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[T],
        scope: TaskScope,
        on_update: Callable[[StoreDelta[T]], Awaitable[None]] | None = None,
        *,
        field_selector: str = "",
    ) -> None:
        self._scope = scope
        self._name = f"copy of {resource.plural}"
        self._reflector = Reflector(client, resource, on_update or _ignore, field_selector=field_selector)
        self._started = False

    async def objects(self, seconds: float) -> Mapping[Key, T]:
        """Return the objects by namespace and name. Raises TimeoutError if they are not listed in time."""
        if not self._started:
            self._started = True
            self._scope.start(self._reflector.run(), name=self._name)
        if not self._reflector.has_synced:
            async with asyncio.timeout(seconds):
                await self._reflector.synced()
        return self._reflector.objects


async def _ignore(update: StoreDelta[T]) -> None:
    pass
