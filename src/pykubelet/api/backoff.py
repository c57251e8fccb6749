"""Growing pauses between attempts at something that fails, one per key.

Used for crashing containers and for images that cannot be pulled: 10 s, doubling up to a limit,
and forgotten once the thing has been well for twice the limit, or for a time of its own. All
times are arguments (seconds, any clock), so that a five-minute back-off is tested in no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
