"""ConfigMaps and secrets without watches: cached with a TTL, or fetched every time.

A cached object is valid for the TTL of the node's annotation, and is fetched again when another pod starts
to refer to it. While the API server is unavailable, the last known state is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from pykubelet.apiserver.client import ApiClient, Resource
from pykubelet.apiserver.reflector import Key
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.objects.fetch import FROM_SERVERS_CACHE, L, fetch

DEFAULT_TTL_SECONDS = 60.0


class UncachedObjects(Generic[L]):
    """Uncached objects of one kind (strategy Get)."""

    def __init__(self, client: ApiClient, resource: Resource[L]) -> None:
        self._client = client
        self._resource = resource

    def register(self, key: Key) -> None:
        """Do nothing."""

    def unregister(self, key: Key) -> None:
        """Do nothing."""

    async def get(self, key: Key) -> L:
        """Get an object. Raises ObjectError, ObjectNotFound if it does not exist."""
        return await fetch(self._client, self._resource, key)


class CacheBasedObjects(Generic[L]):
    """TTL cache of the objects of one kind that pods refer to (strategy Cache).

    `ttl` returns the seconds, or None for the default; `on_change` is called when a refresh returns another
    version.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[L],
        ttl: Callable[[], float | None],
        on_change: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._resource = resource
        self._ttl = ttl
        self._on_change = on_change
        self._entries: dict[Key, _CacheEntry[L]] = {}

    def register(self, key: Key) -> None:
        """Cache an object from now on, and refresh it before its next use."""
        self._entries.setdefault(key, _CacheEntry()).stale = True

    def unregister(self, key: Key) -> None:
        """Remove an object from the cache."""
        self._entries.pop(key, None)

    async def get(self, key: Key) -> L:
        """Return an object. Raises ObjectError, ObjectNotFound if it does not exist."""
        entry = self._entries.get(key)
        if entry is None:
            return await fetch(self._client, self._resource, key)
        # Concurrent callers share one refresh.
        async with entry.lock:
            if not self._is_fresh(entry):
                await self._refresh(key, entry)
        if isinstance(entry.state, ObjectNotFound):
            raise ObjectNotFound(str(entry.state))
        assert entry.state is not None
        return entry.state

    def _is_fresh(self, entry: _CacheEntry[L]) -> bool:
        # Absence may be temporary: it is not cached.
        if entry.stale or entry.state is None or isinstance(entry.state, ObjectNotFound):
            return False
        ttl = self._ttl()
        return _now() < entry.refreshed_at + (DEFAULT_TTL_SECONDS if ttl is None else ttl)

    async def _refresh(self, key: Key, entry: _CacheEntry[L]) -> None:
        """Refresh an entry. Raises ObjectError only if there is no previous state to fall back to."""
        before = entry.state
        refetch = before is not None and not isinstance(before, ObjectNotFound) and not entry.stale
        found: L | ObjectNotFound
        try:
            found = await fetch(self._client, self._resource, key, FROM_SERVERS_CACHE if refetch else ())
        except ObjectNotFound as err:
            found = err
        except ObjectError:
            if before is None or entry.stale:
                raise
            return
        if refetch and _is_older(found, before):
            return
        entry.state, entry.refreshed_at, entry.stale = found, _now(), False
        if before is not None and _version(found) != _version(before):
            self._on_change(key)


@dataclass(slots=True, eq=False)
class _CacheEntry(Generic[L]):
    state: L | ObjectNotFound | None = None
    refreshed_at: float = 0.0
    """Loop time of the last refresh."""
    stale: bool = True
    """Whether a pod was registered since the last refresh."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def _version(state: L | ObjectNotFound | None) -> str:
    return "" if state is None or isinstance(state, ObjectNotFound) else state.metadata.resource_version


def _is_older(found: L | ObjectNotFound, known: L | ObjectNotFound | None) -> bool:
    """Return whether the server's cache is older than the version observed before."""
    found_version, known_version = _version(found), _version(known)
    return found_version.isdecimal() and known_version.isdecimal() and int(found_version) < int(known_version)


def _now() -> float:
    return asyncio.get_running_loop().time()
