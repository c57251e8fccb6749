"""Growing pauses between attempts at something that fails, one per key.

Used for crashing containers and for images that cannot be pulled: 10 s, doubling up to a limit,
and forgotten once the thing has been well for twice the limit, or for a time of its own. All
times are arguments (seconds, any clock), so that a five-minute back-off is tested in no time.

Trying again without being a nuisance: growing pauses, and complaints that are made once.

An API server can be away for an hour, or come and go. The pauses grow, with chance in them so that a
thousand nodes do not come back in step; the log names each kind of failure once, and again every ten
minutes while it goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pykubelet.logs import Log


@dataclass(slots=True)
class _Entry:
    pause: float
    updated: float


@dataclass(slots=True)
class BackOff:
    """Pauses in seconds by key."""

    first: float = 10.0
    limit: float = 300.0
    expiry: float | None = None
    """Seconds without a failure after which a key starts over; None for twice the limit."""
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def remaining(self, key: str, since: float, now: float) -> float:
        """Seconds still to wait when the last failure was at `since`; 0 when the next try is due."""
        entry = self._entries.get(key)
        if entry is None or self._expired(entry, since):
            return 0.0
        # A clock that was set back must not make the pause longer.
        return min(entry.pause, max(0.0, entry.pause - (now - since)))

    def pause(self, key: str) -> float:
        """The pause now in force for this key."""
        entry = self._entries.get(key)
        return entry.pause if entry else 0.0

    def attempt(self, key: str, since: float, now: float) -> None:
        """Note that another attempt begins, after a failure at `since`: the next pause is longer."""
        entry = self._entries.get(key)
        if entry is None or self._expired(entry, since):
            self._entries[key] = _Entry(min(self.first, self.limit), now)
        else:
            entry.pause = min(entry.pause * 2, self.limit)
            entry.updated = now

    def forget(self, key: str) -> None:
        """Start over for this key."""
        self._entries.pop(key, None)

    def prune(self, now: float) -> None:
        """Drop what has been well for long enough: memory must not grow with the node's history."""
        for key in [key for key, entry in self._entries.items() if self._expired(entry, now)]:
            del self._entries[key]

    def _expired(self, entry: _Entry, moment: float) -> bool:
        return moment - entry.updated > (2 * self.limit if self.expiry is None else self.expiry)


REMIND_SECONDS = 600.0
LONGEST_PUT_OFF_SECONDS = 60.0


def put_off(pause: float, retry_after: float | None) -> float:
    """Give a pause as long as a server wants it (Retry-After), within reason.

    A proxy in front of it may say an hour on its page about maintenance, and be done in a minute.
    """
    return max(pause, min(retry_after or 0.0, LONGEST_PUT_OFF_SECONDS))


class Backoff:
    """Pauses in seconds: from `first`, doubling up to `limit`, each stretched by chance up to twofold.

    When none was needed for `reset_after` seconds, or for another cause, they begin anew. Times are of
    any steady clock.
    """

    def __init__(
        self,
        first: float = 0.8,
        limit: float = 30.0,
        reset_after: float = 120.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._limit = limit
        self._reset_after = reset_after
        self._chance = chance
        self._next = first
        self._last: float | None = None
        self._cause: object = None

    def next(self, now: float, cause: object = None) -> float:
        """Give the pause before the next try.

        An API server that answers again, if only by a refusal, should not be waited for as long as one
        that is away: say by `cause` which it is.
        """
        if cause != self._cause or (self._last is not None and now - self._last > self._reset_after):
            self._next, self._cause = self._first, cause
        pause = self._next * (1 + self._chance())
        self._next = min(self._next * 2, self._limit)
        # The pause itself is no sign of health.
        self._last = now + pause
        return pause


class ErrorLogLimiter:
    """Says what fails, once for each kind of failure and then every ten minutes."""

    def __init__(self, log: Log, message: str, **keys: object) -> None:
        self._log = log
        self._message = message
        self._keys = keys
        self._told: dict[type[BaseException], float] = {}
        self._since: float | None = None
        self._said = False

    def failed(self, err: BaseException, now: float) -> None:
        """Note a failure, and say it when it is worth a line."""
        if self._since is None:
            self._since = now
        told = self._told.get(type(err))
        if told is None or now - told >= REMIND_SECONDS:
            self._told[type(err)] = now
            self._said = True
            self._log.error(err, self._message, **self._keys, forSeconds=round(now - self._since))
        else:
            self._log.v(4).info(self._message, err=err, **self._keys)

    def succeeded(self, now: float) -> None:
        """Note a success; when a failure was told before, say that it is over."""
        if self._since is not None:
            speak = self._log if self._said else self._log.v(4)
            speak.info("Works again", **self._keys, afterSeconds=round(now - self._since))
            self._since, self._said = None, False
