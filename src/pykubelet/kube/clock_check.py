"""Whether this machine's clock agrees with the API server's.

A clock that is off makes certificates invalid, tokens expired and ages absurd, and each of these looks
like something else. Every answer of the API server carries its time, so the cause can be named before
anybody looks for it; the agent goes on as well as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from email.utils import parsedate_to_datetime

from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger

log = get_logger(__name__)

TOLERANCE_SECONDS = 60.0
"""What a slow answer may make of it, and what does no harm."""
INTERVAL_SECONDS = 10.0
"""How often to look at most."""


class ClockOffError(Exception):
    """The two clocks do not agree; `ahead` is in seconds, negative when ours is behind."""

    def __init__(self, ahead: float) -> None:
        super().__init__(ahead)
        self.ahead = ahead

    def __str__(self) -> str:
        which = "ahead of" if self.ahead > 0 else "behind"
        off = timedelta(seconds=round(abs(self.ahead)))
        return f"it is {off} {which} the API server's clock: correct whichever is wrong, or run an NTP client"


class ClockCheck:
    """Compares the clocks; `clock` gives this machine's, in seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = 0.0
        self._complaints = Complaints(log, "This machine's clock may be wrong")

    def heard(self, date: str, now: float) -> None:
        """Take the `Date` of an answer that has just come; `now` is of any steady clock."""
        if now < self._next or not date:
            return
        self._next = now + INTERVAL_SECONDS
        try:
            ahead = self._clock() - parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        if abs(ahead) > TOLERANCE_SECONDS:
            self._complaints.failed(ClockOffError(ahead), now)
        else:
            self._complaints.succeeded(now)
