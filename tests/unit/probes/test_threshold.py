import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.probes.results import ProbeState, initial_state, step
from pykubelet.probes.types import KINDS, Kind, ProbeParameters, Result

counts = st.integers(1, 5)
kinds = st.sampled_from(KINDS)


def terms(successes: int = 1, failures: int = 3) -> ProbeParameters:
    return ProbeParameters(delay=0, period=10, timeout=1, successes=successes, failures=failures)


def play(kind: Kind, outcomes: str, successes: int = 1, failures: int = 3) -> tuple[ProbeState, list[str]]:
    """Outcomes are `+` and `-`; gives the last state and, per outcome, the change or nothing."""
    state = initial_state(kind)
    changes: list[str] = []
    for outcome in outcomes:
        state, change = step(state, outcome == "+", kind, terms(successes, failures))
        changes.append(change or "")
    return state, changes


@pytest.mark.parametrize(
    ("kind", "outcomes", "successes", "failures", "changes", "held"),
    [
        ("readiness", "+", 1, 3, ["success"], False),
        ("readiness", "+++", 3, 3, ["", "", "success"], False),
        ("readiness", "++-++", 3, 3, ["", "", "", "", ""], False),
        ("readiness", "+---", 1, 3, ["success", "", "", "failure"], False),
        ("readiness", "+--+---", 1, 3, ["success", "", "", "", "", "", "failure"], False),
        ("readiness", "---", 1, 3, ["", "", ""], False),  # it was not ready before
        ("liveness", "+", 1, 3, [""], False),  # it was alive before
        ("liveness", "--", 1, 3, ["", ""], False),
        ("liveness", "---", 1, 3, ["", "", "failure"], True),
        ("liveness", "-", 1, 1, ["failure"], True),
        ("startup", "-", 1, 3, [""], False),
        ("startup", "--+", 1, 3, ["", "", "success"], True),
        ("startup", "---", 1, 3, ["", "", "failure"], True),
    ],
)
def test_step_result_changes_at_thresholds(
    kind: Kind, outcomes: str, successes: int, failures: int, changes: list[str], held: bool
) -> None:
    state, found = play(kind, outcomes, successes, failures)
    assert (found, state.held) == (changes, held)


def test_initial_state_continues_from_previous_result() -> None:
    assert initial_state("startup", "success").held
    assert not initial_state("readiness", "success").held
    state, change = step(initial_state("readiness", "success"), False, "readiness", terms(failures=2))
    assert (state.result, change) == ("success", None)
    state, change = step(state, False, "readiness", terms(failures=2))
    assert change == "failure"


@given(kinds, st.text("+-", max_size=60), counts, counts)
def test_step_result_is_of_last_run_reaching_threshold(
    kind: Kind, outcomes: str, successes: int, failures: int
) -> None:
    expected: Result = initial_state(kind).result
    for end in range(1, len(outcomes) + 1):
        if outcomes[:end].endswith("+" * successes):
            expected = "success"
        elif outcomes[:end].endswith("-" * failures):
            expected = "failure"
    assert play(kind, outcomes, successes, failures)[0].result == expected


@given(kinds, st.text("+-", max_size=60), counts, counts)
def test_step_returns_change_only_when_result_differs(
    kind: Kind, outcomes: str, successes: int, failures: int
) -> None:
    state = initial_state(kind)
    for outcome in outcomes:
        after, change = step(state, outcome == "+", kind, terms(successes, failures))
        assert (change is not None) == (after.result != state.result)
        assert change in (None, after.result)
        state = after
