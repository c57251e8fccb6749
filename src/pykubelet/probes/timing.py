"""When to ask next: at once where somebody waits for it, spread where nobody does.

- A container that is not ready, or not known to have started, is asked at once after the initial
  delay and, until it passes, again after 0.5, 1.5, 3.5 ... seconds, up to one period. In that first
  period a failure neither counts nor is reported: these *eager* looks only make a pod ready as early
  as it is, and the time that its author gave it (`failureThreshold` x `periodSeconds`) stays whole.
- The liveness of a new container is first asked in the second half of the first period: what has
  only just been started must not be judged before it could listen.
- Containers that were there before the agent are asked somewhere in the first period: an agent that
  restarts does not storm the node.
- After that, once per period, at the same point of it.

Where in its period a probe falls is a hash of what it is: the probes of many pods that started
together drift apart, and the same probe behaves the same each time.

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


def first_beat(terms: Terms, opened: float, phase: float, *, waited_for: bool, ran_before: bool) -> Beat:
    """When to ask for the first time.

    `opened` is the earliest moment, now or later: the initial delay has passed and, for all but
    startup itself, the container has started. `ran_before`: the container is older than the agent.
    """
    if waited_for:
        return Beat(opened, opened, eager=True)
    return Beat(opened + (phase * terms.period if ran_before else _later_half(phase, terms)), opened)


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
