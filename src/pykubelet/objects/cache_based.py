"""ConfigMaps or secrets without watches: kept for a while, or asked for every time.

What is kept is good for as long as the node's annotation says, and is looked at anew when another
pod begins to refer to it. While the API server cannot answer, the last known state is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from pykubelet.apiserver.client import ApiClient, Resource
from pykubelet.apiserver.reflector import Key
from pykubelet.objects.base import FROM_SERVERS_CACHE, L, ObjectError, ObjectNotFound, fetch

DEFAULT_TTL_SECONDS = 60.0


class UncachedObjects(Generic[L]):
    """Objects of one kind, asked for every time."""

    def __init__(self, client: ApiClient, resource: Resource[L]) -> None:
        self._client = client
        self._resource = resource

    def hold(self, key: Key) -> None:
        """Take no note."""

    def drop(self, key: Key) -> None:
        """Take no note."""

    async def get(self, key: Key) -> L:
        """Ask for an object; raises ObjectError, ObjectMissing when there is none."""
        return await fetch(self._client, self._resource, key)


class CacheBasedObjects(Generic[L]):
    """Objects of one kind, kept while pods refer to them and they are young enough.

    `ttl` gives the seconds, or None for the default; `on_change` hears when another look shows
    another version.
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
        self._kept: dict[Key, _Kept[L]] = {}

    def hold(self, key: Key) -> None:
        """Keep an object from now on, and look at it anew before it is given out."""
        self._kept.setdefault(key, _Kept()).stale = True

    def drop(self, key: Key) -> None:
        """Keep an object no longer."""
        self._kept.pop(key, None)

    async def get(self, key: Key) -> L:
        """Give an object; raises ObjectError, ObjectMissing when there is none."""
        kept = self._kept.get(key)
        if kept is None:
            return await fetch(self._client, self._resource, key)
        # Whoever asks meanwhile wants the same answer.
        async with kept.turn:
            if not self._is_fresh(kept):
                await self._look(key, kept)
        if isinstance(kept.state, ObjectNotFound):
            raise ObjectNotFound(str(kept.state))
        assert kept.state is not None
        return kept.state

    def _is_fresh(self, kept: _Kept[L]) -> bool:
        # That there is none may have been true for a moment only: it is asked for every time.
        if kept.stale or kept.state is None or isinstance(kept.state, ObjectNotFound):
            return False
        ttl = self._ttl()
        return _now() < kept.looked + (DEFAULT_TTL_SECONDS if ttl is None else ttl)

    async def _look(self, key: Key, kept: _Kept[L]) -> None:
        """Bring a state up to date; raises ObjectError only when there is no other state to go on with."""
        before = kept.state
        again = before is not None and not isinstance(before, ObjectNotFound) and not kept.stale
        found: L | ObjectNotFound
        try:
            found = await fetch(self._client, self._resource, key, FROM_SERVERS_CACHE if again else ())
        except ObjectNotFound as err:
            found = err
        except ObjectError:
            if before is None or kept.stale:
                raise
            return
        if again and _is_older(found, before):
            return
        kept.state, kept.looked, kept.stale = found, _now(), False
        if before is not None and _version(found) != _version(before):
            self._on_change(key)


@dataclass(slots=True, eq=False)
class _Kept(Generic[L]):
    state: L | ObjectNotFound | None = None
    looked: float = 0.0
    """When, in the loop's time."""
    stale: bool = True
    """Whether a pod came since the last look."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


def _version(state: L | ObjectNotFound | None) -> str:
    return "" if state is None or isinstance(state, ObjectNotFound) else state.metadata.resource_version


def _is_older(found: L | ObjectNotFound, known: L | ObjectNotFound | None) -> bool:
    """Whether the server's cache is behind what was seen before."""
    one, other = _version(found), _version(known)
    return one.isdecimal() and other.isdecimal() and int(one) < int(other)


def _now() -> float:
    return asyncio.get_running_loop().time()
