"""When to ask next: soon where somebody waits, spread where nobody does.

A container that starts while the agent runs:

- startup and readiness are asked at once after the initial delay, and until they pass, again after
  0.5, 1.5, 3.5 ... seconds, up to one period. In that first period a failure neither counts nor is
  reported: these *eager* looks only make a pod ready as early as it is, and the time that the author
  gave (`failureThreshold` × `periodSeconds`) stays what it is.
- liveness is first asked in the second half of the first period: a container that has only just
  been started must not be judged before it could listen.
- after that, once per period, at the same point of it.

Where in its period a probe falls is a hash of what it is, so that the probes of many pods that
started together drift apart, and the same probe behaves the same each time. Containers that ran
before the agent did are asked at that point of the first period: a restarted agent does not storm
the node.

All times are the loop's, in seconds.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from pykubelet.probes.kinds import Kind, Terms

FIRST_GAP = 0.5
"""Between the first two eager looks; it doubles."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One moment at which to ask."""

    due: float
    opened: float
    """When the first one could have been."""
    eager: bool = False


def phase_of(uid: str, container_name: str, kind: Kind) -> float:
    """Where in its period a probe falls: from 0 up to 1, evenly spread."""
    return zlib.crc32(f"{uid}/{container_name}/{kind}".encode()) / 2**32


def first_beat(kind: Kind, terms: Terms, opened: float, phase: float, *, ran_before: bool) -> Beat:
    """When to ask for the first time.

    `opened` is the earliest moment, now or later: the initial delay has passed and, for all but
    startup itself, the container has started. `ran_before` is for a container older than the agent.
    """
    if ran_before:
        return Beat(opened + phase * terms.period, opened)
    if kind == "liveness":
        return Beat(opened + _later_half(phase, terms), opened)
    return Beat(opened, opened, eager=True)


def next_beat(beat: Beat, terms: Terms, passed: bool, now: float, phase: float) -> Beat:
    """When to ask after an outcome; never in the past, so that nothing piles up behind a slow one."""
    if not beat.eager:
        return Beat(max(beat.due + terms.period, now), beat.opened)
    if passed:
        return Beat(max(beat.due + _later_half(phase, terms), now), beat.opened)
    end = beat.opened + terms.period
    due = max(beat.due + (beat.due - beat.opened) + FIRST_GAP, now)
    return Beat(due, beat.opened, eager=True) if due < end else Beat(max(end, now), beat.opened)


def _later_half(phase: float, terms: Terms) -> float:
    return terms.period * (0.5 + phase / 2)
