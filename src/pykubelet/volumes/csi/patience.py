"""How long a pod that ends waits for a driver to take back what it published."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

ABSENT_SECONDS = 30.0
"""For a driver that is not there: not registered, or nobody answers at its socket."""
FAILING_SECONDS = 120.0
"""For a driver that is there, and fails or stays silent: it may have a reason."""


@dataclass(slots=True)
class _Trouble:
    since: float
    absent_since: float | None


class Patience:
    """Since when drivers fail to take back pods' volumes, by the published places; times are the loop's."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}

    def is_over(self, place: str, *, absent: bool) -> bool:
        """Take note of a failure, and say whether the pod has waited long enough."""
        now = asyncio.get_running_loop().time()
        trouble = self._troubles.setdefault(place, _Trouble(now, None))
        if not absent:
            trouble.absent_since = None
        elif trouble.absent_since is None:
            trouble.absent_since = now
        if trouble.absent_since is not None and now - trouble.absent_since >= ABSENT_SECONDS:
            return True
        return now - trouble.since >= FAILING_SECONDS

    def forget(self, place: str) -> None:
        """Take note that a pod has let go."""
        self._troubles.pop(place, None)
