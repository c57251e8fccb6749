"""How many long answers are given at once: to everybody together, and to each user.

Logs that are followed, commands and forwarded ports last as long as their clients want. Whoever opens too
many is told to come back later; everybody else still finds room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pykubelet.server.refused import Refused

MOST = 800
# The API server asks for everybody in the cluster and is one user, so this is nearly everything.
MOST_OF_ONE = 600


class StreamLimits:
    """Counts what is under way."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_more(self, user: str) -> Iterator[None]:
        """Take a place for as long as the block lasts; raises Refused when there is none."""
        if self._open.total() >= self._most or self._open[user] >= self._most_of_one:
            raise Refused(429, "Too many streams are open, try again later\n", {"Retry-After": "1"})
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]
