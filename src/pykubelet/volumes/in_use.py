"""Attached volumes are told to be in use before anybody touches them.

Whoever attaches and detaches volumes goes by the node's `status.volumesInUse`: a volume that is mounted
and not yet told could be detached under its mount. So a volume that a pod is about to use is reported
first, and used when the API server has been told. Pods without such volumes never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pykubelet.volumes.errors import KindError

PATIENCE_SECONDS = 60.0


class NotReported(KindError):
    """The API server could not be told that a volume is in use."""

    action = "MountVolume.WaitForAttach failed"


class InUseReports:
    """Has volumes reported; without a listener there is no cluster, and nobody to be told."""

    def __init__(self) -> None:
        self._changed: Callable[[], None] | None = None
        self._told: set[str] = set()
        self._news = asyncio.Event()
        self.last: frozenset[str] | None = None
        """What the API server was last known to have; None before it has been asked."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Call this whenever there is something new to report."""
        self._changed = changed

    def changed(self) -> None:
        """Have the report renewed."""
        if self._changed is not None:
            self._changed()

    def reported(self, names: Iterable[str]) -> None:
        """Take note of what the API server was told just now."""
        self.last = frozenset(names)
        self._told = set(self.last)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait(self, name: str, *, new: bool) -> None:
        """Wait until a volume that counts as in use has been reported; raises NotReported.

        If it counts only from now on (`new`), earlier reports do not: the volume may have been left out
        of one that is on its way.
        """
        if self._changed is None:
            return
        if new:
            self._told.discard(name)
            self._changed()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while name not in self._told:
                    await self._news.wait()
        except TimeoutError:
            raise NotReported(
                "Volume has not been added to the list of VolumesInUse in the node's volume status"
            ) from None
