"""Exponential back-off, and rate-limited logging of repeated errors.

`KeyedBackoff` keeps a delay per key, for crashing containers and failing image pulls: 10 s, doubling up to a
limit, and reset after twice the limit (or `expiry`) without a failure. `Backoff` is one sequence of delays
for retries of API requests, with jitter so that many nodes do not retry in step; `ExponentialDelay` is the
plain sequence, for loops that retry on this host; `exponential_delay` computes one delay of it, for callers
that count their failures.

An API server can be away for an hour, or come and go: `ErrorLogLimiter` logs each type of failure once, and
again every ten minutes while it persists.

All times are arguments (seconds of any clock), so that tests need not wait. State is in memory only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pykubelet.logs import Log


@dataclass(slots=True)
class _Entry:
    delay: float
    updated: float


@dataclass(slots=True)
class KeyedBackoff:
    """Exponential back-off by key, in seconds."""

    first: float = 10.0
    limit: float = 300.0
    expiry: float | None = None
    """Seconds without a failure after which a key is reset; None for twice the limit."""
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def remaining(self, key: str, since: float, now: float) -> float:
        """Return the seconds to wait after the last failure, at `since`; 0 if the next attempt is due."""
        entry = self._entries.get(key)
        if entry is None or self._expired(entry, since):
            return 0.0
        # A clock that was set back must not lengthen the delay.
        return min(entry.delay, max(0.0, entry.delay - (now - since)))

    def delay(self, key: str) -> float:
        """Return the current back-off delay of a key."""
        entry = self._entries.get(key)
        return entry.delay if entry else 0.0

    def attempt(self, key: str, since: float, now: float) -> None:
        """Record an attempt after a failure at `since`: the delay is set to `first`, or doubled."""
        entry = self._entries.get(key)
        if entry is None or self._expired(entry, since):
            self._entries[key] = _Entry(min(self.first, self.limit), now)
        else:
            entry.delay = min(entry.delay * 2, self.limit)
            entry.updated = now

    def forget(self, key: str) -> None:
        """Reset a key."""
        self._entries.pop(key, None)

    def prune(self, now: float) -> None:
        """Remove expired keys, so that memory does not grow with the node's history."""
        for key in [key for key, entry in self._entries.items() if self._expired(entry, now)]:
            del self._entries[key]

    def _expired(self, entry: _Entry, now: float) -> bool:
        return now - entry.updated > (2 * self.limit if self.expiry is None else self.expiry)


REPEAT_SECONDS = 600.0
STABLE_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 60.0


def delay_with_retry_after(delay: float, retry_after: float | None) -> float:
    """Return the longer of a delay and the server's Retry-After, which is limited to 60 s.

    A proxy in maintenance may send an hour, and be back after a minute.
    """
    return max(delay, min(retry_after or 0.0, MAX_RETRY_AFTER_SECONDS))


_MAX_DOUBLINGS = 60
"""Doublings after which a delay does not grow: a float has no value for 2.0 ** 1024."""


def exponential_delay(first: float, limit: float, failures: int) -> float:
    """Return the delay after so many consecutive failures: `first` seconds, doubling up to `limit`."""
    return min(limit, first * 2.0 ** min(max(failures - 1, 0), _MAX_DOUBLINGS))


class ExponentialDelay:
    """Delays of a loop that retries: `first` seconds, doubling up to `limit`, until `reset`."""

    def __init__(self, first: float, limit: float) -> None:
        self._first = first
        self._limit = limit
        self._next = first

    def next(self) -> float:
        """Return the delay before the next attempt."""
        delay, self._next = self._next, min(self._next * 2, self._limit)
        return delay

    def reset(self) -> None:
        """Start over with the first delay."""
        self._next = self._first


class Backoff:
    """Exponential back-off with jitter: `first` seconds, doubling up to `limit`, times a random 1 to 2.

    It restarts at `first` after `reset_after` seconds without a call, or for another cause. Times are of any
    monotonic clock.
    """

    def __init__(
        self,
        first: float = 0.8,
        limit: float = 30.0,
        reset_after: float = 120.0,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._delay = ExponentialDelay(first, limit)
        self._reset_after = reset_after
        self._rng = rng
        self._last: float | None = None
        self._cause: object = None

    def next(self, now: float, cause: object = None) -> float:
        """Return the delay before the next attempt.

        A change of `cause` resets the delay: an API server that responds again, if only with an error, is
        retried sooner than one that is not reachable.
        """
        if cause != self._cause or (self._last is not None and now - self._last > self._reset_after):
            self._delay.reset()
            self._cause = cause
        delay = self._delay.next() * (1 + self._rng())
        # The delay itself does not count as time without a failure.
        self._last = now + delay
        return delay


MAX_CAUSES = 1000
"""Causes that are logged within `REPEAT_SECONDS`; further ones are logged at -v=4 only."""


class ErrorLogLimiter:
    """Logs failures, once per cause and then every ten minutes.

    The cause is the type of an exception, or the whole text of a failure that has none. After
    `STABLE_SECONDS` of success the next failure is logged like the first one. A shorter success does not
    count, so that a call that alternately fails and succeeds does not fill the log.
    """

    def __init__(self, log: Log, message: str, **keys: object) -> None:
        self._log = log
        self._message = message
        self._keys = keys
        self._last_logged: dict[type[BaseException] | str, float] = {}
        self._since: float | None = None
        self._recovered_at: float | None = None
        self._error_logged = False

    def failed(self, err: BaseException | str, now: float) -> None:
        """Record a failure, and log it as an error if it is due, otherwise at -v=4."""
        if self._since is None:
            self._since = now
            if self._recovered_at is not None and now - self._recovered_at >= STABLE_SECONDS:
                self._last_logged.clear()
        if self._is_due(err if isinstance(err, str) else type(err), now):
            self._error_logged = True
            self._log.error(err, self._message, **self._keys, forSeconds=round(now - self._since))
        else:
            self._log.v(4).info(self._message, err=err, **self._keys)

    def _is_due(self, cause: type[BaseException] | str, now: float) -> bool:
        last_logged = self._last_logged.get(cause)
        if last_logged is None and len(self._last_logged) >= MAX_CAUSES:
            recent = {known: time for known, time in self._last_logged.items() if now - time < REPEAT_SECONDS}
            self._last_logged = recent
            if len(recent) >= MAX_CAUSES:
                return False
        if last_logged is not None and now - last_logged < REPEAT_SECONDS:
            return False
        self._last_logged[cause] = now
        return True

    def succeeded(self, now: float) -> None:
        """Record a success, and log the recovery after a failure."""
        if self._since is not None:
            log = self._log if self._error_logged else self._log.v(4)
            log.info("Works again", **self._keys, afterSeconds=round(now - self._since))
            self._since, self._error_logged, self._recovered_at = None, False, now
