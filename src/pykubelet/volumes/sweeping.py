"""Taking down what several pods shared of a volume, when none of them has it any more.

Staged mounts, logins to targets, mounted disks: they outlive each pod, so nobody's worker takes them down.
It is done soon after a pod has left, and now and then, because an earlier agent may have left something. A
kind that hangs is left to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from pykubelet.logs import get_logger
from pykubelet.volumes.holdings import Holdings
from pykubelet.volumes.kind import VolumeKind
from pykubelet.volumes.operations import Operations
from pykubelet.volumes.together import side_by_side

log = get_logger(__name__)

SECONDS = 60.0
"""How often to look, when no pod leaves."""
PATIENCE = 30.0
"""How long to wait for a kind that looks, in seconds."""


class Sweeping:
    """Has all kinds sweep."""

    def __init__(self, kinds: Mapping[str, VolumeKind], holdings: Holdings, operations: Operations) -> None:
        self._kinds = kinds
        self._holdings = holdings
        self._operations = operations
        self._due = asyncio.Event()

    def soon(self) -> None:
        """Have it done soon: a pod has left."""
        self._due.set()

    async def run(self, swept: Callable[[], None]) -> NoReturn:
        """Sweep until cancelled; `swept` is called each time after a pod has left."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await self._due.wait()
            left = self._due.is_set()
            self._due.clear()
            await self.once()
            if left:
                swept()

    async def once(self) -> None:
        """Sweep now; failures are only told."""
        await side_by_side([self._kind(name, kind) for name, kind in self._kinds.items()])

    async def _kind(self, name: str, kind: VolumeKind) -> None:
        def work() -> Coroutine[Any, Any, None]:
            return kind.sweep(self._holdings.names)

        try:
            await self._operations.run(f"all/{name}", "sweeping", work, patience=PATIENCE, pauses=False)
        except Exception as err:  # anything may go wrong in others' kinds, and the agent has to go on
            log.error(err, "Could not take down volumes that no pod uses any more", kind=name)
