"""Spans of time the way `kubectl` shows them: two numbers at most, the smaller the older."""

from __future__ import annotations

from datetime import datetime

from pykubelet.api.pod import Pod
from pykubelet.pods.static import SEEN_ANNOTATION

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def span(seconds: float) -> str:
    """Write a length of time for people: `45s`, `5m30s`, `3h`, `2d4h`."""
    whole = int(seconds)
    if whole < -1:
        return "<invalid>"
    if whole < 2 * _MINUTE:
        return f"{max(whole, 0)}s"
    # From where on a unit stands alone, and until where it is the leading one.
    for unit, name, part, part_name, alone, end in (
        (_MINUTE, "m", 1, "s", 10 * _MINUTE, 3 * _HOUR),
        (_HOUR, "h", _MINUTE, "m", 8 * _HOUR, 2 * _DAY),
        (_DAY, "d", _HOUR, "h", 8 * _DAY, 2 * _YEAR),
    ):
        if whole < end:
            return _two(whole, unit, name, part, part_name, alone)
    return _two(whole, _YEAR, "y", _DAY, "d", 8 * _YEAR)


def _two(whole: int, unit: int, name: str, part: int, part_name: str, alone: int) -> str:
    leading, rest = divmod(whole, unit)
    parts = rest // part
    return f"{leading}{name}" if whole >= alone or not parts else f"{leading}{name}{parts}{part_name}"


def since(moment: datetime | None, now: datetime) -> str:
    """How long ago something was."""
    return "<unknown>" if moment is None else span((now - moment).total_seconds())


def pod_birth(pod: Pod) -> datetime | None:
    """When a pod came to be: as its API server says, or when this node first saw it."""
    if pod.metadata.creation_timestamp is not None:
        return pod.metadata.creation_timestamp
    if pod.status.start_time is not None:
        return pod.status.start_time
    try:
        # Nine digits of a second are three more than Python reads.
        seen = pod.metadata.annotations[SEEN_ANNOTATION]
        moment = datetime.fromisoformat(seen[:26] + seen[29:])
    except (KeyError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None
