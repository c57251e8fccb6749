"""From single outcomes to a verdict: so many in a row, then it counts.

A pure state machine, one state per container and kind. A container begins as started: unknown,
ready: no, alive: yes. A verdict changes after `failures` failed or `successes` passed outcomes in
a row. Whoever failed liveness, or has been told its startup either way, is *held*: there is
nothing more to ask of that container, a new one begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykubelet.probes.kinds import Kind, Terms, Verdict

_BEGINNING: dict[Kind, Verdict] = {"startup": "unknown", "readiness": "failure", "liveness": "success"}


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Where one probe of one container stands."""

    verdict: Verdict
    last_passed: bool = True
    run: int = 0
    """How many outcomes in a row were like the last one."""
    held: bool = False


def begin(kind: Kind, verdict: Verdict | None = None) -> ProbeState:
    """The state of a container that was never asked; `verdict` is what an earlier agent knew."""
    if verdict is None:
        verdict = _BEGINNING[kind]
    return ProbeState(verdict, held=_is_final(kind, verdict))


def step(state: ProbeState, passed: bool, kind: Kind, terms: Terms) -> tuple[ProbeState, Verdict | None]:
    """Take one outcome into account; the second value is the new verdict, if it changed."""
    run = state.run + 1 if passed == state.last_passed else 1
    if run < (terms.successes if passed else terms.failures):
        return ProbeState(state.verdict, passed, run, state.held), None
    verdict: Verdict = "success" if passed else "failure"
    after = ProbeState(verdict, passed, run, _is_final(kind, verdict))
    return after, verdict if verdict != state.verdict else None


def _is_final(kind: Kind, verdict: Verdict) -> bool:
    match kind:
        case "startup":
            return verdict != "unknown"
        case "readiness":
            return False
        case "liveness":
            return verdict == "failure"
