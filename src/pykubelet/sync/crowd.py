"""Whether so many pods begin or end at once that what can be told later should be told later.

The API server often shares its machine with the pods: what it is asked to note meanwhile, they wait
for. The moment after counts, too: the last pods of many are no less in a hurry than the first.
"""

from __future__ import annotations

import asyncio
import itertools
import math

from pykubelet.sync.start_gate import StartGate
from pykubelet.sync.workers import PodWorkers

MANY = 4
"""More pods than this that end at once are a crowd; so many may start at once, too."""
CALM_SECONDS = 1.5
"""How long it must have been quiet."""
PATIENCE_SECONDS = 10.0
"""A pod that takes longer to end waits for something else than this machine."""


class Crowd:
    """Looks at those who start, and at those who end."""

    def __init__(self, gate: StartGate, workers: PodWorkers) -> None:
        self._gate = gate
        self._workers = workers
        self._last = -math.inf

    def is_there(self) -> bool:
        """Whether pods wait for each other, now or until a moment ago."""
        now = asyncio.get_running_loop().time()
        if self._gate.is_full or self._many_end(now - PATIENCE_SECONDS):
            self._last = now
        return now - self._last < CALM_SECONDS

    def _many_end(self, oldest: float) -> bool:
        """Return whether more than `MANY` of the ending pods began to end after the loop time `oldest`."""
        latest = itertools.islice(reversed(self._workers.ending().values()), MANY + 1)
        return sum(since > oldest for since in latest) > MANY
